"""The ``gkd`` command: diagnoses logs, explains causes, cleans up after dead runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NoReturn

from pytest_gkd import (
    __version__,
    fault_specs,
    help_pages,
    language,
    sanitize,
    usage_errors,
)
from pytest_gkd.diagnosis import catalogue as rules
from pytest_gkd.diagnosis import log_file, logs, own_rules, proofreading
from pytest_gkd.diagnosis.silence import NowError
from pytest_gkd.gpu_report import gpu_runs, result_files
from pytest_gkd.job import written_secrets
from pytest_gkd.job.findings import CheckError
from pytest_gkd.options import LANGUAGES, near
from pytest_gkd.processes import gpus, host_summary, stale_runs
from pytest_gkd.report import compare, explain, history, render
from pytest_gkd.report.record import DIRECTORY, PAGE, REPORT
from pytest_gkd.watch import arguments as watch_arguments
from pytest_gkd.watch.arguments import WatchError

INTERRUPTED = 130  # a shell's exit status for a command ended by SIGINT
HEALTHY, FOUND, UNUSABLE, UNKNOWN = 0, 1, 2, 3
# From this size on, reading takes long enough to show progress.
SLOW_BYTES = 64 << 20
REFUSALS = (log_file.LogError, NowError, rules.RuleError, LookupError, WatchError)
EXITS = {
    "healthy": HEALTHY,
    "running": HEALTHY,
    "interrupted": HEALTHY,
    "failed": FOUND,
    "hung": FOUND,
    "unknown": UNKNOWN,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    language.use(language.of_locale(LANGUAGES))
    chosen, given = _language(given)
    if chosen:
        language.use(chosen)
    parser = argument_parser()
    options, command = watch_arguments.split(given)
    asked, rest = parser.parse_known_args(options, argparse.Namespace(command=command))
    if rest:
        # argparse rejects a job's arguments if an option precedes them.
        end = rest.index("--") if "--" in rest else len(rest)
        are_options = any(word.startswith("-") for word in rest[:end])
        if are_options or not hasattr(asked, "overrides"):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        asked.overrides += rest[:end] + rest[end + 1 :]
    try:
        return int(asked.run(asked))
    except CheckError as error:
        _say_error(written_secrets.in_error(error))
        return UNUSABLE
    except REFUSALS as error:
        _say_error(str(error))
        return UNUSABLE
    except BrokenPipeError:
        # The reader (head, less) has seen enough; nothing more may be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNUSABLE


def _language(words: list[str]) -> tuple[str | None, list[str]]:
    """The language asked for, and the words without it.

    It is known before the parser, whose own texts are in it. What follows -- is a
    command of the user's.
    """
    parser = _Parser(prog="gkd", add_help=False, allow_abbrev=False)
    parser.add_argument("--lang", choices=LANGUAGES)
    end = words.index("--") if "--" in words else len(words)
    found, rest = parser.parse_known_args(words[:end])
    return found.lang, rest + words[end:]


class _Parser(argparse.ArgumentParser):
    """argparse's own, with its words and its options' help in the user's language."""

    def __init__(self, *, add_help: bool = True, **given: Any) -> None:
        super().__init__(formatter_class=help_pages.Formatter, add_help=False, **given)
        self._positionals.title = language.tr("positional arguments")
        self._optionals.title = language.tr("options")
        if add_help:
            text = "show this help message and exit"
            self.add_argument("-h", "--help", action="help", help=text)

    def add_argument(self, *names: str, **given: Any) -> argparse.Action:
        told = given.pop("help", "")
        return super().add_argument(*names, help=language.tr(told), **given)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        said = sanitize.text(usage_errors.refusal(message))
        told = language.tr("{command}: error: {problem}")
        self.exit(UNUSABLE, told.format(command=self.prog, problem=said) + "\n")


