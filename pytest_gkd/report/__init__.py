"""What a run found, and how it looks."""
