"""What the environment stage checks."""
