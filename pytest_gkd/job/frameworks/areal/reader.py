"""AReaL: a YAML file with Hydra's overrides, merged into dataclasses by OmegaConf."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path

from pytest_gkd.job import looking, omegaconf_types, own_classes
from pytest_gkd.job.arguments import MISSING, MOST_NEAR, UNKNOWN
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.frameworks import config_file
from pytest_gkd.job.frameworks.areal import plan, rules
from pytest_gkd.job.frameworks.areal.rules import Look
from pytest_gkd.job.frameworks.reading import Reading, names
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.omegaconf import Config, UnresolvedError, applied
from pytest_gkd.job.overrides import Given, Override, parsed, refused
from pytest_gkd.job.releases import Release
from pytest_gkd.job.shell_values import Word
from pytest_gkd.job.sources.areal import TAKES
from pytest_gkd.job.typed_config import Classes, Judge
from pytest_gkd.options import near

LAUNCHER = re.compile(r"areal\.infra\.launcher\.(?:local|ray|slurm)")
PROGRAM = re.compile(rf"{LAUNCHER.pattern}|(?P<common>(?:.*/)?[\w-]+\.py)")
# Keys that no other framework has, in files and on command lines.
OWN = re.compile(
    r"\+*(?:cluster\.n_(?:nodes|gpus_per_node)|(?:actor|rollout|teacher)\.backend"
    r"|rollout\.max_head_offpolicyness|scheduler\.type|train_dataset\.batch_size)"
)
ROOTS = ("SFTConfig", "PPOConfig", "DPOConfig")
INSTEAD = dict.fromkeys(
    ("behave_imp_weight_cap", "behave_imp_weight_mode"),
    "rejection_sampling took its place (level, action, metric, upper)",
)
NO_FILE = "AReaL needs --config=FILE; its defaults are judged"


def is_own(keys: AbstractSet[str]) -> bool:
    """Whether words or a file have AReaL's keys."""
    return any(OWN.fullmatch(key.partition("=")[0]) for key in keys)


def read(launch: Launch, release: Release) -> Reading:
    """The values of a start of AReaL, and what it would refuse or do otherwise."""
    program, launcher, launch = _started(launch)
    word, rest = config_file.given(launch)
    if word is not None and word.text.needs:
        needs = ", ".join(sorted(word.text.needs))
        problem = (
            f"which configuration {word.source[:60]} is cannot be determined: {needs}"
        )
        return _unread(rest, word.text.needs, problem)
    said = list(parsed(rest))
    given, chosen, findings = _file(launch, word, said)
    classes, whose = Classes(release.schema["classes"]), f"AReaL {release}"
    tops = set(given.below(""))
    root, is_sure = _root(program, tops, classes, release.schema["programs"])
    place = config_file.find(Path(launch.command.file), program) if program else None
    is_recorded = bool(_recorded(program, release.schema["programs"]))
    if not is_recorded and program:
        own = own_classes.read(place, release.schema["classes"], TAKES)
        if own is not None:
            classes, root, is_sure = Classes(own.classes), own.root, True
    for one, text in refused(rest, sweeps=False):
        shape = one.text.shape[:60]
        findings.append(_finding(UNKNOWN, f"{shape} {text}", one, shape))
    known = Config(classes.defaults(root, given, keeps=True))
    strange: list[Override] = []
    values_said = [one for one in said if one not in chosen]
    for looked, (override, text) in enumerate(applied(given, values_said)):
        key = override.key
        strange += [override] * ("no key" in text)
        hint = near(key, known.settings) if looked < MOST_NEAR else "."
        if known.has(key) and "no key" in text:
            hint = f"; AReaL has it, and Hydra adds it with a +: +{key}=..."
        text = f"{text}{hint}"
        findings.append(_finding(UNKNOWN, text, override.word, key))
    config = Config(classes.defaults(root, given, keeps=True))
    defaults = Config(config.settings.values())
    config.merge(given.settings.values())
    config.environment = given.environment = launch.command.environment
    for setting, text in config.unresolved():
        line = f"{setting.key}: {setting.value} cannot be resolved: {text}"
        findings.append(_finding(MISSING, line, setting.word, setting.key))
    unread, fits = release.schema["unread"], omegaconf_types.fits
    judge = Judge(
        given,
        classes,
        whose,
        defaults,
        unread,
        fits,
        is_sure=is_sure,
        instead=INSTEAD,
    )
    findings += (one for one in judge.whole(root) if not _is_told(one, strange))
    look = partial(Look, root=root, launcher=launcher)
    for level, some in (("error", rules.REFUSED), ("warning", rules.DOUBTFUL)):
        findings += looking.broken(config, some, level, look)
    findings += looking.tokenizers(config, "actor.path", "teacher.path")
    values = _values(config, look)
    loads = is_recorded or not program
    if own_classes.calls(place, LOADER) if place else loads:
        values |= looking.derived(config, TRUNCATION, look)
    return Reading(said, values, findings, recipe=plan.recipe(look(config)))


def _started(launch: Launch) -> tuple[str, str, Launch]:
    """The program, how it is started, and the start rewritten as the program's own."""
    if launch.document:
        return "", "", launch
    if not LAUNCHER.fullmatch(launch.program):
        return launch.program, "script", launch
    first, rest = launch.arguments[:1], launch.arguments[1:]
    program = first[0].text.shape if first else ""
    return program, "spmd", launch._replace(program=program, arguments=rest)


