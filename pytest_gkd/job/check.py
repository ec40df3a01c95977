"""What a launch script would start, and what its framework makes of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.columns import padded
from pytest_gkd.job import (
    documents,
    environment,
    fitting,
    model_files,
    placement,
    ray_environment,
    releases,
    script_file,
    shell,
    written_secrets,
)
from pytest_gkd.job.findings import CheckError, Finding, note
from pytest_gkd.job.frameworks import lightrft, plain
from pytest_gkd.job.frameworks.areal import reader as areal
from pytest_gkd.job.frameworks.ms_swift import reader as ms_swift
from pytest_gkd.job.frameworks.nemo_rl import reader as nemo_rl
from pytest_gkd.job.frameworks.openrlhf import reader as openrlhf
from pytest_gkd.job.frameworks.prime_rl import reader as prime_rl
from pytest_gkd.job.frameworks.reading import Framework, names
from pytest_gkd.job.frameworks.roll import reader as roll
from pytest_gkd.job.frameworks.skyrl import reader as skyrl
from pytest_gkd.job.frameworks.slime import reader as slime
from pytest_gkd.job.frameworks.trl import reader as trl
from pytest_gkd.job.frameworks.verl import reader as verl
from pytest_gkd.job.launch import ADDED, OWN_PROGRAM, Launch, Program, launches
from pytest_gkd.job.memory import Row
from pytest_gkd.job.omegaconf import MISSING as STILL_TO_BE_GIVEN
from pytest_gkd.job.overrides import Given, Override
from pytest_gkd.job.shell_values import Command, Text, Word, World
from pytest_gkd.language import marked, tr, tr_filled
from pytest_gkd.options import near

FRAMEWORKS: dict[str, Framework] = {
    "verl": verl,
    "trl": trl,
    "ms-swift": ms_swift,
    "slime": slime.Family("slime"),
    "miles": slime.Family("miles"),
    "nemo-rl": nemo_rl,
    "openrlhf": openrlhf,
    "lightrft": lightrft,
    "prime-rl": prime_rl,
    "skyrl": skyrl,
    "areal": areal,
    "roll": roll,
    "gkd": plain,
}
CONFLICT = "config.invalid-combination"
MOST_FINDINGS = 200
POSITIONAL = re.compile(r"\$\{?[1-9]")  # a script's own argument, by its number
MOST_WAYS = 3  # of a script, named in a finding
# The most words of a start, over all paths through its script: these take a second. Of
# 1,530 upstream scripts slime's run_geo3k_qwen35.sh has the most, 2,464 on 16 paths.
MOST_SAID = 4_000
Worlds = list[tuple[World, Launch]]


@dataclass
class Value:
    """One of the job's values, and where it comes from.

    ``source`` is user, default or undetermined; ``alternatives`` are then its possible
    values, each with the branch that it depends on, or what would determine it.
    """

    value: Any
    source: str
    file: str = ""
    line: int = 0
    expression: str = ""
    alternatives: list[str] = field(default_factory=list)


@dataclass
class Checked:
    """The verdict on a job.

    ``release_by`` says what chose the release, ``started_in`` and ``lines`` where the
    training is started, ``no_memory_plan`` why ``memory`` is empty.
    """

    framework: str
    release: str
    release_by: str
    script: str
    lines: list[int]
    values: dict[str, Value]
    findings: list[Finding]
    memory: list[Row] = field(default_factory=list)
    no_memory_plan: str = ""
    started_in: str = ""

    def to_json(self) -> dict[str, Any]:
        """As ``gkd check --format=json`` prints it."""
        findings = [finding._asdict() for finding in self.findings]
        return {"schema": 1, **asdict(self), "findings": findings}


def variables(texts: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a mapping, with HOME. Raises CheckError for others."""
    given = {"HOME": str(Path.home())}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise CheckError(f"--set={text}: expected NAME=VALUE")
        given[name] = value
    return given


