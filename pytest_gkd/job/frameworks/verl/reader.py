"""verl: Hydra's overrides on its generated configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

from pytest_gkd.job import hydra_options, releases
from pytest_gkd.job.findings import Finding, note
from pytest_gkd.job.frameworks.reading import UNKNOWN, Pool, Reading, derived, names
from pytest_gkd.job.frameworks.verl import choices as verl_choices
from pytest_gkd.job.frameworks.verl import config as verl_config
from pytest_gkd.job.frameworks.verl import plan as verl_plan
from pytest_gkd.job.frameworks.verl import rules as verl_rules
from pytest_gkd.job.frameworks.verl import sft as verl_sft
from pytest_gkd.job.hydra_options import CommandLine
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.omegaconf import flat
from pytest_gkd.job.overrides import Given, Job, Override
from pytest_gkd.job.releases import Release
from pytest_gkd.near_names import LETTER, near_names
from pytest_gkd.options import near

PROGRAM = re.compile(
    r"verl\.trainer\.main_ppo\w*|(?:.*/)?verl/trainer/main_ppo\w*\.py"
    rf"|{verl_config.RECIPE.pattern}|{verl_config.SFT.pattern}"
    rf"|{verl_sft.OLD_PROGRAM.pattern}"
)
DEFAULT_ENGINE = "dp"
# trainer/config/algorithm.py, RolloutCorrectionConfig: lower and upper bound, as in
# 0.5_2.0.
NUMBERS_OR_TEXTS = {"algorithm.rollout_correction.rollout_is_threshold"}
WORDS_OF_TRUTH = ("yes", "no", "on", "off", "y", "n", "true", "false")  # OmegaConf
# Hydra's own keys, and sections passed unchanged to a function or another library.
FREE = re.compile(
    r"model_engine|[\w/-]+@[\w.]+|hydra[/.].*|.*\b(?:\w*kwargs|override_\w+)\..*"
)
ENGINES = ("dp", "megatron", "veomni", "torchtitan")
TEACHERS = "distillation.teacher_models"
TEACHER = re.compile(r"^(distillation\.teacher_models\.)\w+(\..*)?$")
OLD_TEACHER = "actor_rollout_ref.ref.model.path"
# recipe/gkd of verl 0.7.0, and gkd/megatron of verl-recipe at 48ea0a79.
OLD_RECIPE = (
    "verl's GKD recipe (main_gkd) imports verl.workers.megatron_workers, which is in "
    "verl up to 0.7.1; from 0.8 on main_ppo distils, with distillation.enabled=True"
)
CONFLICT = "config.invalid-combination"
# Similar names are suggested for this many unknown keys; each takes milliseconds.
MOST_NEAR = 20


def is_own(keys: AbstractSet[str]) -> bool:
    """Whether a configuration file is one of verl's."""
    tops = {key.partition(".")[0] for key in keys}
    builds_on_it = "defaults" in keys and "algorithm" in tops and "policy" not in tops
    trains = "trainer.n_gpus_per_node" in keys or "trainer.default_local_dir" in keys
    is_rl = "actor_rollout_ref" in tops or builds_on_it or trains
    return is_rl or verl_sft.is_own(keys)


def read(launch: Launch, release: Release) -> Reading:
    """The values of a start of verl, and the keys that the release does not have."""
    line = hydra_options.read(launch.arguments)
    if verl_sft.is_old(launch):
        return _old_sft(launch, line, release)
    is_sft = verl_sft.is_sft(launch)
    config = _configuration(launch, line, release, is_sft=is_sft)
    known = config.defaults | {one.key: one.value for one in config.given}
    said = list(_spread(line.overrides, known))
    findings = [*line.findings, *config.findings]
    if verl_config.RECIPE.fullmatch(launch.program) and release.is_at_least("0.8.0"):
        findings.append(_refused(launch, OLD_RECIPE))
    settings = verl_config.settings(said, release)
    if not config.problem:
        keys = settings if is_sft else said
        findings += _unknown(keys, known, release, config.unread, is_sft=is_sft)
    every = [*config.given, *settings]
    job = Job(config.defaults, every)
    if is_sft:
        told = {one.key for one in every} if launch.document is not None else ()
        launched = verl_sft.processes(launch, release)
        launched = [one for one in launched if one.key not in told]
        job = verl_sft.of(config, every, launched)
    if not (config.problem or config.is_alone):
        added, broken = _as_added(config.given), verl_rules.broken(job)
        if is_sft:
            broken = verl_sft.broken(job, every, launch)
        if launch.document is not None:  # its command line may add what it lacks
            broken = (one for one in broken if one.cause != verl_rules.MISSING)
        findings += [
            *_unknown(added, config.defaults, release, config.unread, is_sft=is_sft),
            *_types(every, config.defaults, is_sft=is_sft),
            *verl_choices.judged(every, job, release),
            *broken,
        ]
    if is_sft:
        own = verl_sft.values(job), verl_sft.pools(job, launch), verl_sft.recipe(job)
    else:
        own = _values(job), _pools(job), verl_plan.recipe(job)
    values, pools, recipe = own
    if config.problem and recipe:
        recipe = recipe._replace(facts={"doubt": config.problem})
    return Reading(said, values, findings, config.problem, pools, recipe)


