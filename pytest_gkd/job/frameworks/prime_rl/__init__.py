"""Reads jobs of prime-rl."""
