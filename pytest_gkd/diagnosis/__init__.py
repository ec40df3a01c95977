"""Why it failed: the catalogue of causes, matched against logs. No processes."""