def check(
    job: str | Path,
    overrides: Sequence[str] = (),
    framework: str = "",
    given: Mapping[str, str] | None = None,
    machine: fitting.Machine = fitting.ANY,
    added: Sequence[str] = (),
) -> Checked:
    """Read the job of a launch script or a configuration; nothing of it is executed.

    ``job`` is its path, or a command as it would be typed into a shell. ``overrides``
    are the script's own arguments ("$@"), ``framework`` is as in ``--framework``,
    ``given`` are variables that are set when the script starts, ``machine`` is what it
    is to run on. ``added`` are further arguments of the start itself, each of one or
    more words; findings give their numbers as lines. Raises CheckError if there is no
    job of a known framework.
    """
    try:
        return _checked(job, overrides, framework, given or {}, machine, added)
    except CheckError as error:
        raise CheckError(written_secrets.in_error(error, [str(job)])) from None


def _checked(
    job: str | Path,
    overrides: Sequence[str],
    framework: str,
    given: Mapping[str, str],
    machine: fitting.Machine,
    added: Sequence[str],
) -> Checked:
    asked, _, asked_release = framework.partition("==")
    if asked and asked not in FRAMEWORKS:
        known = ", ".join(FRAMEWORKS)
        raise CheckError(f"--framework={framework}: known frameworks are {known}")
    findings: list[Finding] = []
    is_whole = True
    path, typed, whole = Path(job), "", ""
    if " " in str(job).strip() and not path.exists():
        path, typed = Path("the command"), str(job)
    if path.suffix in documents.SUFFIXES:
        starts = [(World(), _document(path, overrides, asked))]
    else:
        raw = typed or script_file.text_of(path)
        try:
            script = shell.read(path, given, overrides, typed)
        except RecursionError:
            raise CheckError(f"{path} is nested deeper than can be followed") from None
        starts, *later = _jobs(path, script, asked)
        is_whole = script.is_whole
        is_read = POSITIONAL.search(script.text) is not None
        if overrides and not (is_read or any(_hands_on(one) for _, one in starts)):
            text = f"{path} does not pass its own arguments on: those given are ignored"
            findings.append(Finding(CONFLICT, "warning", text, str(path), 0, ""))
        findings += script_file.losses(path, raw, script.lost)
        whole = script.text
        findings += _unread(path, whole, given)
        findings += [note(text, file, line) for file, line, text in script.remarks]
        for others in later:
            command = others[0][1].command
            text = f"another job, started on line {command.line}, is not checked"
            findings.append(note(text, command.file, command.line))
    more = tuple(
        Word(Text(part), ADDED, number, part)
        for number, text in enumerate(added, 1)
        for part in text.split()
    )
    starts = [(world, launch.with_arguments(more)) for world, launch in starts]
    followed = _followed(starts)
    if len(followed) < len(starts):
        is_whole = False
        text = f"only {len(followed)} of {len(starts)} ways through the script are "
        text += f"checked: the starts have more than {MOST_SAID:,} words"
        findings.append(note(text, str(path), 0))
    starts = followed
    start = starts[0][1]
    name = start.framework
    reader = FRAMEWORKS[name]
    release, chosen_by, problems = releases.judge(
        name, asked_release, start.name, start.options
    )
    findings += [note(problem, str(path), 0) for problem in problems]
    read, told = [], list[tuple[World, list[Finding]]]()
    files, private = dict[str, None](), dict[str, None]()
    recipes, unplanned = list[fitting.Recipe | None](), ""
    for world, launch in starts:
        with model_files.in_caches_of(launch.command.environment):
            reading = reader.read(launch, release)
        recipes.append(reading.recipe)
        unplanned = unplanned or reading.problem
        read.append((world, reading.values))
        found = [*reading.findings, *_twice(reading.said), *_uncertain(reading.said)]
        found += environment.findings(launch, reading, whole)
        place = launch.command.file, launch.command.line
        found += placement.findings(reading.pools, machine, *place)
        found += ray_environment.findings(launch, reading, release, whole)
        words: list[Word | None] = [one.word for one in reading.said]
        words += [given.word for given in reading.values.values()]
        words += [w for c in (launch.command, *launch.beside) for w in c.words]
        files |= dict.fromkeys(written_secrets.files_of(words))
        set_in = [w for c in launch.beside for w in c.environment.values()]
        private |= dict.fromkeys(written_secrets.files_of(set_in))
        if reading.problem:
            found.append(note(reading.problem, *place))
        told.append((world, found))
    told_names = dict.fromkeys(name for _, values in read for name in values)
    values = {name: _merged(name, read) for name in told_names}
    if not is_whole:
        for value in values.values():
            value.source, value.value = "undetermined", None
            value.alternatives = ["the script was not followed to its end"]
    lines = sorted({launch.command.line for _, launch in starts})
    certain = {n: v.value for n, v in values.items() if v.source != "undetermined"}
    certain["release"] = release.rules
    whose = f"{name}'s {start.name}" if start.name else f"a job of {name}"
    unplanned = unplanned or f"the memory of {whose} is not known yet"
    with model_files.in_caches_of(start.command.environment):
        plan, reason, wrong = fitting.judge(
            certain, recipes, machine, start.command.file, lines[0], unplanned
        )
    findings += [*_on_ways(told), *wrong, *_absent(values)]
    findings = list(dict.fromkeys(findings))[:MOST_FINDINGS]
    judged = name, str(release), chosen_by, str(path), lines
    secrets, unsaid = written_secrets.in_files([str(path), *files], private)
    checked = Checked(*judged, values, [*findings, *secrets], plan, reason)
    checked.started_in = start.command.file
    return _without(checked, written_secrets.hiding(unsaid))


