"""Train files, and prompts made of their rows."""
