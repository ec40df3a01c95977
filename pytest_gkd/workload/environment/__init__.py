"""The environment stage's checks."""
