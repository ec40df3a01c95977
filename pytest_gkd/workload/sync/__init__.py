"""Weights pushed from the trainer into the engine."""
