"""The seven stages, as ordinary pytest tests."""
