"""What a run requires of this process and machine before it can start."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest

from pytest_gkd.options import SettingsError

# Set while a stage runs, for it and all it starts: stages inside a stage would start
# workers inside workers, endlessly.
IN_STAGE = "PYTEST_GKD_IN_STAGE"
# Measured: at 36, two lanes begin to fail.
LEAST_FILES = 48
LEAST_FILE_BYTES = 16 << 20  # up to a few megabytes of a stage's output are kept


def refuse_nesting() -> None:
    """Raise SettingsError inside a running stage."""
    inside = os.environ.get(IN_STAGE)
    if inside:
        raise SettingsError(
            f"stages were requested inside the running stage {inside!r} (the "
            f"variable {IN_STAGE} is set). A stage may not start stages."
        )


def refuse_surroundings() -> None:
    """Raise SettingsError if processes could not be found, or files not be written."""
    try:
        here = Path("/proc/self").readlink()
        status = Path("/proc/self/status").read_text()
    except OSError:
        raise SettingsError(
            "processes are found through /proc, which is not mounted: mount -t proc "
            "proc /proc"
        ) from None
    if here != Path(str(os.getpid())):
        raise SettingsError(
            f"/proc is that of another PID namespace (this process is {os.getpid()} "
            f"here and {here} there), so processes cannot be found through it. Mount "
            "the right one, for example with unshare --mount-proc"
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < LEAST_FILES:
        raise SettingsError(
            f"the limit of open files is {files}, and a run itself needs "
            f"{LEAST_FILES}. Raise it: ulimit -n 65536"
        )
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= limit_bytes < LEAST_FILE_BYTES:
        raise SettingsError(
            f"the file size limit is {limit_bytes >> 10} KiB, and a run itself needs "
            f"{LEAST_FILE_BYTES >> 20} MiB, its stages 1 GiB. Lift it: ulimit -f "
            "unlimited (gkd explain env.file-size-limit)"
        )
    # Not reported before Linux 4.7, nor in gVisor.
    umask = status.partition("\nUmask:")[2].split()
    mask = int(umask[0], 8) if umask else 0
    if mask & 0o700:
        raise SettingsError(
            f"the umask {mask:04o} takes away your own access to the files you create, "
            "so no report could be written. Set another one: umask 077"
        )


def hear_of_children(config: pytest.Config) -> tuple[str, ...]:
    """Ensure that exit statuses are available; notes on that for the header."""
    # Whatever started this process may have it ignore SIGCHLD, which its children
    # inherit (signal(7)): the kernel then keeps no exit statuses (waitpid(2)).
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN
    ):
        return ()
    old = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def restore() -> None:
        signal.signal(signal.SIGCHLD, old)

    config.add_cleanup(restore)
    return (
        "SIGCHLD was ignored by what started pytest; this run resets it, as exit "
        "statuses of processes would be lost. A job started the same way loses them",
    )


def refuse_plans(config: pytest.Config) -> None:
    """Raise SettingsError for options under which no stage would get a verdict."""
    option = config.option
    for name, is_given in (
        ("--setup-plan", option.setupplan),
        ("--setup-only", option.setuponly),
    ):
        if is_given:
            raise SettingsError(
                f"{name} runs no test, so no stage would get a verdict: leave the "
                f"stages out, or use --setup-show instead of {name}"
            )
    if option.trace and not _has_terminal(config):
        raise SettingsError(
            "--trace needs a terminal: a debugger without input skips the stage, which "
            "would then count as passed"
        )


def _has_terminal(config: pytest.Config) -> bool:
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)  # out and err already are
    return sys.stdin is not None and sys.stdin.isatty()
