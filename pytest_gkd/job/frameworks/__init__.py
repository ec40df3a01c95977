"""What each training framework makes of the words that start it."""
