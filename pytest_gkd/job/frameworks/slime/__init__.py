"""Reads jobs of slime and miles."""
