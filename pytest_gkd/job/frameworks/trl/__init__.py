"""Reads jobs of TRL."""
