"""The status of a watched job in one line, as wide as the terminal."""

from __future__ import annotations

import io
import math

from rich.console import Console
from rich.text import Text

from pytest_gkd import sanitize
from pytest_gkd.language import tr, tr_filled
from pytest_gkd.watch import gpu_words
from pytest_gkd.watch.samples import (
    AT_WORK,
    JobSample,
    Progress,
    Usual,
    Verdict,
)

_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "at work": "green",
    "slow": "yellow",
    "stuck": "bold red",
    "dead": "bold red",
    "finished": "green",
    "held": "cyan",
}
SPARKS = 12


def parts(
    verdict: Verdict,
    progress: Progress,
    usual: Usual,
    now: JobSample | None,
    cpu: float,
    at: float,
) -> list[str]:
    """What there is to say, the most telling first.

    ``cpu`` is in cores, ``at`` the time now (``clock.monotonic()``).
    """
    found = []
    if progress.phase:
        spent = clock(at - progress.phase_at)
        known = usual.phases.get(progress.phase)
        told = f" (usually {clock(known)})" if known and known >= 1 else ""
        found.append(f"{progress.phase} {spent}{told}")
    if progress.step is not None:
        total = f"/{progress.total}" if progress.total else ""
        found.append(f"step {progress.step}{total}")
    if progress.step_s:
        found.append(f"{_short(progress.step_s)}/step{trend(progress.steps_s)}")
    if progress.series:
        last = progress.series[-1].value
        values = [one.value for one in progress.series]
        found.append(f"{progress.metric} {last:.4g} {sparkline(values)}")
    if now is not None:
        silent_s = at - now.output_at
        if silent_s >= 5:
            found.append(f"last output {clock(silent_s)} ago")
        if now.processes:
            found.append(f"CPU {100 * cpu:.0f} %")
        if now.gpus:
            found.append(gpu_words.in_a_line(now.gpus))
    if not found:
        found.append("started")
    if verdict.word != AT_WORK and verdict.why:
        found.insert(0, verdict.why[0])
    return [tr_filled(sanitize.line(one)) for one in found]


def line(verdict: Verdict, told: list[str], columns: int) -> str:
    """The line for a terminal, with its colours, cut to its width."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f" {tr(verdict.word)} ", style=f"reverse {_STYLES[verdict.word]}")
    text.append(" " + " · ".join(told))
    text.truncate(max(10, columns - 1), overflow="ellipsis")
    console = Console(
        file=io.StringIO(), width=columns, force_terminal=True, highlight=False
    )
    with console.capture() as capture:
        console.print(text, end="", no_wrap=True, overflow="ellipsis", soft_wrap=True)
    return capture.get()


def sparkline(values: list[float]) -> str:
    """The last values as bars between their least and their greatest."""
    shown = [one for one in values if math.isfinite(one)][-SPARKS:]
    if len(shown) < 3:
        return ""
    low, high = min(shown), max(shown)
    width = (high - low) or 1.0
    top = len(_BARS) - 1
    return "".join(_BARS[round((one - low) / width * top)] for one in shown)


def trend(steps_s: tuple[float, ...]) -> str:
    """Whether the last steps take longer or shorter than those before."""
    if len(steps_s) < 6:
        return ""
    half = len(steps_s) // 2
    before = sorted(steps_s[:half])[half // 2]
    after = sorted(steps_s[half:])[(len(steps_s) - half) // 2]
    if before <= 0 or abs(after / before - 1) < 0.15:
        return " →"
    return " ↗" if after > before else " ↘"


def clock(seconds: float) -> str:
    """A time as ``0:42`` or ``1:02:03``."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