def _absent(values: Mapping[str, Value]) -> Iterator[Finding]:
    """The train files that the job gives with their whole paths and that are not here.

    Notes, since they may lie where the job will run.
    """
    files = values.get("train_files")
    if files is None or files.source != "user":
        return
    given = files.value if isinstance(files.value, list) else [files.value]
    for path in map(str, given):
        # ms-swift takes a part of a file after a #, slime after an @.
        path = re.split(r"#|@\[", path)[0]
        if path.startswith("/") and not script_file.exists(path):
            text = f"{path}: there is no such file here"
            yield note(text, files.file, files.line)


def _without(checked: Checked, hide: Callable[[Any], Any]) -> Checked:
    """The same, with the secrets in the job's files redacted."""
    for value in checked.values.values():
        value.value, value.expression = hide(value.value), hide(value.expression)
        value.alternatives = hide(value.alternatives)
    checked.findings = [
        finding._replace(message=hide(finding.message), key=hide(finding.key))
        for finding in checked.findings
    ]
    checked.no_memory_plan = hide(checked.no_memory_plan)
    return checked


def _unread(path: Path, raw: str, given: Iterable[str]) -> Iterator[Finding]:
    """Variables given with ``--set`` that a script never names; none if it sources."""
    if re.search(r"(?m)(^|[\s;&|(])(source|\.)\s", raw):
        return
    known = sorted(set(re.findall(r"\$\{?[#!]?([A-Za-z_]\w*)", raw)))
    for name in given:
        if name != "HOME" and not re.search(rf"\b{name}\b", raw):
            text = f"--set={name}: {path} does not read {name}{near(name, known)}"
            yield Finding(CONFLICT, "warning", text, str(path), 0, "")


def _hands_on(launch: Launch) -> bool:
    """Whether words of gkd's command line reach the start."""
    return any(word.file == "the command line" for word in launch.arguments)


def _document(path: Path, overrides: Iterable[str], asked: str) -> Launch:
    """A configuration file as the start of the framework whose keys it has."""
    settings = documents.settings(path)
    keys = {setting.key for setting in settings}
    fits = [name for name, reader in FRAMEWORKS.items() if reader.is_own(keys)]
    if not asked and len(fits) != 1:
        which = " or ".join(fits) or f"none of {', '.join(FRAMEWORKS)}"
        raise CheckError(
            f"{path} has the keys of {which}: name the framework with --framework=NAME"
        )
    words = tuple(Word(Text(o), "the command line", 0, o) for o in overrides)
    command = Command(words, str(path), 0)
    return Launch(asked or fits[0], path.name, words, command, path)


