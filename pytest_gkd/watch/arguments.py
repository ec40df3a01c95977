"""The options of ``gkd watch``, and what is refused."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd import help_pages, time_spans
from pytest_gkd.language import tr
from pytest_gkd.watch import exits

DIRECTORY = ".gkd/watch"
_EXITS = {
    "N": "that of COMMAND, 128+N if signal N ended it",
    0: "--until-step ended it; with --pid and --log: the job finished",
    2: "usage error",
    exits.STUCK: "it was stuck, and --on-stuck=end ended it",
    exits.DEAD: "with --pid and --log: the job failed",
    exits.UNKNOWN: "with --pid and --log: it ended, and nothing tells how",
    exits.LATE: "no training step was done --within TIME",
    exits.NOT_EXECUTABLE: "COMMAND cannot be run",
    exits.NOT_FOUND: "there is no such COMMAND",
    130: "with --pid and --log: you stopped watching",
}


class WatchError(Exception):
    """What cannot be watched; the text says what, why, and what to do."""


@dataclass(frozen=True)
class Asked:
    """What the user asked for; times in seconds.

    One of ``command``, ``pid`` and ``logs`` is given, logs also with a pid.
    ``look_after_s`` is None where the job's own usual silence counts, and
    ``stuck_after_s`` where it follows from that. ``until_step`` ends the command after
    its first training step, ``within_s`` if that is not done in time.
    """

    command: tuple[str, ...] = ()
    pid: int | None = None
    logs: tuple[Path, ...] = ()
    look_after_s: float | None = None
    stuck_after_s: float | None = None
    on_stuck: str = "report"
    notify: tuple[str, ...] = ()
    directory: Path = Path(DIRECTORY)
    status: bool = True
    rules: tuple[str, ...] = ()
    until_step: bool = False
    within_s: float | None = None


def split(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The options of ``gkd watch``, and the command behind ``--``, None without one.

    argparse would take a ``--`` out of the command itself.
    """
    words = list(arguments)
    if words[:1] != ["watch"] or "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def add(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``gkd``'s parser."""
    parser: argparse.ArgumentParser = help_pages.command(
        commands,
        "watch",
        "run or follow a job, and say where it stands still and why",
        "Starts COMMAND, passes its output, input, signals and exit status on "
        "unchanged, and keeps the output in a file; or attaches to a job that runs. "
        "Nothing is ever signalled or ended without --on-stuck=end, --until-step or "
        "--within.",
        exits=_EXITS,
        examples=(
            "gkd watch -- torchrun --nproc-per-node 8 train.py",
            "gkd watch --pid 4711 --look-after=5m",
            "gkd watch --log train.log --notify='command:notify-send \"$GKD_TEXT\"'",
        ),
        see="gkd diagnose, docs/watch.md",
        usage="gkd watch [OPTIONS] -- COMMAND [ARGUMENT ...]\n"
        "       gkd watch [OPTIONS] --pid PID\n"
        "       gkd watch [OPTIONS] --log FILE [FILE ...]",
    )
    parser.add_argument("--pid", type=int, help="a process of the job; its tree counts")
    parser.add_argument(
        "--log", nargs="+", default=[], metavar="FILE", help="logs that are written to"
    )
    parser.add_argument(
        "--look-after",
        type=seconds,
        metavar="TIME",
        help="silence after which the job's processes are looked at closely, such as "
        "90, 5m (default: 2m, or what is usual for this job); never proof by itself",
    )
    parser.add_argument(
        "--stuck-after",
        type=seconds,
        metavar="TIME",
        help="how long it must then stand still to be called stuck (default: half of "
        "--look-after, 10s to 60s)",
    )
    parser.add_argument(
        "--on-stuck",
        type=_on_stuck,
        default="report",
        metavar="WHAT",
        help="report: write a report and go on watching (default); end: write it, end "
        "the command with SIGTERM, after 30 s with SIGKILL, and exit "
        f"{exits.STUCK}; command:LINE: write it, and run LINE in a shell with its "
        "directory in GKD_REPORT",
    )
    parser.add_argument(
        "--until-step",
        action="store_true",
        help="end the command once its first training step is done (its metrics are "
        'printed, or phase("training-step") ends), and exit 0: a smoke test',
    )
    parser.add_argument(
        "--within",
        type=seconds,
        metavar="TIME",
        help="if no training step is done by then, such as 30m, write a report, end "
        f"the command, and exit {exits.LATE}",
    )
    parser.add_argument(
        "--notify",
        action="append",
        type=_notify,
        default=[],
        metavar="WHOM",
        help="tell of each verdict that is not 'at work': command:LINE, a shell line "
        "with GKD_VERDICT, GKD_PHASE, GKD_WHO, GKD_TEXT and GKD_REPORT set, or "
        "https://..., which gets all but the last as JSON; repeatable",
    )
    parser.add_argument(
        "--dir",
        default=DIRECTORY,
        metavar="DIR",
        help="where the output and the reports go (default: %(default)s)",
    )
    parser.add_argument(
        "--no-status", action="store_true", help="no status line at the bottom"
    )
    parser.add_argument(
        "--rules",
        action="append",
        default=[],
        metavar="FILE",
        help="a rule of your own for the diagnosis; repeatable",
    )
    return parser


def checked(given: argparse.Namespace, command: list[str] | None) -> Asked:
    """The request. Raises WatchError where it is not one."""
    asked = [command is not None, given.pid is not None or bool(given.log)]
    if not any(asked):
        raise WatchError(
            tr(
                "watch: nothing to watch; give a command (gkd watch -- python "
                "train.py), a process (--pid 1234) or logs (--log train.log)"
            )
        )
    if all(asked):
        raise WatchError(
            tr("watch: a command and --pid or --log; give the one or the other")
        )
    if command is not None and not "".join(command[:1]):
        raise WatchError(tr("watch: no command after --"))
    ends = {
        "--on-stuck=end": given.on_stuck == "end",
        "--until-step": given.until_step,
        "--within": given.within is not None,
    }
    if command is None and (flag := next((one for one in ends if ends[one]), "")):
        told = tr(
            "watch: {option}: only a command that gkd watch started is ever ended, not "
            "what --pid or --log names; use --on-stuck=command:LINE"
        )
        raise WatchError(told.format(option=flag))
    return Asked(
        tuple(command or ()),
        given.pid,
        tuple(Path(name) for name in given.log),
        given.look_after,
        given.stuck_after,
        given.on_stuck,
        tuple(given.notify),
        Path(given.dir),
        not given.no_status,
        tuple(given.rules),
        given.until_step,
        given.within,
    )


def seconds(text: str) -> float:
    """A time such as ``90``, ``90s``, ``5m`` or ``1h``, in seconds."""
    found = time_spans.seconds(text)
    if found is None:
        raise _refused(tr("{value} is not a time above 0, such as 90, 5m or 1h"), text)
    return found


def _on_stuck(text: str) -> str:
    kind, _, line = text.partition(":")
    if text in ("report", "end") or (kind == "command" and line.strip()):
        return text
    raise _refused(tr("{value} is not report, end or command:LINE"), text)


def _notify(text: str) -> str:
    kind, _, line = text.partition(":")
    if (kind == "command" and line.strip()) or text.startswith("https://"):
        return text
    if text.startswith("http://"):
        told = tr(
            "{value}: only https, so that nobody reads what your job does; for another "
            "way use command:LINE"
        )
        raise _refused(told, text)
    raise _refused(tr("{value} is not command:LINE or https://..."), text)


def _refused(told: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(told.format(value=repr(text)))
