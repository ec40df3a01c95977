"""SkyRL: OmegaConf's command line, read into dataclasses that define all keys."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any

from pytest_gkd.job import documents, looking, own_classes, pydantic_types
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.frameworks import accelerate, config_file
from pytest_gkd.job.frameworks.reading import UNKNOWN, Pool, Reading, names
from pytest_gkd.job.frameworks.skyrl import plan, rules, sft
from pytest_gkd.job.frameworks.skyrl.rules import Look
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.omegaconf import Config, UnresolvedError, dotlist
from pytest_gkd.job.overrides import Given, Override
from pytest_gkd.job.releases import Release
from pytest_gkd.job.shell_values import Word
from pytest_gkd.job.sources import skyrl as source
from pytest_gkd.job.typed_config import Classes, Judge

PROGRAM = re.compile(
    r"skyrl\.train\.(?:entrypoints\.)?main_\w+"
    r"|(?:.*/)?skyrl/train/(?:entrypoints/)?main_\w+\.py"
    r"|(?P<common>(?:[\w-]*[./])*(?:main|\w*train|entrypoint|run)\w*(?:\.py)?)"
)
# No other framework has keys that begin like this.
OWN = re.compile(
    r"trainer\.(?:policy|placement|algorithm)\.\w+.*"
    r"|generator\.(?:inference_engine|sampling_params)\.\w+.*"
)
ROOT = "SkyRLTrainConfig"
# skyrl-train up to 0.4.0 (skyrl_train/config/ppo_base_config.yaml).
OLD = re.compile(r"skyrl_train\b.*")
OLDER = (
    "the package skyrl-train is SkyRL up to March 2026; its keys are not recorded, and "
    "read are those that it has in common with today's"
)
ALIASES = {
    f"{section}use_sample_packing": f"{section}remove_microbatch_padding"
    for section in ("", "trainer.")
}


def is_own(keys: AbstractSet[str]) -> bool:
    """Whether words or a file have SkyRL's keys."""
    names = {key.partition("=")[0] for key in keys}
    return any(OWN.fullmatch(name) for name in names) or _is_sft(names)


def _is_sft(keys: AbstractSet[str]) -> bool:
    """Whether they are main_sft's: at least two, since others have a similar one.

    accelerate's files also have an fsdp_config.
    """
    if accelerate.is_own(keys):
        return False
    return sum(bool(sft.OWN.fullmatch(key)) for key in keys) > 1


def read(launch: Launch, release: Release) -> Reading:
    """The values of a start of SkyRL, and what it would refuse or do differently."""
    schema, classes = release.schema, Classes(release.schema["classes"])
    started, words = _started(launch)
    program = _program(started, schema["programs"])
    own = None if program else _own(launch, started, schema["classes"])
    is_sure = bool(program) or own is not None
    given, findings = _given(launch.document, words, is_sure=is_sure)
    is_sft = not program and _is_sft({override.key for override in given})
    root = schema["programs"].get(program, sft.ROOT if is_sft else ROOT)
    if own is not None:
        classes, root = Classes(own.classes), own.root
    is_sft = sft.ROOT in classes.family(root)
    config, said = Config(), Config(given)
    # config.py, build_nested_dataclass: a section is rebuilt from what is given alone.
    config.merge(classes.defaults(root, said, keeps=False))
    defaults = Config(config.settings.values())
    config.merge(given)
    config.environment = said.environment = launch.command.environment
    for setting, text in said.unresolved():
        line = f"{setting.key}: {setting.value} cannot be resolved: {text}"
        findings.append(_finding("error", line, setting.word, setting.key))
    problem = OLDER if OLD.match(launch.program) else ""
    if problem:
        findings = []
    else:
        whose = f"SkyRL {release}"
        judge = Judge(
            said,
            classes,
            whose,
            defaults,
            schema["unread"],
            _fits,
            is_sure=is_sure,
        )
        findings += judge.whole(root)
        if is_sft:
            keys = classes.fields(root).keys()
            return _of_sft(given, config, findings, partial(sft.Look, keys=keys))
        look = partial(Look, program=program, schema=schema)
        for level, some in (("error", rules.REFUSED), ("warning", rules.DOUBTFUL)):
            findings += looking.broken(config, some, level, look)
        findings += looking.tokenizers(config, rules.STUDENT, rules.REF)
    recipe = None if problem else plan.recipe(Look(config))
    return Reading(given, _values(config), findings, problem, _pools(config), recipe)


def _own(
    launch: Launch, started: str, recorded: Mapping[str, Any]
) -> own_classes.Own | None:
    """The classes of a user's own program."""
    name = started.removesuffix(".py")
    name = name if name != started else name.replace(".", "/")
    place = config_file.find(Path(launch.command.file), f"{name}.py")
    return own_classes.read(place, recorded, source.TAKES, source.made)


def _of_sft(
    given: list[Override],
    config: Config,
    findings: list[Finding],
    look: Callable[[Config], sft.Look],
) -> Reading:
    """The same for main_sft, whose single model has all GPUs."""
    for level, some in (("error", sft.REFUSED), ("warning", sft.DOUBTFUL)):
        findings += looking.broken(config, some, level, look)
    found = _by_strategy(config, "skyrl-sft", "strategy")
    found |= looking.derived(config, sft.DERIVED, look)
    sizes = [_value(config, f"placement.num_{n}") for n in ("nodes", "gpus_per_node")]
    nodes, each = (size or Given("undetermined") for size in sizes)
    pools = (Pool("the trainer", nodes, each, sft.GPUS),)
    return Reading(given, found, findings, "", pools, plan.sft_recipe(look(config)))