def _jobs(path: Path, script: shell.Script, asked: str) -> list[Worlds]:
    """The starts of a framework in order, each on all paths through a script."""
    programs = {n: Program(r.PROGRAM, r.is_own) for n, r in FRAMEWORKS.items()}
    found = [list(launches(world.commands, programs, asked)) for world in script.worlds]
    first = next((launch.framework for starts in found for launch in starts), "")
    starts = [[s for s in some if s.framework == (asked or first)] for some in found]
    if asked and not any(starts):
        # The user named the framework, so any script of theirs may be the trainer.
        own = {asked: Program(OWN_PROGRAM, programs[asked].is_own)}
        starts = [list(launches(world.commands, own, asked)) for world in script.worlds]
        # But not the framework's other programs, such as verl.trainer.sft_trainer.
        other = f"{asked}."
        starts = [
            [s for s in some if not s.program.startswith(other)] for some in starts
        ]
        # A program without options (a download, say) is no start if another has some.
        trains = [[s for s in some if _has_options(s)] for some in starts]
        starts = trains if any(trains) else starts
    most = max(map(len, starts), default=0)
    if most:
        pairs = list(zip(script.worlds, starts, strict=True))
        return [[(w, s[n]) for w, s in pairs if len(s) > n] for n in range(most)]
    words = [c.words[0] for world in script.worlds for c in world.commands]
    names = list(dict.fromkeys(word.text.value or word.source for word in words))[:8]
    packages = "|".join(FRAMEWORKS).replace("-", "_")
    modules = re.compile(rf"({packages})(\.\w+)+")
    every = [w.text.value for o in script.worlds for c in o.commands for w in c.words]
    unread = dict.fromkeys(one for one in every if one and modules.fullmatch(one))
    reasons = [f"{one} is none of the programs that are read" for one in unread][:1]
    reasons += [f"line {line}: {text}" for _, line, text in script.remarks[:3]]
    what = asked or f"one of {', '.join(FRAMEWORKS)}"
    others = f"found were {', '.join(names)}" if names else "there is no command in it"
    raise CheckError(
        f"{path}: no command was found that starts {what}; {others}"
        + "".join(f"; {reason}" for reason in reasons)
    )


def _followed(starts: Worlds) -> Worlds:
    """As many starts as MOST_SAID words allow, and always the first."""
    words = list(itertools.accumulate(len(launch.arguments) for _, launch in starts))
    return starts[: max(1, sum(said <= MOST_SAID for said in words))]


def _has_options(launch: Launch) -> bool:
    return any(word.text.shape.startswith("--") for word in launch.arguments)


# -- values ------------------------------------------------------------------------


def _merged(name: str, read: Sequence[tuple[World, dict[str, Given]]]) -> Value:
    """One value, combined from what the paths through the script make of it."""
    absent = Given("default")
    found = [(world, values.get(name, absent)) for world, values in read]
    first = found[0][1]
    options = []
    if len({repr((given.needs, given.value)) for _, given in found}) > 1:
        needs = frozenset[str]().union(
            *(condition.needs for world, _ in found for condition in world.conditions)
        )
        for world, given in found:
            branch = ", ".join(map(str, world.conditions)) or "else"
            options.append(f"{'?' if given.needs else given.value} {branch}")
        first = Given("undetermined", None, first.word, needs)
    options += [
        f"give it with --set {need}=VALUE"
        if need.isidentifier()
        else f"depends on {need}"
        for need in sorted(first.needs)
    ]
    value = Value(first.value, first.source, expression=first.expression)
    value.alternatives = list(dict.fromkeys(options))
    if first.word is not None:
        value.file, value.line = first.word.file, first.word.line
        value.expression = first.word.source
    return value


# -- faults ------------------------------------------------------------------------


def _on_ways(told: Sequence[tuple[World, list[Finding]]]) -> Iterator[Finding]:
    """Findings on all paths through a script, and those on some, with their branches.

    The latter are warnings, since the job may take another path.
    """
    ways: dict[Finding, set[int]] = {}
    # The same fault may be on all paths, with other numbers in its message.
    alike: dict[tuple[Any, ...], set[int]] = {}
    for number, (_, findings) in enumerate(told):
        for one in findings:
            ways.setdefault(one, set()).add(number)
            alike.setdefault(_kind(one), set()).add(number)
    worlds = [world for world, _ in told]
    for finding, found in ways.items():
        if len(found) == len(told):
            yield finding
            continue
        is_sure = len(alike[_kind(finding)]) == len(told) or finding.level != "error"
        level = finding.level if is_sure else "warning"
        message = f"{finding.message} ({_branches(worlds, found)})"
        yield finding._replace(level=level, message=message)


def _kind(finding: Finding) -> tuple[Any, ...]:
    return finding.cause, finding.level, finding.key, finding.line


