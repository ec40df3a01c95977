"""Reads jobs of ms-swift."""