def _old_sft(launch: Launch, line: CommandLine, release: Release) -> Reading:
    """The SFT program that no recorded release has."""
    launched = verl_sft.processes(launch, release)
    values = verl_sft.old_values(line.overrides, launched)
    return Reading(line.overrides, values, [_refused(launch, verl_sft.OLD)])


def _refused(launch: Launch, text: str) -> Finding:
    """What is wrong with the program itself."""
    word = launch.command.words[0]
    return Finding(CONFLICT, "error", text, word.file, word.line, "")


def _as_added(given: Iterable[Override]) -> list[Override]:
    """A file's settings: like overrides with a +, they may be new."""
    return [one._replace(sign="++") for one in given]


def _configuration(
    launch: Launch, line: CommandLine, release: Release, *, is_sft: bool
) -> verl_config.Composed:
    """What Hydra composes: the record if only the engine differs, else its files."""
    if is_sft:
        return verl_config.composed(launch, line, release, {})
    chosen = [one for one in line.overrides if one.key == "model_engine"]
    engine = str(chosen[-1].value) if chosen else DEFAULT_ENGINE
    if chosen and chosen[-1].needs:
        return verl_config.Composed(problem="model_engine cannot be determined")
    own = schema(release, engine)
    if own is None:
        text = f"verl {release}'s keys under {engine} are not recorded, nor judged"
        text += near(engine, ENGINES).rstrip(".")
        return verl_config.Composed(problem=text)
    return verl_config.composed(launch, line, release, own)


def schema(release: Release, engine: str = DEFAULT_ENGINE) -> dict[str, Any] | None:
    """A release's keys under an engine with their defaults, None if it is unknown."""
    whole = release.schema
    own = whole["engines"].get(engine)
    if own is None:
        return None
    keys = {**whole["keys"], **own["changed"]}
    return {key: value for key, value in keys.items() if key not in own["absent"]}


def _has(release: Release, engine: str, key: str) -> bool:
    """Whether the release has the key under an engine."""
    own = release.schema["engines"].get(engine)
    if own is None:
        return False
    is_common = key in release.schema["keys"] and key not in own["absent"]
    return is_common or key in own["changed"]


def _spread(
    said: Iterable[Override], defaults: Mapping[str, Any]
) -> Iterator[Override]:
    """The overrides; a mapping given for a section becomes one for each of its keys."""
    parts = [key.split(".") for key in defaults]
    sections = {".".join(p[:n]) for p in parts for n in range(1, len(p))}
    for override in said:
        if not (override.key in sections and isinstance(override.value, dict)):
            yield override
            continue
        # Hydra lets a mapping with existing keys be added to a section.
        sign = override.sign and "++"
        for key, value in flat(override.value, override.key):
            yield override._replace(sign=sign, key=key, value=value)


def _values(job: Job) -> dict[str, Given]:
    """All values of the job on one path through the script."""
    values = {name: job.find(key) for name, key in names("verl").items()}
    by_engine = (names("verl-memory"), names("verl-megatron"))
    for name, key in [pair for table in by_engine for pair in table.items()]:
        found = job.find(key)
        if found.needs != {key}:
            values[name] = found
        else:  # a key that this engine does not have
            values.setdefault(name, Given("default"))
    # As in rules.py, _truncation.
    values["truncation"] = derived(
        "data.filter_overlong_prompts",
        lambda drops: "drop" if drops is True else "left",
        job.find("data.filter_overlong_prompts"),
    )
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
    # Without its own nodes the rollout shares the trainer's.
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


def _pools(job: Job) -> tuple[Pool, ...]:
    """Each node's part of a pool is one placement group with STRICT_PACK
    (single_controller/ray/base.py, RayResourcePool.get_placement_groups, of 0.9.1)."""
    sections = {"the trainer": "trainer", "the rollout": "actor_rollout_ref.rollout"}
    if job.find("distillation.enabled").value is True:
        sections["the teacher"] = "distillation"
    return tuple(
        Pool(
            name,
            job.find(f"{section}.nnodes"),
            job.find(f"{section}.n_gpus_per_node"),
            f"{section}.n_gpus_per_node",
        )
        for name, section in sections.items()
    )


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