def _file(
    launch: Launch, word: Word | None, said: list[Override]
) -> tuple[Config, list[Override], list[Finding]]:
    """What Hydra makes of the given file, and which of ``said`` choose other files."""
    path, place = launch.document, launch.command.words[:1]
    if path is None and word is not None:
        path = config_file.find(Path(launch.command.file), word.text.value or "")
    if path is None:
        here = word or place[0]
        name = word.text.shape if word else ""
        text = f"the configuration {name} does not exist" if word else NO_FILE
        return Config(), [], [_finding(MISSING, text, here, "config")]
    composed = config_file.Composed(path, said)
    return composed.config, composed.chosen, composed.findings


def _is_told(finding: Finding, strange: list[Override]) -> bool:
    """Whether it is about an unknown key that Hydra has already refused."""
    return "has no key" in finding.message and any(
        f"{one.key}.".startswith(f"{finding.key}.")
        and (one.word.file, one.word.line) == (finding.file, finding.line)
        for one in strange
    )


def _root(
    program: str, tops: set[str], classes: Classes, programs: Mapping[str, str]
) -> tuple[str, bool]:
    """The root class, and whether it is certain.

    It is a recorded program's, else the smallest that knows most of the file's
    sections: a user's own program may have derived from it.
    """
    if recorded := _recorded(program, programs):
        return recorded, True
    known = dict.fromkeys([*ROOTS, *(() if program else programs.values())])
    fields = {root: classes.fields(root).keys() for root in known}
    best = min(known, key=lambda root: (len(tops - fields[root]), len(fields[root])))
    return best, not tops - fields[best]


def _recorded(program: str, programs: Mapping[str, str]) -> str:
    """The class of a recorded program, empty for one of the user's own."""
    name = program.removesuffix(".py").replace("/", ".").strip(".")
    fits = (m for m in programs if name and (name == m or name.endswith(f".{m}")))
    return programs.get(next(fits, ""), "")


def _unread(rest: list[Word], needs: frozenset[str], problem: str) -> Reading:
    """What can be said about a start whose configuration cannot be determined."""
    values = {
        name: Given("undetermined", needs=needs)
        for name in [*names("areal"), *names("areal-vllm"), *DERIVED]
    }
    said = list(parsed(rest))
    own = Config(said)
    for name, key in names("areal").items():
        if own.has(key):
            values[name] = _value(own, key) or values[name]
    return Reading(said, values, [], problem)


def _finding(cause: str, text: str, word: Word, key: str) -> Finding:
    return Finding(cause, "error", text, word.file, word.line, key)


# -- values ------------------------------------------------------------------------


ENGINE = "rollout.backend, or of the older launchers allocation_mode"
DERIVED: looking.Derived[Look] = {
    "trainer_strategy": (rules.of("actor", "kind"), "actor.backend"),
    "rollout_engine": (rules.of("rollout", "kind"), ENGINE),
    "tensor_parallel_size": (rules.of("rollout", "tensor"), ENGINE),
    "pipeline_parallel_size": (rules.of("rollout", "pipeline"), ENGINE),
    "train_tensor_parallel_size": (rules.of("actor", "tensor"), "actor.backend"),
    "train_pipeline_parallel_size": (rules.of("actor", "pipeline"), "actor.backend"),
    "train_expert_parallel_size": (rules.of("actor", "expert"), "actor.backend"),
    "context_parallel_size": (rules.of("actor", "context"), "actor.backend"),
    "teacher_tensor_parallel_size": (rules.of("teacher", "tensor"), "teacher.backend"),
    "fsdp_version": (rules.fsdp_version, "2 with fsdp in actor.backend"),
    "lora_rank": (rules.lora_rank, "0 without actor.use_lora"),
    "use_dynamic_bsz": (rules.is_dynamic, "actor.mb_spec.max_tokens_per_mb"),
    "ppo_mini_batch_size": (
        rules.mini_batch,
        "train_dataset.batch_size / actor.ppo_n_minibatches",
    ),
    "placement": (rules.placement, "scheduling_strategy of actor and rollout"),
    "trainer_gpus": (rules.of("actor", "gpus"), "actor.backend"),
    "rollout_gpus": (rules.of("rollout", "gpus"), ENGINE),
    "teacher_gpus": (rules.teacher_gpus, "teacher.backend"),
    "total_gpus": (rules.total_gpus, "of all roles with GPUs of their own"),
}


# For the datasets that AReaL's own function loads.
LOADER = "get_custom_dataset"
TRUNCATION: looking.Derived[Look] = {
    "truncation": (rules.truncation, "train_dataset.path, .type and .max_length")
}


def _values(config: Config, look: Callable[[Config], Look]) -> dict[str, Given]:
    """All values that the job has."""
    found = looking.derived(config, DERIVED, look)
    kinds = [found.get(name) for name in ("rollout_engine", "trainer_strategy")]
    tables = ["areal", *(f"areal-{kind.value}" for kind in kinds if kind)]
    for name, key in [pair for table in tables for pair in names(table).items()]:
        if given := _value(config, key):
            found.setdefault(name, given)
    return found


def _value(config: Config, key: str) -> Given | None:
    try:
        return config.value(key)
    except UnresolvedError as error:
        return Given("undetermined", needs=frozenset({str(error)}))
