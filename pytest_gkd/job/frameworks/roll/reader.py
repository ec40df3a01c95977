"""ROLL: a YAML file that Hydra composes, and dacite reads into dataclasses."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any

from pytest_gkd.job import (
    arguments,
    looking,
    pydantic_types,
    releases,
)
from pytest_gkd.job.arguments import MISSING, UNKNOWN, Option
from pytest_gkd.job.findings import Finding, note
from pytest_gkd.job.frameworks import config_file
from pytest_gkd.job.frameworks.reading import Reading, Variable
from pytest_gkd.job.frameworks.roll import devices, doubts, pipelines, plan, rules
from pytest_gkd.job.frameworks.roll.job import PPO, Look
from pytest_gkd.job.frameworks.roll.values import DERIVED
from pytest_gkd.job.launch import ADDED, Launch
from pytest_gkd.job.omegaconf import Config, UnresolvedError, flat
from pytest_gkd.job.overrides import Given, Override, parsed
from pytest_gkd.job.releases import Release
from pytest_gkd.job.typed_config import Classes, Judge

PROGRAM = re.compile(
    r"(?:.*/)?start_(?:rlvr|agentic|onpolicy_distill|distill|dpo|sft)\w*_pipeline\.py"
    r"|(?P<common>(?:.*/)?\w*(?:start|pipeline|roll|train|main)\w*\.py)"
)
OPTIONS = {f"--{name}": Option(name) for name in ("config_path", "config_name")}
# Keys that no other framework has.
OWN = re.compile(
    r"(?:actor_(?:train|infer)|student(?:_train|_infer)?|teacher(?:\.\w+)?|sft_train)"
    r"\.(?:strategy_args\.strategy_(?:name|config).*|device_mapping)"
)
ON_POLICY = "start_onpolicy_distill_pipeline"
# Read from what Hydra composed, not by a dataclass.
BESIDE = ("hydra", "pipeline_cls")
REFERENCE = re.compile(r"\$\{[\s.]*(\w+)")
MEGATRON = ("max_grad_norm", "lr_scheduler_kwargs")
INSTEAD = {
    "flash_attn": "attn_implementation took its place",
    "dataset_dir": "file_name counts from where ROLL is started",
    **dict.fromkeys(
        ("reward_norm", "reward_shift", "reward_scale"),
        "norm_mean_type and norm_std_type took its place",
    ),
}
# Hydra's resolvers whose values only a run knows.
RESOLVERS = ("now", "python_version")
ENVIRONMENTS = {"custom_envs", "train_env_manager", "val_env_manager"}


def is_own(keys: AbstractSet[str]) -> bool:
    """Whether words or a file have ROLL's options or keys."""
    options = {key.partition("=")[0] for key in keys}
    return OPTIONS.keys() <= options or any(OWN.fullmatch(key) for key in keys)


def read(launch: Launch, release: Release) -> Reading:
    """The values of a start of ROLL, and what it would refuse or do differently."""
    whose = f"ROLL {release}"
    options, said, findings = _words(launch)
    for one in options.values():
        if one.needs:
            needs = ", ".join(sorted(one.needs))
            problem = f"which configuration it is, is not certain: {needs}"
            unsure = {n: Given("undetermined", needs=one.needs) for n in DERIVED}
            return Reading([*options.values()], unsure, findings, problem)
    path = _find(launch, options, findings)
    if path is None:
        return Reading([*options.values()], {}, findings)
    composed = config_file.Composed(path)
    given = composed.config
    findings += composed.findings
    _apply(given, said)
    given.environment, given.resolvers = launch.command.environment, RESOLVERS
    for setting, text in given.unresolved():
        line = f"{setting.key}: {setting.value} cannot be resolved: {text}"
        findings.append(_finding(MISSING, "error", line, setting))
    classes = Classes(release.schema["classes"])
    root, is_sure, is_pure = _root(launch, given, classes, release)
    config = Config(classes.defaults(root, given, keeps=False))
    defaults = Config(config.settings.values())
    config.merge(given.settings.values())
    config.environment, config.resolvers = given.environment, RESOLVERS
    passed = {*BESIDE, *_referred(given), *composed.others()}
    # Its start script for on-policy distillation does not check types.
    is_unchecked = is_pure and (launch.document or launch.name == ON_POLICY)
    fits = _anything if is_unchecked else _fits
    unread = release.schema["unread"]
    judge = Judge(
        given,
        classes,
        whose,
        defaults,
        unread,
        fits,
        is_sure=is_sure,
        instead=INSTEAD,
        refuses=False,
        takes_null=False,
        passed=passed,
    )
    findings += judge.section(root)
    look = partial(
        Look,
        said=given,
        root=root,
        program=launch.name if launch.document is None else "",
        schema=release.schema,
        is_pure=is_pure,
    )
    broken = looking.broken
    refused = (*rules.REFUSED, *pipelines.REFUSED)
    findings += broken(config, refused, "error", look)
    foreign = (rules.twins, partial(_megatron, release))
    findings += broken(config, foreign, "error", look, UNKNOWN)
    findings += broken(config, doubts.UNREAD_KEYS, "warning", look, UNKNOWN)
    findings += broken(config, doubts.DOUBTFUL, "warning", look)
    findings += _unread_devices(config, look(config))
    findings += _tokenizers(config, look(config))
    values = looking.derived(config, DERIVED, look)
    variables = tuple(_variables(config, look(config)))
    recipe = plan.recipe(look(config))
    return Reading(
        *([*options.values(), *said], values, findings),
        recipe=recipe,
        variables=variables,
    )