def _types(
    said: Sequence[Override], defaults: Mapping[str, Any], *, is_sft: bool
) -> Iterator[Finding]:
    """Values that are not numbers, or not true or false, though the default is."""
    texts = {*NUMBERS_OR_TEXTS, *(verl_sft.FREQUENCIES if is_sft else ())}
    for override in said:
        key, value, word = override.key, override.value, override.word
        default = defaults.get(key)
        if override.needs or override.sign == "~" or value is None:
            continue
        if isinstance(value, str) and "${" in value:
            continue
        if isinstance(default, bool):
            fits = value in (True, False) or str(value).lower() in WORDS_OF_TRUTH
            kind = "true or false"
        elif isinstance(default, int) and abs(default) > 1:
            fits = isinstance(value, int | float) and value == int(value)
            kind = "an integer"
        elif key in texts:
            continue
        elif isinstance(default, int):
            # 0 and 1 are also defaults of fractions (temperature, top_p).
            fits = isinstance(value, int | float)
            kind = "a number"
        elif isinstance(default, float):
            fits = isinstance(value, int | float)
            kind = "a number"
        else:
            continue
        if not fits:
            text = f"{key} is {str(value)[:60]}, and verl expects {kind}"
            yield Finding(UNKNOWN, "error", text, word.file, word.line, key)


def _unknown(
    said: Sequence[Override],
    defaults: Mapping[str, Any],
    release: Release,
    unread: Iterable[str],
    *,
    is_sft: bool,
) -> Iterator[Finding]:
    """Keys that the release's configuration does not have.

    Hydra refuses them, except those with a +, which it adds: the user's code may read
    these, so they are reported only if they resemble a known key. Those of sections
    whose files are ``unread`` are not judged.
    """
    parts = [key.split(".") for key in defaults]
    sections = {".".join(p[:n]) for p in parts for n in range(1, len(p))}
    open_keys = [key for key, default in defaults.items() if default in ({}, None)]
    open_keys += unread
    # Hydra replaces a section with another file: group@section=file.
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
        value = override.value
        if sign == "~" and value is not None and defaults.get(key, value) != value:
            message = f"{key} is {defaults[key]} and not {value}: Hydra refuses ~{key}"
            yield Finding(UNKNOWN, level, message, word.file, word.line, key)
            continue
        if alike in defaults:
            # Keys may be added to null, and to a list or mapping (hydra 1.3,
            # ConfigLoaderImpl._apply_overrides_to_config).
            is_part = isinstance(override.value, list | dict) or override.needs
            if sign != "+" or alike != key or defaults[key] is None or is_part:
                continue
            message = f"{key} is there already: Hydra refuses +{key}; leave out the +"
        elif key == OLD_TEACHER and "distillation.enabled" in defaults:
            message = (
                f"verl {release} has no key {key}: research code on verl up to 0.7 "
                f"read the teacher from it; give it as {TEACHERS}.teacher_model."
                "model_path, with distillation.enabled=True"
            )
        elif sign and sign != "~":
            looked += 1
            other = "" if is_sft else _elsewhere(key, release)
            close = _close(alike, tuple(defaults)) if looked <= MOST_NEAR else []
            if not (close or other):
                continue
            level = "warning"
            message = (
                f"verl {release} has no key {key}; it is added, and nothing in "
                "verl reads it"
            )
            message += other or f". Did you mean {close[0]}?"
        elif not is_sft and (file := _not_generated(key, release)):
            message = (
                f"{key} is in {file}, and not in the tree that is generated from it "
                "(scripts/generate_trainer_config.sh): it is not judged"
            )
            yield note(message, word.file, word.line)
            continue
        elif first in defaults:
            message = f"a further teacher is added with a +: +{key}=..."
        else:
            looked += 1
            message = f"verl {release} has no key {key}"
            if looked > MOST_NEAR:
                message += "."
            elif is_sft:
                other = verl_sft.other_group(key, release)
                message += other or _near(key, tuple(defaults))
            else:
                message += _hint(key, defaults, release)
        yield Finding(UNKNOWN, level, message, word.file, word.line, key)


@lru_cache(1024)
def _close(key: str, known: tuple[str, ...]) -> list[str]:
    """The known key that differs by a typo, if any."""
    return near_names(key, known, 1, LETTER)


@lru_cache(1024)
def _near(key: str, known: tuple[str, ...]) -> str:
    """Cached, as all paths through a script ask for it: each takes milliseconds."""
    return near(key, known)


def _not_generated(key: str, release: Release) -> str:
    """The configuration file of an installed copy that has a key in no tree."""
    if not release.is_installed:
        return ""
    if any(_has(release, engine, key) for engine in ENGINES):
        return ""
    for name, one in release.schema["configs"].items():
        section = f".{name.partition('/')[0]}."
        if any(f".{key}".endswith(f"{section}{own}") for own in one["keys"]):
            return f"{name}.yaml"
    return ""


def _elsewhere(key: str, release: Release) -> str:
    """The nearest recorded release that has a key that this one has not, if any."""

    def has(one: Release) -> bool:
        return any(_has(one, engine, key) for engine in ENGINES)

    return "" if has(release) else releases.elsewhere(release, has)


def _hint(key: str, defaults: Mapping[str, Any], release: Release) -> str:
    """What may have been meant: a key of another engine, or a similar one."""
    if key.endswith(".model_engine"):
        return "; did you mean 'model_engine'?"
    for engine in ENGINES:
        if _has(release, engine, key):
            return f": it is one of model_engine={engine}, and this job's is another"
    other = _elsewhere(key, release)
    return other or _near(key, tuple(defaults))
