"""pytest-gkd: staged smoke tests for on-policy distillation and RL post-training."""

__version__ = "0.1.0"
