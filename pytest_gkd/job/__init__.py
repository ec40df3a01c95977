"""The user's own job, read from its launch script or configuration; nothing is run."""