def argument_parser() -> _Parser:
    parser = _Parser(
        prog="gkd",
        description=language.tr(
            "Name what broke a distillation or RL post-training run, from its logs, "
            "and what to do about it. The stages are run by pytest --gkd-stages."
        ),
        epilog=language.tr(
            "Each command tells of its options, exit statuses and examples: gkd "
            "COMMAND --help.\n\nsee also: pytest --help (the options --gkd-...), "
            "README.md"
        ),
    )
    parser.add_argument(
        "--lang",
        choices=LANGUAGES,
        help="English or Chinese (default: the locale's, by LANGUAGE, LC_ALL, "
        "LC_MESSAGES, LANG); JSON stays English",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"gkd {__version__}",
        help="show program's version number and exit",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    command = help_pages.command(
        commands,
        "diagnose",
        "name the root cause of a failed or stuck run from its logs",
        exits={
            0: "the run is healthy, at work, or was interrupted from outside",
            1: "a cause or a hang was found",
            2: "a log could not be read (even if others could), or usage error",
            3: "unknown",
        },
        examples=(
            "gkd diagnose train.log",
            "gkd diagnose logs/ --plot",
            "kubectl logs job/train | gkd diagnose - --format=json",
        ),
        see="gkd explain, gkd watch, docs/diagnose.md",
    )
    command.add_argument(
        "logs",
        nargs="+",
        metavar="LOG",
        help="a log file, plain, gzip, bzip2, xz or zstd, or a directory of them; - is "
        "standard input; several files are several ranks of one job, but rotated ones "
        "(train.log.1, train.log) one log",
    )
    command.add_argument(
        "--now",
        default="",
        metavar="TIME",
        help="the time now in the log's own clock, such as 10:41 or '2026-11-21 "
        "10:41': how long a copy of a log has been silent; that of a file that is "
        "being written is known",
    )
    command.add_argument(
        "--plot", action="store_true", help="draw the metrics over time as well"
    )
    _add_common(command)
    command.set_defaults(run=_diagnose)

    command = help_pages.command(
        commands,
        "explain",
        "print what is known about a cause",
        exits={0: "printed", 2: "no such cause, or usage error"},
        examples=(
            "gkd explain comm.collective-timeout",
            "gkd explain --list",
        ),
        see="gkd diagnose, docs/causes/README.md, docs/own-rules.md",
    )
    command.add_argument("cause", nargs="?", help="its id, such as comm.peer-died")
    command.add_argument(
        "--list", action="store_true", help="list every cause with its title"
    )
    _add_common(command)
    command.set_defaults(run=_explain)

    command = help_pages.command(
        commands,
        "faults",
        "list the faults that pytest --gkd-inject=NAME can inject",
        exits={0: "printed", 2: "usage error"},
        examples=(
            "gkd faults",
            "pytest --gkd-stages --gkd-inject=weight_sync:dropped-update",
        ),
        see="docs/faults.md",
    )
    _add_format(command)
    command.set_defaults(run=_faults)

    command = help_pages.command(
        commands,
        "clean",
        "clean up what dead runs of pytest --gkd-stages left behind",
        "Processes, shared memory and directories that a run recorded and "
        "that have not changed since; runs still in progress are left alone. Shows "
        "what it would do, and does it only with --yes.",
        exits={
            0: "nothing of a dead run is left",
            1: "something is (also without --yes)",
            2: "usage error",
        },
        examples=("gkd clean", "gkd clean --yes"),
        see='docs/running.md, "When a run is killed"',
    )
    command.add_argument("--yes", action="store_true", help="do it")
    _add_format(command)
    command.set_defaults(run=_clean)

    command = _add_job(
        commands,
        "check",
        _job,
        ("text", "json"),
        "show what a job would start, and what is wrong with it",
        "Reads a launch script for bash or a configuration file without running any of "
        "it: the command that starts the training, the values it passes, each with its "
        "line, and what the framework's release makes of them.",
        exits={
            0: "no errors found",
            1: "errors found",
            2: "no job could be read, or usage error",
        },
        examples=(
            "gkd check run.sh",
            "gkd check run.sh trainer.nnodes=2 --machine=nodes=2,gpus=8",
            "gkd check distillation.yaml --framework=verl==0.9.0 --format=json",
        ),
        see="gkd debug-config, docs/jobs.md, docs/memory.md",
    )
    command.add_argument(
        "--machine",
        default="",
        metavar="KEY=VALUE,...",
        help="the machine to check against, such as nodes=2,gpus=8,memory=79.1GiB, "
        "with the memory of one GPU (default: the smallest GPU here)",
    )
    _add_job(
        commands,
        "debug-config",
        _debug_config,
        ("text", "args", "json"),
        "print overrides that reduce a job to its smallest meaningful run",
        "One short, eager step of the smallest batch, nothing saved or logged, with a "
        "reason for each override; parallel sizes, sharding and transports stay.",
        exits={0: "printed", 2: "no job could be read, or usage error"},
        examples=(
            "gkd debug-config run.sh",
            "gkd debug-config run.sh --format=args",
        ),
        see="gkd check, gkd tiny-data, docs/jobs.md",
    )

    command = help_pages.command(
        commands,
        "tiny-data",
        "write the smallest representative slice of a train file",
        "Keeps the shortest, the longest and the typical row, one of each "
        "kind (columns that are empty, types, roles), and evenly spaced rows, with the "
        "file's schema. The file itself is only read.",
        exits={
            0: "written",
            2: "the file cannot be read, the output exists, or usage error",
        },
        examples=(
            "gkd tiny-data train.parquet",
            "gkd tiny-data train.jsonl --rows=8 --output=few.jsonl",
        ),
        see="gkd debug-config",
    )
    command.add_argument("file", metavar="FILE", help="parquet, JSON lines, CSV, Arrow")
    command.add_argument(
        "--rows", type=_count, default=16, metavar="N", help="at most (default: 16)"
    )
    command.add_argument(
        "--output", metavar="FILE", help="default: NAME.tiny.SUFFIX in this directory"
    )
    _add_format(command)
    command.set_defaults(run=_tiny_data)

    command = help_pages.command(
        commands,
        "warm",
        "read a model's files into the page cache, and report how fast that was",
        "The next start then reads them from memory. The first call "
        "measures the disk or network, a second one memory.",
        exits={0: "read", 2: "it cannot be read, or usage error"},
        examples=("gkd warm /models/student",),
        see="docs/jobs.md",
    )
    command.add_argument("model", metavar="MODEL", help="a directory or a file")
    _add_format(command)
    command.set_defaults(run=_warm)

    command = help_pages.command(
        commands,
        "env",
        "print what to paste into an issue: system, GPUs, versions",
        exits={0: "printed", 2: "usage error"},
        examples=("gkd env", "gkd env --debug > debug.sh"),
        see="gkd bundle",
    )
    command.add_argument(
        "--debug",
        action="store_true",
        help="print instead the variables that make the next attempt tell more, as "
        "export lines, each true for the installed releases, with its cost",
    )
    _add_format(command)
    command.set_defaults(run=_env)

    command = help_pages.command(
        commands,
        "report",
        "compare a run with an earlier one, or with those kept beside it",
        "What changed in outcomes, times, measured numbers, versions and "
        "settings. With one report, times and bandwidth are held against the last "
        f"{compare.LIKE} runs like it (same layout, GPUs, ranks, student and kind of "
        "machine), or against those kept beside it while there are fewer than "
        f"{compare.LEAST_LIKE}.",
        exits={
            0: "nothing is worse",
            1: f"a stage no longer passes, or takes {compare.TWICE:g} times as long as "
            "in the last like runs or has half the bandwidth "
            f"({compare.CHANGED:g} times as long as EARLIER or those kept)",
            2: "there is no report to read, or usage error",
        },
        examples=(
            "gkd report",
            "gkd report .gkd/last .gkd/runs/20261126-091500",
            "gkd report --html",
            "gkd report --html train.log",
        ),
        see="gkd bundle",
    )
    command.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="a report's directory, or its report.json, and the one to compare it with "
        f"(default: {DIRECTORY} and those kept); with --html also a standstill's "
        "directory of gkd watch, or logs of one run",
    )
    command.add_argument(
        "--html",
        action="store_true",
        help="write report.html instead, one page with all of it: beside the report, "
        "and of logs, with their metrics over time, in this directory",
    )
    command.add_argument(
        "--output", type=Path, metavar="FILE", help="with --html: where the page goes"
    )
    _add_common(command)
    command.set_defaults(run=_report)

    command = help_pages.command(
        commands,
        "bundle",
        "gather in one archive, without secrets, what a helper needs to see",
        "The last report, each LOG's beginning, end and error regions, its "
        "diagnosis, stacks, flight records, versions, GPUs, Ray, the kernel's lines. "
        "Nothing is sent anywhere. Secrets are redacted, and redacted.txt in the "
        "archive lists where; read it before you hand the archive on. Prints a summary "
        "in Markdown for an issue.",
        exits={
            0: "the archive holds all that was named",
            1: "something named is missing (missing.txt in it says why)",
            2: "nothing was written",
            130: "interrupted",
        },
        examples=(
            "gkd bundle train.log run.sh",
            "gkd bundle --report=.gkd/watch logs/ --anonymous --output=issue.tar.gz",
        ),
        see="gkd env, docs/bundle.md",
    )
    command.add_argument(
        "logs",
        nargs="*",
        metavar="LOG",
        help="logs, directories of them, launch scripts, configurations; a short file "
        "is taken whole",
    )
    command.add_argument(
        "--report",
        metavar="DIR",
        help="a report of pytest --gkd-stages or of gkd watch (default: .gkd/last)",
    )
    command.add_argument(
        "--output",
        metavar="FILE",
        help="a new file (default: gkd-bundle-TIME.tar.gz in this directory)",
    )
    command.add_argument(
        "--pid",
        type=_count,
        action="append",
        default=[],
        help="also the stacks of this process and those below it, each of which that "
        "stops for some milliseconds; repeatable",
    )
    command.add_argument(
        "--limit",
        type=_count,
        default=16,
        metavar="MIB",
        help="size of all texts before they are packed (default: %(default)s)",
    )
    command.add_argument(
        "--anonymous",
        action="store_true",
        help="replace names of users, hosts and homes, mail and network addresses",
    )
    _add_common(command)
    command.set_defaults(run=_bundle)

    command = help_pages.command(
        commands,
        "gpu-report",
        "run everything that needs a GPU, and keep the results in a file to share",
        "The stages in each layout that fits this machine, once with cold "
        "and once with warm kernel caches, the other loss, the faults that need a GPU "
        f"and, where it is on PATH, nccl-tests' {gpu_runs.NCCL_TESTS}. Writes a new "
        "file DIR/<gpu>-<vllm>-<torch>.json, without names of hosts and users, paths "
        "and variables.",
        exits={
            0: "everything ended as expected",
            1: "something did not",
            2: "no GPU can be used here, or usage error",
            130: "interrupted; the file has the results so far",
        },
        examples=("gkd gpu-report", "gkd gpu-report --only=colocated,split"),
        see="docs/gpu-results.md",
    )
    command.add_argument(
        "--output",
        default=result_files.DIRECTORY,
        metavar="DIR",
        help="where the file goes (default: %(default)s)",
    )
    command.add_argument(
        "--only",
        default="",
        metavar="NAME,...",
        help="only the runs that begin so, such as colocated,split,'fault vllm'; the "
        "first lines of output name all",
    )
    command.set_defaults(run=_gpu_report)

    watch_arguments.add(commands).set_defaults(run=_watch)

    command = help_pages.command(
        commands,
        "completion",
        "print what bash, zsh or fish needs to complete gkd's arguments",
        "A script with subcommands, options, causes and files; it calls gkd no more.",
        exits={0: "printed", 2: "usage error"},
        examples=(
            "gkd completion bash > ~/.local/share/bash-completion/completions/gkd",
        ),
        see="docs/diagnose.md",
    )
    command.add_argument(
        "shell", choices=("bash", "zsh", "fish"), help="the one you type in"
    )
    command.set_defaults(run=_completion)

    command = help_pages.command(
        commands,
        "rules",
        "check advice files of your own",
        exits={0: "all are good", 1: "one is not", 2: "usage error"},
        examples=("gkd rules check own.toml",),
        see="gkd rules check, docs/own-rules.md",
    )
    actions = command.add_subparsers(metavar="ACTION", required=True)
    check = help_pages.command(
        actions,
        "check",
        "say what is wrong with a rule, and where",
        exits={0: "all are good", 1: "one is not", 2: "usage error"},
        examples=("gkd rules check own.toml",),
        see="docs/own-rules.md",
    )
    check.add_argument(
        "files", nargs="+", metavar="FILE", help="a TOML file with one cause"
    )
    check.set_defaults(run=_check)
    return parser