def _started(launch: Launch) -> tuple[str, list[Word]]:
    """The program, and its words: main_base may be told to start another module."""
    rest, program = [], launch.program
    for word in launch.arguments:
        name, _, value = word.text.shape.partition("=")
        if name == "trainer.override_entrypoint" and not word.text.needs:
            program = value
        else:
            rest.append(word)
    return program, rest


def _given(
    document: Path | None, arguments: list[Word], *, is_sure: bool
) -> tuple[list[Override], list[Finding]]:
    """What a file or the command line gives, and what SkyRL refuses of the words.

    A user's own program (not ``is_sure``) may have further options.
    """
    findings, words = [], []
    for word in arguments:
        shape = word.text.shape
        if shape.startswith("+"):
            text = f"{shape[:80]}: SkyRL refuses a +; leave it out"
            findings.append(_finding("error", text, word, shape.partition("=")[0]))
        elif is_sure or ("=" in shape and not shape.startswith("-")):
            words.append(word)
    given, refused = dotlist(words)
    for word, text in refused:
        shape = word.text.shape
        findings.append(
            _finding("error", f"{shape[:80]} {text}", word, shape.partition("=")[0])
        )
    if document:
        given = [*documents.settings(document, documents.OMEGACONF), *given]
    given = [o._replace(key=ALIASES.get(o.key, o.key)) for o in given]
    for override in [o for o in given if o.key in rules.REMOVED]:
        key, is_harmless = override.key, override.value in rules.REMOVED[override.key]
        text = f"SkyRL has no key {key} any more, and refuses it; leave it out"
        if not is_harmless:
            findings.append(_finding("error", text, override.word, key))
        given.remove(override)
    return given, findings


def _program(name: str, programs: Mapping[str, str]) -> str:
    """The recorded module of a program, empty for the user's own."""
    name = name.removesuffix(".py").replace("/", ".").strip(".")
    return next((p for p in programs if p == name or name.endswith(f".{p}")), "")


def _fits(node: ast.expr, value: Any) -> bool:
    """Dataclasses accept anything; a value that is not a number fails in arithmetic."""
    kinds = {ast.unparse(one) for one in pydantic_types.members(node)}
    if isinstance(value, str) and kinds <= {"int", "float", "bool", "None"}:
        return False
    if isinstance(value, list | dict):
        return not kinds <= {"int", "float", "bool", "None"}
    return True


def _finding(level: str, text: str, word: Word, key: str) -> Finding:
    return Finding(UNKNOWN, level, text, word.file, word.line, key)


# -- values ------------------------------------------------------------------------


DERIVED: looking.Derived[Look] = {
    "teacher": (rules.teacher, "trainer.ref.model.path"),
    "use_dynamic_bsz": (rules.is_dynamic, "trainer.max_tokens_per_microbatch > 0"),
    "max_tokens_per_gpu": (rules.tokens, "trainer.max_tokens_per_microbatch"),
    "fsdp_version": (rules.fsdp_version, "2 under trainer.strategy=fsdp"),
    "placement": (rules.placement, "trainer.placement.colocate_all"),
    "trainer_gpus": (lambda look: look.gpus("policy"), "policy_num_nodes * gpus"),
    "rollout_gpus": (lambda look: look.engine_gpus(), "num_engines * TP * PP * DP"),
    "teacher_gpus": (rules.teacher_gpus, "ref_num_nodes * gpus"),
    "total_gpus": (rules.total_gpus, "of all roles that share none"),
}


def _values(config: Config) -> dict[str, Given]:
    """All values that the job has."""
    found = _by_strategy(config, "skyrl", "trainer.strategy")
    found |= looking.derived(config, DERIVED, Look)
    # dataset/dataset.py, _prompt_not_too_long
    found["truncation"] = Given("default", "drop", expression="its only way")
    teacher = found.get("teacher")
    if teacher is not None and not teacher.needs:  # by the key that names the model
        found["teacher"] = _value(config, rules.REF) or teacher
    return found


def _by_strategy(config: Config, table: str, key: str) -> dict[str, Given]:
    """The values of a table, and of the one for the backend named by ``key``."""
    strategy = _value(config, key)
    is_megatron = strategy is not None and strategy.value == "megatron"
    backend = "megatron" if is_megatron else "fsdp"
    found = _named(config, names(table) | names(f"{table}-{backend}"))
    if strategy is not None and strategy.value == "fsdp2":
        found["trainer_strategy"] = Given(strategy.source, "fsdp", strategy.word)
    return found


def _named(config: Config, table: Mapping[str, str]) -> dict[str, Given]:
    found = {name: _value(config, key) for name, key in table.items()}
    return {name: given for name, given in found.items() if given is not None}


def _value(config: Config, key: str) -> Given | None:
    try:
        return config.value(key)
    except UnresolvedError as error:
        return Given("undetermined", needs=frozenset({str(error)}))


def _pools(config: Config) -> tuple[Pool, ...]:
    """Groups whose part on each node is one bundle, unless all share single GPUs.

    workers/worker.py, PPORayActorGroup._initiate_actors, and trainer.py, build_models.
    """
    look = Look(config)
    try:
        roles = [] if look.is_on(f"{rules.PLACEMENT}.colocate_all") else look.apart()
    except looking.NotCertainError:
        return ()
    return tuple(_pool(config, role) for role in roles)


def _pool(config: Config, role: str) -> Pool:
    start = f"{rules.PLACEMENT}.{role}_num"
    nodes, each = (_value(config, f"{start}_{n}") for n in ("nodes", "gpus_per_node"))
    unknown = Given("undetermined")
    key = f"{start}_gpus_per_node"
    return Pool(f"the {role}", nodes or unknown, each or unknown, key)