def _words(
    launch: Launch,
) -> tuple[dict[str, Override], list[Override], list[Finding]]:
    """The two options, keys added by gkd itself, and what argparse refuses."""
    is_ours = [word.file == ADDED or bool(launch.document) for word in launch.arguments]
    pairs = list(zip(launch.arguments, is_ours, strict=True))
    found = arguments.parsed(
        [w for w, own in pairs if not own], OPTIONS, launch.program
    )
    for word in found.rest:
        shape = word.text.shape[:80]
        text = (
            f"{launch.program} takes --config_path and --config_name alone, and "
            f"refuses {shape}: keys are read of the YAML file only"
        )
        found.findings.append(
            Finding(UNKNOWN, "error", text, word.file, word.line, shape)
        )
    options = {one.key: one for one in found.said if one.key}
    return options, list(parsed(w for w, own in pairs if own)), found.findings


def _apply(given: Config, said: Iterable[Override]) -> None:
    """Apply keys added by gkd itself; a mapping is merged with what is there."""
    for one in said:
        if one.sign == "~":
            given.remove(one.key)
        elif isinstance(one.value, dict) and one.value:
            parts = flat(one.value, one.key)
            _apply(given, [one._replace(key=key, value=value) for key, value in parts])
        elif one.key:
            given.put(one)


def _root(
    launch: Launch, given: Config, classes: Classes, release: Release
) -> tuple[str, bool, bool]:
    """The root class, whether it is certain, and whether it is pure OPD.

    The class is a recorded program's, else the smallest that knows most of the
    sections.
    """
    programs = release.schema["programs"]
    own = (one for one in given.settings.values() if one.word.file != ADDED)
    tops = {one.key.partition(".")[0] for one in own}
    is_agentic = _plain(given, "pure_opd_pipeline_type") == "agentic"
    recorded = programs.get(f"examples.{launch.name}") if not launch.document else None
    names = {"student_train", "student_infer", "teacher"}
    has_students = names <= tops and not tops & {"actor_train", "actor_infer"}
    is_pure = _plain(given, "is_pure_opd") is True
    if launch.name == ON_POLICY and recorded:
        return PPO[is_agentic], True, True
    if recorded:
        return recorded, True, is_pure and recorded in PPO
    known = dict.fromkeys(programs.values())
    fields = {root: classes.fields(root).keys() for root in known}

    def fit(root: str) -> tuple[int, bool, int]:
        is_other = root == "AgenticConfig" and not tops & ENVIRONMENTS
        return len(tops - fields[root]), is_other, len(fields[root])

    best = min(known, key=fit)
    if has_students or is_pure:
        best = PPO[is_agentic]
    return best, False, (is_pure or has_students) and best in PPO


def _plain(given: Config, key: str) -> Any:
    try:
        found = given.value(key)
    except UnresolvedError:
        return None
    return found.value if found and not found.needs else None


def _referred(given: Config) -> set[str]:
    """The top-level keys that others refer to."""
    texts = (repr(one.value) for one in given.settings.values())
    return {name for text in texts for name in REFERENCE.findall(text)}


# -- files -------------------------------------------------------------------------


