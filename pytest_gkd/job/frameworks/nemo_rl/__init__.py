"""Reads jobs of NeMo-RL."""