def _add_format(command: argparse.ArgumentParser, *formats: str) -> None:
    command.add_argument(
        "--format",
        choices=formats or ("text", "json"),
        default="text",
        help="of what is printed (default: %(default)s)",
    )


def _add_common(command: argparse.ArgumentParser) -> None:
    _add_format(command)
    command.add_argument(
        "--rules",
        action="append",
        default=[],
        metavar="FILE",
        help="a rule of your own, in addition to the built-in ones; repeatable",
    )


def _catalogue(asked: argparse.Namespace) -> rules.Catalogue:
    return rules.load([*own_rules.installed(), *(Path(name) for name in asked.rules)])


def _diagnose(asked: argparse.Namespace) -> int:
    catalogue = _catalogue(asked)
    if "-" in asked.logs and sys.stdin is None:
        raise log_file.LogError(language.tr("standard input: is closed; name a file"))
    sources: list[Path | IO[bytes]] = [
        # Unbuffered: a thread may still be waiting on it when this process ends.
        Path(name) if name != "-" else os.fdopen(0, "rb", 0, closefd=False)
        for name in asked.logs
    ]
    try:
        report = logs.examine(sources, catalogue, _progress(), asked.now)
    except KeyboardInterrupt:
        raise log_file.LogError(
            language.tr(
                "interrupted, without a verdict: a pipe is read until its writer ends; "
                "for a log that is still being written, name the file, which is read "
                "as far as it goes"
            )
        ) from None
    finally:
        _end_progress()
    text = render.log_text(report)
    if asked.plot:
        text += "\n" + render.plot(report)
    _answer(asked, report.to_json(), text)
    for text in report.unreadable:
        _say_error(text)
    return UNUSABLE if report.unreadable else EXITS[report.verdict]


