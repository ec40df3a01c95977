"""Says and measures that kernels are compiled while something starts."""

from __future__ import annotations

import contextlib
import getpass
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from pytest_gkd.clock import monotonic
from pytest_gkd.processes import background
from pytest_gkd.stage_api import StageContext

# NVIDIA's and Triton's compilers, and what FlashInfer and torch build extensions with.
COMPILERS = frozenset(
    ("nvcc", "cicc", "ptxas", "fatbinary", "ninja", "cc1plus", "cc1", "clang")
)
EVERY_S = 1.0
# Compiling for at least this long is worth a note.
SLOW_S = 5.0


@dataclass(frozen=True)
class Cache:
    """Where compiled kernels are kept: the variable that moves it, its directory, and
    the paths of single kernels below that."""

    owner: str
    variable: str
    path: Path
    kernels: str

    def names(self) -> frozenset[str]:
        """The kernels in it, by their files' names; none if it cannot be read."""
        try:
            return frozenset(found.name for found in self.path.glob(self.kernels))
        except OSError:
            return frozenset()


def caches(environ: Mapping[str, str]) -> tuple[Cache, ...]:
    """Those that an engine without torch.compile of its model may write to.

    From flashinfer/jit/env.py (0.6.14), triton/knobs.py (3.9) and, for the functions
    that vLLM's sampler compiles all the same,
    torch/_inductor/runtime/cache_dir_utils.py (2.13).
    """
    try:
        home = Path(environ.get("HOME") or Path.home())
    except RuntimeError:  # there is no home directory
        home = Path("/nonexistent")
    flashinfer = Path(environ.get("FLASHINFER_WORKSPACE_BASE") or home)
    triton = Path(environ.get("TRITON_HOME") or home) / ".triton/cache"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        user = f"uid_{os.getuid()}"
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
    return (
        Cache(
            "FlashInfer",
            "FLASHINFER_WORKSPACE_BASE",
            flashinfer / ".cache/flashinfer",
            "*/*/cached_ops/*/*.so",
        ),
        Cache(
            "Triton",
            "TRITON_CACHE_DIR",
            Path(environ.get("TRITON_CACHE_DIR") or triton),
            "*/",
        ),
        Cache(
            "TorchInductor",
            "TORCHINDUCTOR_CACHE_DIR",
            Path(environ.get("TORCHINDUCTOR_CACHE_DIR") or inductor),
            "*/*.py",
        ),
    )


class CompilerWatch:
    """The compilers that run below this process, and how long any did."""

    def __init__(self, gkd: StageContext, doing: str) -> None:
        self._gkd, self._doing = gkd, doing
        self._said, self._last = doing, monotonic()
        self.seconds = 0.0
        self.names: set[str] = set()

    def look(self) -> None:
        found = compilers()
        now = monotonic()
        if found:
            self.seconds += now - self._last
            self.names.update(found)
        self._last = now
        text = self._doing
        text += f": compiling kernels ({', '.join(found)})" if found else ""
        if text != self._said:
            self._said = text
            self._gkd.step(text)


@contextlib.contextmanager
def told(gkd: StageContext, doing: str, *, on_gpu: bool) -> Iterator[None]:
    """Say what is being done, and that kernels compile while a compiler runs below us.

    A new machine compiles for minutes what later starts take from a cache: the fact
    ``compile_s`` says how long compilers ran (seconds, looked at once each), a note
    what was compiled and where it is kept. Without ``on_gpu`` nothing is compiled, and
    no thread exists when the engine forks.
    """
    gkd.step(doing)
    if not on_gpu:
        yield
        return
    places = caches(os.environ)
    before = [place.names() for place in places]
    watch = CompilerWatch(gkd, doing)
    with background.every(EVERY_S, "gkd-compiling", watch.look):
        yield
    gkd.fact("compile_s", round(watch.seconds, 1))
    if watch.seconds >= SLOW_S:
        made = [now.names() - then for now, then in zip(places, before, strict=True)]
        kept = {place: new for place, new in zip(places, made, strict=True) if new}
        gkd.note("vllm.compiled", note(watch.seconds, watch.names, kept))


def note(seconds: float, names: set[str], kept: Mapping[Cache, frozenset[str]]) -> str:
    """What was compiled, where it is kept, and how to do without."""
    which = ", ".join(sorted(names))
    text = f"{seconds:.0f} s of the start went into compilers ({which})."
    if not kept:
        return f"{text} None of the caches that are known here has grown."
    parts = [
        f"{len(new)} of {place.owner}'s in {place.path} ({place.variable} moves it)"
        for place, new in kept.items()
    ]
    text += f" New kernels: {', '.join(parts)}. The next start takes them from there: "
    text += "keep that on a disk that outlives the container."
    flashinfer = {
        name for one, new in kept.items() if one.owner == "FlashInfer" for name in new
    }
    if "sampling.so" in flashinfer:
        # The default since 0.21 at the latest (vllm/envs.py); gen_sampling_module in
        # flashinfer/jit/sampling.py names the file.
        text += " VLLM_USE_FLASHINFER_SAMPLER=0 does without FlashInfer's sampler."
    if flashinfer:
        # It is looked at before the cache (flashinfer/jit/core.py, is_aot); CUDA and
        # the command: vllm/utils/flashinfer.py and entrypoints/cli of 0.32.
        text += (
            " The package flashinfer-jit-cache, in flashinfer-python's own version and "
            "from CUDA 12.9 on, has the kernels compiled (vLLM 0.32 installs it by "
            "`vllm download-kernels`)."
        )
    return text


def compilers() -> list[str]:
    """The names of the compilers that run below this process now."""
    found = set()
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found.add(process.name())
    return sorted(found & COMPILERS)
