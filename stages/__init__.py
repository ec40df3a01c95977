"""The stages, as ordinary pytest tests."""