def _progress() -> Callable[[int], None] | None:
    """A megabyte counter for a terminal; silent elsewhere and for small files."""
    if not sys.stderr.isatty():
        return None

    def show(done: int) -> None:
        if done >= SLOW_BYTES:
            sys.stderr.write(f"\rread {done >> 20} MiB ")
            sys.stderr.flush()

    return show


def _end_progress() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _explain(asked: argparse.Namespace) -> int:
    catalogue = _catalogue(asked)
    if asked.list:
        titles = {rule.id: rule.title for rule in catalogue.values()}
        causes = {"schema": 1, "causes": titles}
        return _answer(asked, causes, explain.list_text(catalogue))
    if asked.cause is None:
        _say_error(
            language.tr("explain: name a cause, or ask for all of them with --list")
        )
        return UNUSABLE
    if asked.cause not in catalogue:
        hint = language.tr(language.tr_filled(near(asked.cause, catalogue)))
        others = explain.near_causes(asked.cause, catalogue)
        none = language.tr("explain: there is no cause {cause}{hint}")
        told = [none.format(cause=repr(asked.cause), hint=hint)]
        told += [f"  {rule.id}  {language.tr(rule.title)}" for rule in others]
        _say_error("\n".join(told))
        return UNUSABLE
    rule = catalogue[asked.cause]
    return _answer(asked, explain.cause_json(rule), explain.cause_text(rule))