def _branches(worlds: Sequence[World], found: AbstractSet[int]) -> str:
    """The one branch that just these paths share; else those of each."""
    for condition in worlds[min(found)].conditions:
        with_it = {n for n, world in enumerate(worlds) if condition in world.conditions}
        if with_it == found:
            return str(condition)
    each = [
        ", ".join(map(str, worlds[number].conditions)) or "else"
        for number in sorted(found)
    ]
    each = list(dict.fromkeys(each))
    more = [f"{len(each) - MOST_WAYS} more paths"] if len(each) > MOST_WAYS else []
    return "; or ".join([*each[:MOST_WAYS], *more])


def _twice(said: Iterable[Override]) -> Iterator[Finding]:
    """The same key with two values: the later one counts.

    A second value from another script is meant to override.
    """
    seen: dict[str, Override] = {}
    for override in said:
        before = seen.get(override.key)
        is_known = before and override.key and not (before.needs or override.needs)
        places = {before.word.file, override.word.file} if before else set()
        here = len(places) == 1 or "the command line" in places
        if before and here and is_known and before.value != override.value:
            where = f"on line {before.word.line}" if before.word.line else "before"
            message = (
                f"{override.key} is given twice: {before.value} {where}, then "
                f"{override.value}, which takes effect"
            )
            file, line = override.word.file, override.word.line
            yield Finding(CONFLICT, "warning", message, file, line, override.key)
        seen[override.key] = override


def _uncertain(said: Iterable[Override]) -> Iterator[Finding]:
    """Words that may be any option: what they add or change is not known."""
    for override in said:
        if not override.key:
            word = override.word
            needs = ", ".join(sorted(override.needs))
            text = f"what {word.source[:60]} adds or changes is not known: {needs}"
            yield note(text, word.file, word.line)


# -- text --------------------------------------------------------------------------

# Shown translated; a note's level is a label of every report.
_LEVELS = (marked("error"), marked("warning"))
_ORIGINS = (marked("default"), marked("undetermined"), marked("always"))


def text(checked: Checked) -> str:
    """For people: what was understood, then what is wrong."""
    one = sanitize.line
    by, number = tr_filled(checked.release_by), tr_filled(checked.release)
    release = f"{checked.framework} {number}{tr(' ({condition})').format(condition=by)}"
    lines = ", ".join(str(line) for line in checked.lines if line)
    elsewhere = checked.started_in not in ("", checked.script)
    where = f"line {lines}"
    if elsewhere:
        where = f"line {lines} of {checked.started_in}"
    begun = f"{release}, started on {where}" if lines else release
    told = [one(tr_filled(begun))]
    width = max(map(len, checked.values), default=0)
    for name, value in checked.values.items():
        if name in names(f"{checked.framework}-memory") and value.source != "user":
            continue
        said = "?" if value.source == "undetermined" else one(_shown(value.value))
        place = _place(checked, value.file, value.line)
        origin = one(_origin(place or value.expression or value.source))
        told.append(f"  {name:{width}}  {padded(said, 32)}  {origin}")
        others = map(tr_filled, value.alternatives)
        told += [f"  {'':{width}}    {one(other)}" for other in others]
    told += fitting.lines(checked.memory, one(checked.no_memory_plan))
    for finding in checked.findings:
        cause = f" [{finding.cause}]" if finding.cause else ""
        place = _place(checked, finding.file, finding.line)
        parts = (tr(finding.level), tr_filled(place), tr_filled(finding.message))
        told.append(one(tr(": ").join(filter(None, parts)) + cause))
    errors = sum(finding.level == "error" for finding in checked.findings)
    told.append(tr_filled(f"{errors} error(s)" if errors else "no error found"))
    return "\n".join(told)


def _origin(text: str) -> str:
    return tr(text) if text in _ORIGINS else tr_filled(text)


def _place(checked: Checked, file: str, line: int) -> str:
    """A line of the script or of another file, named without its folder if shared."""
    if not file or file == checked.script:
        return f"line {line}" if line else ""
    if checked.script and Path(file).parent == Path(checked.script).parent:
        file = Path(file).name
    file = tr_filled(file) if file == ADDED else file
    return f"{file}:{line}" if line else file


def _shown(value: Any) -> str:
    if value == STILL_TO_BE_GIVEN:
        return tr("must be given")
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
