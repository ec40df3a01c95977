"""Reads jobs of verl."""
