"""What a launch script would start, and what its framework makes of it."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.job import script_file, shell
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.launch import Launch, launches
from pytest_gkd.job.overrides import Given, Job, Override, parsed
from pytest_gkd.job.shell_values import EMPTY, Text, World
from pytest_gkd.options import near

HERE = Path(__file__).parent
SCHEMAS = HERE / "schemas"
DEFAULT_ENGINE = "dp"
UNKNOWN = "config.unknown-option"
CONFLICT = "config.invalid-combination"
# Hydra's own keys, and sections that go to a function or another library as they are.
FREE = re.compile(
    r"model_engine|[\w/-]+@[\w.]+|hydra[/.].*|.*\b(?:\w*kwargs|override_\w+)\..*"
)
CONFIG_NAME = re.compile(r"ppo_(?:(\w+)_)?trainer(?:\.yaml)?")
CONFIG_OPTIONS = re.compile(
    r"(?P<option>--config-name|--config-path|-cn|-cp|-cd)=?(.*)"
)
ENGINES = ("dp", "megatron", "veomni", "torchtitan")
TEACHERS = "distillation.teacher_models"
TEACHER = re.compile(r"^(distillation\.teacher_models\.)\w+(\..*)?$")
OLD_TEACHER = "actor_rollout_ref.ref.model.path"
# Near names are looked for so often; that takes milliseconds each.
MOST_NEAR = 20
MOST_FINDINGS = 200
Worlds = list[tuple[World, Launch]]


@dataclass
class Value:
    """One value of the job, and where it comes from.

    ``source`` is user, default or undetermined; ``alternatives`` are then what it may
    be, each with the branch that it hangs on, or what would tell.
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

    ``release_by`` says who chose the release, ``lines`` where the training is started.
    """

    framework: str
    release: str
    release_by: str
    script: str
    lines: list[int]
    values: dict[str, Value]
    findings: list[Finding]

    def to_json(self) -> dict[str, Any]:
        """As ``gkd check --format=json`` prints it."""
        findings = [finding._asdict() for finding in self.findings]
        return {"schema": 1, **asdict(self), "findings": findings}


def check(
    path: Path,
    overrides: Iterable[str] = (),
    release: str = "",
    given: Mapping[str, str] | None = None,
) -> Checked:
    """Read the job of a launch script; nothing of it is executed.

    ``overrides`` are what is given to the script ("$@"), ``given`` variables that it
    finds set. Raises CheckError where there is no job of a known framework.
    """
    raw = script_file.text_of(path)
    try:
        script = shell.read(path, given or {}, overrides)
    except RecursionError:
        raise CheckError(f"{path} is nested deeper than can be followed") from None
    release, chosen_by = _release(release)
    jobs = _jobs(path, script)
    findings = [*script_file.losses(path, raw, script.lost)]
    findings += [_note(text, file, line) for file, line, text in script.remarks]
    starts = jobs[0]
    for others in jobs[1:]:
        command = others[0][1].command
        text = f"another job is started in line {command.line}; it is not checked"
        findings.append(_note(text, command.file, command.line))
    read = []
    for world, launch in starts:
        said = list(parsed(launch.arguments))
        defaults, problem = _defaults(launch, said, release)
        read.append((world, _values(Job(defaults, said), said)))
        if problem:
            findings.append(_note(problem, str(path), launch.command.line))
        else:
            findings += _unknown(said, defaults, release)
        findings += [*_twice(said), *_uncertain(said)]
    values = {name: _merged(name, read) for name in read[0][1]}
    if not script.is_whole:
        for value in values.values():
            value.source, value.value = "undetermined", None
            value.alternatives = ["the script was not followed to its end"]
    lines = sorted({launch.command.line for _, launch in starts})
    told = list(dict.fromkeys(findings))[:MOST_FINDINGS]
    return Checked("verl", release, chosen_by, str(path), lines, values, told)


def _note(text: str, file: str, line: int) -> Finding:
    return Finding("", "note", text, file, line, "")


def _jobs(path: Path, script: shell.Script) -> list[Worlds]:
    """The starts of verl in their order, each on all ways through the script."""
    starts = [
        [launch for launch in launches(world.commands) if launch.framework == "verl"]
        for world in script.worlds
    ]
    most = max(map(len, starts), default=0)
    if most:
        pairs = list(zip(script.worlds, starts, strict=True))
        return [[(w, s[n]) for w, s in pairs if len(s) > n] for n in range(most)]
    found = [launch for world in script.worlds for launch in launches(world.commands)]
    if found:
        frameworks = " and ".join(sorted({launch.framework for launch in found}))
        raise CheckError(
            f"{path} starts {frameworks}; only jobs of verl can be read yet"
        )
    words = [c.words[0] for world in script.worlds for c in world.commands]
    names = list(dict.fromkeys(word.text.value or word.source for word in words))[:8]
    reasons = [f"line {line}: {text}" for _, line, text in script.remarks[:3]]
    raise CheckError(
        f"{path}: no command was found that starts verl; found were "
        f"{', '.join(names) or 'none'}" + "".join(f"; {reason}" for reason in reasons)
    )


# -- releases ----------------------------------------------------------------------


def recorded() -> list[str]:
    """The releases of verl whose keys are recorded, oldest first."""
    found = [path.stem.partition("-")[2] for path in SCHEMAS.glob("verl-*.json")]
    return sorted(found, key=lambda text: [int(part) for part in text.split(".")])


def schema(release: str, engine: str = DEFAULT_ENGINE) -> dict[str, Any] | None:
    """The keys of a release under an engine with their defaults, None for another one.

    Raises CheckError for a release that is not recorded.
    """
    if release not in recorded():
        raise CheckError(
            f"verl {release} is not recorded; recorded are {', '.join(recorded())}"
        )
    whole = _recorded(release)
    own = whole["engines"].get(engine)
    if own is None:
        return None
    keys = {**whole["keys"], **own["changed"]}
    return {key: value for key, value in keys.items() if key not in own["absent"]}


@cache
def _recorded(release: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (SCHEMAS / f"verl-{release}.json").read_text("utf-8")
    )
    return found


def _release(asked: str) -> tuple[str, str]:
    """The release that judges: the asked one, the installed one, or the newest."""
    newest = recorded()[-1]
    if asked:
        return asked, "--framework"
    try:
        installed = metadata.version("verl")
    except metadata.PackageNotFoundError:
        return newest, "the newest recorded, as none is installed"
    if installed in recorded():
        return installed, "the installed one"
    return newest, f"the newest recorded, as the installed {installed} is not"


def _defaults(
    launch: Launch, said: Iterable[Override], release: str
) -> tuple[dict[str, Any], str]:
    """The defaults that count, by ``model_engine=`` or ``--config-name``.

    None, and why, where the configuration is not one that was recorded.
    """
    engine = DEFAULT_ENGINE
    texts = [word.text for word in launch.arguments]
    for number, text in enumerate(texts):
        found = CONFIG_OPTIONS.fullmatch(text.shape)
        if found is None:
            continue
        follows = texts[number + 1] if number + 1 < len(texts) else EMPTY
        given = Text(found[2], text.needs) if found[2] else follows
        name = given.value or ""
        known = CONFIG_NAME.fullmatch(name)
        is_name = found["option"] in ("--config-name", "-cn")
        if (known is None) if is_name else (name.strip("./") != "config"):
            return {}, f"the configuration is {name or 'not certain'}: not recorded"
        if is_name and known is not None:
            engine = known[1] or DEFAULT_ENGINE
    for override in said:
        if override.key == "model_engine":
            engine = "not certain" if override.needs else str(override.value)
    defaults = schema(release, engine)
    if defaults is None:
        return {}, f"verl {release}'s keys under {engine} are not recorded, nor judged"
    return defaults, ""


# -- values ------------------------------------------------------------------------


def _values(job: Job, said: Sequence[Override]) -> dict[str, Given]:
    """All values of the job on one way through the script."""
    table = tomllib.loads((HERE / "names.toml").read_text("utf-8"))["verl"]
    values = {name: job.find(key) for name, key in table.items()}
    trainer = _product(job, "trainer.nnodes", "trainer.n_gpus_per_node")
    rollout = _product(
        job,
        "actor_rollout_ref.rollout.nnodes",
        "actor_rollout_ref.rollout.n_gpus_per_node",
    )
    teacher = _product(job, "distillation.nnodes", "distillation.n_gpus_per_node")
    enabled = job.find("distillation.enabled")
    if enabled.value is not True:
        teacher = Given(
            enabled.source, None if enabled.needs else 0, None, enabled.needs
        )
    # Without nodes of its own the rollout shares those of the trainer.
    shares = rollout.value == 0
    values["trainer_gpus"] = trainer
    values["rollout_gpus"] = trainer if shares else rollout
    values["teacher_gpus"] = teacher
    values["placement"] = Given(
        rollout.source,
        None if rollout.needs else "colocated" if shares else "split",
        None,
        rollout.needs,
        "actor_rollout_ref.rollout.nnodes",
    )
    parts = [trainer, teacher] if shares else [trainer, rollout, teacher]
    needs = frozenset[str]().union(*(part.needs for part in parts))
    values["total_gpus"] = Given(
        "undetermined" if needs else "user",
        None if needs else sum(part.value for part in parts),
        None,
        needs,
        "trainer_gpus + teacher_gpus" if shares else "all three together",
    )
    return values


def _product(job: Job, nodes: str, gpus: str) -> Given:
    found = [job.find(nodes), job.find(gpus)]
    numbers = [g.value for g in found if type(g.value) is int]
    needs = found[0].needs | found[1].needs
    if found[0].value == 0 and type(found[0].value) is int:
        return Given(found[0].source, 0, None, frozenset(), nodes)
    if len(numbers) < 2:
        needs = needs or frozenset({nodes, gpus})
        return Given("undetermined", None, None, needs, f"{nodes} * {gpus}")
    source = "user" if "user" in {g.source for g in found} else "default"
    return Given(
        source, numbers[0] * numbers[1], None, frozenset(), f"{nodes} * {gpus}"
    )


def _merged(name: str, read: Sequence[tuple[World, dict[str, Given]]]) -> Value:
    """One value of what the ways through the script make of it."""
    found = [(world, values[name]) for world, values in read]
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
        else f"hangs on {need}"
        for need in sorted(first.needs)
    ]
    value = Value(first.value, first.source, expression=first.expression)
    value.alternatives = list(dict.fromkeys(options))
    if first.word is not None:
        value.file, value.line = first.word.file, first.word.line
        value.expression = first.word.source
    return value


# -- faults ------------------------------------------------------------------------


def _unknown(
    said: Sequence[Override], defaults: Mapping[str, Any], release: str
) -> Iterator[Finding]:
    """Keys that the release's configuration does not have.

    Hydra refuses them, but for those with a +, which it adds: the user's code may read
    them, so that they are told of only where they look like a known one.
    """
    parts = [key.split(".") for key in defaults]
    sections = {".".join(p[:n]) for p in parts for n in range(1, len(p))}
    open_keys = [key for key, default in defaults.items() if default in ({}, None)]
    # Hydra puts another file in a section's place: group@section=file.
    open_keys += [o.key.partition("@")[2] for o in said if "@" in o.key]
    free = tuple(f"{key}." for key in open_keys)
    looked = 0
    for override in said:
        key, sign, word = override.key, override.sign, override.word
        # Every further teacher has the keys of the first, and is added with a +.
        first = TEACHER.sub(r"\1teacher_model\2", key)
        alike = first if sign else key
        level = "error"
        if (
            not key
            or FREE.fullmatch(key)
            or alike in sections
            or alike.startswith(free)
        ):
            continue
        if alike in defaults:
            # What is null, and a list or mapping, may be added to (hydra 1.3,
            # ConfigLoaderImpl._apply_overrides_to_config).
            is_part = str(override.value)[:1] in ("[", "{") or override.needs
            if sign != "+" or alike != key or defaults[key] is None or is_part:
                continue
            message = f"{key} is there already: Hydra refuses +{key}; leave out the +"
        elif key == OLD_TEACHER:
            message = (
                f"verl {release} has no key {key}: research code on verl up to 0.7 "
                f"read the teacher from it; give it as {TEACHERS}.teacher_model."
                "model_path, with distillation.enabled=True"
            )
        elif sign and sign != "~":
            looked += 1
            close = difflib.get_close_matches(alike, list(defaults), 1, cutoff=0.95)
            if not close or looked > MOST_NEAR:
                continue
            level = "warning"
            message = (
                f"verl {release} has no key {key}; {sign} adds it, and nothing of "
                f"verl's reads it. Did you mean {close[0]}?"
            )
        elif first in defaults:
            message = f"a further teacher is added with a +: +{key}=..."
        else:
            looked += 1
            message = f"verl {release} has no key {key}"
            message += _hint(key, defaults, release) if looked <= MOST_NEAR else "."
        yield Finding(UNKNOWN, level, message, word.file, word.line, key)


def _hint(key: str, defaults: Mapping[str, Any], release: str) -> str:
    """What may have been meant: a key of another engine, or a near one."""
    if key.endswith(".model_engine"):
        return "; did you mean 'model_engine'?"
    for engine in ENGINES:
        if key in (schema(release, engine) or {}):
            return f": it is one of model_engine={engine}, and this job's is another"
    return near(key, defaults)


def _twice(said: Iterable[Override]) -> Iterator[Finding]:
    """The same key with two values: the later one counts."""
    seen: dict[str, Override] = {}
    for override in said:
        before = seen.get(override.key)
        is_known = before and override.key and not (before.needs or override.needs)
        if before and is_known and before.value != override.value:
            where = f"line {before.word.line}" if before.word.line else "before"
            message = (
                f"{override.key} is given twice: {before.value} in {where}, then "
                f"{override.value}, which counts"
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
            yield _note(text, word.file, word.line)


# -- text --------------------------------------------------------------------------


def text(checked: Checked) -> str:
    """For people: what was understood, then what is wrong."""
    release = f"{checked.framework} {checked.release} ({checked.release_by})"
    told = [f"{release}, started in line {', '.join(map(str, checked.lines))}"]
    width = max(map(len, checked.values))
    for name, value in checked.values.items():
        said = "?" if value.source == "undetermined" else _shown(value.value)
        place = _place(checked, value.file, value.line)
        told.append(
            f"  {name:{width}}  {said:32}  {place or value.expression or value.source}"
        )
        told += [f"  {'':{width}}    {option}" for option in value.alternatives]
    for finding in checked.findings:
        cause = f" [{finding.cause}]" if finding.cause else ""
        place = _place(checked, finding.file, finding.line)
        told.append(f"{finding.level}: {place}: {finding.message}{cause}")
    errors = sum(finding.level == "error" for finding in checked.findings)
    told.append(f"{errors} error(s)" if errors else "no error found")
    return "\n".join(sanitize.line(line) for line in told)


def _place(checked: Checked, file: str, line: int) -> str:
    if not file or file == checked.script:
        return f"line {line}" if line else ""
    return f"{file}:{line}" if line else file


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