def _faults(asked: argparse.Namespace) -> int:
    found = fault_specs.load().values()
    return _answer(asked, explain.faults_json(found), explain.faults_text(found))


def _add_job(
    commands: Any,
    name: str,
    run: Any,
    formats: tuple[str, ...],
    *summary_and_details: str,
    **texts: Any,
) -> argparse.ArgumentParser:
    """A command that reads the user's own job."""
    command: argparse.ArgumentParser = help_pages.command(
        commands, name, *summary_and_details, **texts
    )
    command.add_argument(
        "script", metavar="FILE", help="a launch script for bash, YAML, JSON or TOML"
    )
    command.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="arguments for the script"
    )
    command.add_argument(
        "--framework",
        default="",
        metavar="NAME==RELEASE",
        help="the framework and the release to check against (default: the installed "
        "one, else the newest known)",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable set for the script; repeatable",
    )
    _add_format(command, *formats)
    command.set_defaults(run=run)
    return command


def _job(asked: argparse.Namespace) -> int:
    # Imported only here: its parser is a package of its own.
    from pytest_gkd.job import check, fitting

    given = check.variables(asked.set)
    machine = fitting.machine(asked.machine)
    if machine.memory is None:
        # The driver reports none for a GPU that shares the host's memory.
        here = [card.total_bytes for card in gpus.usable().cards]
        machine = replace(machine, memory=min(filter(None, here), default=None))
    found = check.check(asked.script, asked.overrides, asked.framework, given, machine)
    _answer(asked, found.to_json(), check.text(found))
    return FOUND if any(f.level == "error" for f in found.findings) else HEALTHY


