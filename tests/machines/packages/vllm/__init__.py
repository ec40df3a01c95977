"""A build of vLLM for CUDA, as far as the environment stage asks it."""

__version__ = "0.32.0"
