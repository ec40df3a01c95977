"""A GKD step: student, teacher, loss, optimizer."""