def _clean(asked: argparse.Namespace) -> int:
    runs = stale_runs.clean(yes=asked.yes)
    told = stale_runs.to_json(runs, yes=asked.yes)
    _answer(asked, told, stale_runs.report_text(runs, yes=asked.yes))
    return stale_runs.exit_status(runs, yes=asked.yes)


def _debug_config(asked: argparse.Namespace) -> int:
    from pytest_gkd.job import check, debug_config

    given = check.variables(asked.set)
    small = debug_config.smallest(
        lambda more=(), added=(): check.check(
            asked.script,
            [*asked.overrides, *more],
            asked.framework,
            given,
            added=added,
        )
    )
    told = small.arguments() if asked.format == "args" else debug_config.text(small)
    return _answer(asked, small.to_json(), told)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        told = language.tr("{value} is not a whole number above 0")
        raise argparse.ArgumentTypeError(told.format(value=repr(text)))
    return int(text)


def _tiny_data(asked: argparse.Namespace) -> int:
    from pytest_gkd.job import tiny_data

    path = Path(asked.file)
    output = Path(asked.output or f"{path.stem}.tiny{path.suffix}")
    found = tiny_data.write(path, output, asked.rows)
    return _answer(asked, found.to_json(), tiny_data.text(found))


def _warm(asked: argparse.Namespace) -> int:
    from pytest_gkd.job import warm

    last = 0

    def told(done: int, total: int) -> None:
        nonlocal last
        percent = 100 * done // max(1, total)
        if sys.stderr.isatty() and percent != last:
            last = percent
            bar = "#" * (percent // 4)
            sys.stderr.write(f"\r[{bar:25}] {percent:3} % of {total / 1e9:.2f} GB")
            sys.stderr.flush()

    found = warm.read(Path(asked.model), told)
    if last:
        sys.stderr.write("\n")
    return _answer(asked, found.to_json(), warm.text(found))


def _env(asked: argparse.Namespace) -> int:
    if asked.debug:
        # Only here: it reads what was recorded of ten libraries.
        from pytest_gkd.job import debug_variables

        found = debug_variables.advice()
        return _answer(asked, found.to_json(), found.text())
    lines = [*host_summary.lines()]
    return _answer(asked, {"schema": 1, "lines": lines}, "\n".join(lines))


def _report(asked: argparse.Namespace) -> int:
    if asked.html:
        return _page(asked)
    path, *before = asked.paths or [Path(DIRECTORY)]
    if len(before) > 1 or asked.output:
        _say_error(
            language.tr("report: without --html it takes two reports and no --output")
        )
        return UNUSABLE
    after = compare.read(path)
    if before:
        found = compare.compare(after, [compare.read(before[0])])
    else:
        runs = history.of_report(path)
        found = compare.compare(after, compare.kept(path), runs)
        if not found.before and not runs:
            alone = language.tr(
                "{report}: no earlier run is kept beside it; name one to compare with: "
                "gkd report DIR EARLIER"
            )
            raise compare.ReportError(alone.format(report=after.name))
    _answer(asked, found.to_json(), compare.text(found))
    return FOUND if found.worse else 0


def _page(asked: argparse.Namespace) -> int:
    # Only here: they render with a package of its own.
    from pytest_gkd.report import log_page, page, page_file, standstill_page

    path, *more = asked.paths or [Path(DIRECTORY)]
    folder, status, unread = path if path.is_dir() else path.parent, 0, []
    if more or (path.exists() and path.name != REPORT and _has_no_report(path)):
        told = logs.examine(asked.paths, _catalogue(asked), _progress())
        _end_progress()
        text = log_page.html(told, [str(one) for one in asked.paths])
        unread, folder = list(told.unreadable), Path()
        status = UNUSABLE if unread else 0
    elif standstill := standstill_page.read(folder):
        text = standstill_page.html(standstill, folder)
    else:
        before, runs = compare.kept(path), history.of_report(path)
        text = page.html(compare.read(path), folder, before, runs)
    output = asked.output or folder / PAGE
    try:
        page_file.write(text, output.parent.resolve() / output.name)
    except OSError as error:
        cannot = language.tr("{file}: cannot be written: {why}")
        why = cannot.format(file=output, why=error.strerror)
        raise compare.ReportError(why) from None
    _say(str(output))
    for line in unread:
        _say_error(line)
    return status


def _has_no_report(path: Path) -> bool:
    """Whether it is a log, or a directory that can only be one of logs."""
    if not path.is_dir():
        return True
    return not (path / REPORT).exists() and any(path.iterdir())


def _bundle(asked: argparse.Namespace) -> int:
    # Imported only here: it uses nearly everything else.
    from pytest_gkd.bundle import archive, collectors, make_bundle

    if asked.format == "json":
        language.use(language.ENGLISH)  # the summary is part of it
    name = f"gkd-bundle-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.tar.gz"
    wanted = collectors.Asked(
        report=Path(asked.report or DIRECTORY),
        wants_report=asked.report is not None,
        logs=tuple(map(Path, asked.logs)),
        pids=tuple(asked.pid),
        rules=tuple(map(Path, asked.rules)),
        limit_bytes=asked.limit << 20,
    )
    try:
        made = make_bundle.make(
            wanted, Path(asked.output or name), anonymous=asked.anonymous
        )
    except archive.OutputError as error:
        _say_error(f"bundle: {error}")
        return UNUSABLE
    except KeyboardInterrupt:
        _say_error(language.tr("bundle: interrupted, nothing was written"))
        return INTERRUPTED
    _answer(asked, made.to_json(), made.summary)
    for one in made.missing:
        what = language.tr_filled(f"{one.what}: {one.why}")
        _say_error(language.tr("missing: {what}").format(what=what))
    told = language.tr(
        "wrote {file} ({size} MB, {files} files, {places} places redacted); read "
        "redacted.txt in it before you hand it on"
    )
    _say_error(
        told.format(
            file=made.output,
            size=f"{made.size_bytes / 1e6:.2f}",
            files=len(made.files),
            places=len(made.redacted),
        )
    )
    return 0 if made.is_whole else FOUND


def _gpu_report(asked: argparse.Namespace) -> int:
    try:
        only = [name.strip() for name in asked.only.split(",") if name.strip()]
        return 0 if gpu_runs.make(Path(asked.output), _say, only) else FOUND
    except gpu_runs.NotHereError as error:
        _say_error(f"gpu-report: {error}")
        return UNUSABLE
    except KeyboardInterrupt:
        _say_error(language.tr("gpu-report: interrupted"))
        return INTERRUPTED


def _watch(asked: argparse.Namespace) -> int:
    # Imported only here: it renders with a package of its own.
    from pytest_gkd.watch import watch_job

    request = watch_arguments.checked(asked, asked.command)
    for name in request.rules:  # hours before they are needed
        rules.read_rule(Path(name))
    return watch_job.run(request)


def _completion(asked: argparse.Namespace) -> int:
    # Imported only here: it is made by a package of its own.
    from pytest_gkd import completion

    causes = rules.load(own_rules.installed())
    sys.stdout.write(completion.script(argument_parser(), asked.shell, causes))
    return 0


def _check(asked: argparse.Namespace) -> int:
    found = proofreading.check(Path(name) for name in asked.files)
    for path, wrong in found.items():
        good = language.tr("{file}: good").format(file=path)
        _say("\n".join(map(language.tr_filled, wrong)) if wrong else good)
    return FOUND if any(found.values()) else 0


def _answer(asked: argparse.Namespace, data: dict[str, Any], text: str) -> int:
    """Print it in the requested format; returns 0 as a default exit status."""
    if asked.format == "json":
        text = json.dumps(sanitize.data(data), indent=2, ensure_ascii=False)
    _say(text)
    return 0


def _say(text: str) -> None:
    sys.stdout.write(sanitize.text(text) + "\n")
    sys.stdout.flush()


def _say_error(text: str) -> None:
    for line in sanitize.text(text).splitlines():
        sys.stderr.write(f"gkd: {language.tr_filled(line)}\n")


if __name__ == "__main__":
    sys.exit(main())