def _find(
    launch: Launch, options: dict[str, Override], findings: list[Finding]
) -> Path | None:
    """Where the configuration is: beside the program, in --config_path."""
    if launch.document is not None:
        return launch.document
    said = {name: str(one.value) for name, one in options.items()}
    for option in OPTIONS:
        if option.removeprefix("--") not in said:
            text = f"{launch.program} needs {option}: its own default is not there"
            word = launch.command.words[0]
            findings.append(
                Finding(MISSING, "error", text, word.file, word.line, option[2:])
            )
            return None
    name = said["config_name"].removesuffix(".yaml").removesuffix(".yml")
    if said["config_path"].startswith("/"):
        text = f"--config_path {said['config_path'][:80]}: Hydra wants a path that is"
        text += " relative to the folder of the program"
        one = options["config_path"]
        findings.append(_finding(UNKNOWN, "error", text, one, "config_path"))
    folder = posixpath.join(posixpath.dirname(launch.program), said["config_path"])
    wanted = posixpath.normpath(posixpath.join(folder, f"{name}.yaml"))
    path = config_file.find(Path(launch.command.file), wanted)
    if path is None:
        text = f"the configuration {wanted[:200]} is not there"
        one = options["config_name"]
        findings.append(_finding(MISSING, "error", text, one, "config_name"))
    return path


# -- judging -----------------------------------------------------------------------


def _anything(_: ast.expr, value: Any) -> bool:
    return True


def _fits(node: ast.expr, value: Any) -> bool:
    """As in dacite 1.9 (types.py, is_instance): nothing is converted."""
    return any(_is(one, value) for one in pydantic_types.members(node))


def _is(node: ast.expr, value: Any) -> bool:
    if isinstance(node, ast.Constant):
        return bool(value == node.value)
    if isinstance(node, ast.Subscript):
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        name = ast.unparse(node.value).lower()
        if name == "literal":
            return value in [
                one.value for one in inside if isinstance(one, ast.Constant)
            ]
        if name == "list":
            return isinstance(value, list) and all(_fits(inside[0], v) for v in value)
        if name == "dict" and isinstance(value, dict):
            return all(_fits(inside[-1], one) for one in value.values())
        return name != "dict"
    name = ast.unparse(node)
    kinds: dict[str, type | tuple[type, ...]] = {
        "int": int,
        "float": (int, float),
        "bool": bool,
        "str": str,
        "dict": dict,
        "Dict": dict,
        "list": list,
        "List": list,
    }
    # A section of a class is judged by its fields, and is never null.
    return name == "Any" or isinstance(value, kinds.get(name, dict))


def _megatron(release: Release, look: Look) -> Iterator[looking.Fault]:
    """distributed/strategy/megatron_strategy.py: TrainingArguments(**config)."""
    known = {*release.schema["megatron"], *MEGATRON}
    known |= release.schema["classes"]["TrainingArguments"]["fields"].keys()
    theirs = releases.newest("transformers").schema
    for name in ("TrainingArguments", "Seq2SeqTrainingArguments"):
        known |= theirs["classes"][name]["fields"].keys()
        known |= theirs["removed"].get(name, {}).keys()  # ROLL runs on older ones
    for key, name in doubts.strange(look, "megatron", known):
        yield key, f"{key}: Megatron's TrainingArguments have no {name}"


def _unread_devices(config: Config, look: Look) -> Iterator[Finding]:
    """A note for each device_mapping that only eval could read."""
    for worker in look.workers():
        setting = config.settings.get(f"{worker}.device_mapping")
        try:
            text = look(f"{worker}.device_mapping")
            if isinstance(text, str):
                devices.numbers(text)
        except devices.NotReadError:
            line = f"{worker}.device_mapping = {str(text)[:80]} is not read: gkd check "
            line += "evaluates nothing; list(range(a, b)) and lists of numbers are read"
            if setting:
                yield note(line, setting.word.file, setting.word.line)
        except (SyntaxError, looking.NotCertainError):
            continue


def _tokenizers(config: Config, look: Look) -> Iterator[Finding]:
    try:
        ours = look.path_key(look.trainer)
        theirs = [look.path_key(worker) for worker in look.teachers()]
    except looking.NotCertainError:
        return
    for key in theirs:
        if key in config.settings:
            yield from looking.tokenizers(config, ours, key)


def _variables(config: Config, look: Look) -> Iterator[Variable]:
    """configs/base_config.py: os.environ.update, and Ray's runtime environment."""
    for owner in ("", *look.workers()):
        start = f"{owner}.system_envs" if owner else "system_envs"
        for name in config.below(start):
            try:
                given = config.value(f"{start}.{name}")
            except UnresolvedError:
                continue
            setting = config.settings.get(f"{start}.{name}")
            if given and not given.needs and setting and given.value is not None:
                yield Variable(name, given.value, setting.word)


def _finding(
    cause: str, level: str, text: str, one: Override, key: str = ""
) -> Finding:
    return Finding(cause, level, text, one.word.file, one.word.line, key or one.key)
