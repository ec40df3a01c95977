"""Why it failed: the catalogue of causes, and logs read against it. No processes."""
