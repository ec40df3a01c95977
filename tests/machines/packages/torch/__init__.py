"""A build of torch for CUDA, as far as the environment stage asks it."""

from types import SimpleNamespace

from torch import cuda, version
from torch.version import __version__

__all__ = ["_C", "__version__", "cuda", "version"]

ARCHS = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"
_C = SimpleNamespace(_cuda_getArchFlags=lambda: ARCHS)
