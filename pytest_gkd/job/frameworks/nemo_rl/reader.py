"""NeMo-RL: YAML files that inherit, Hydra's overrides, classes that pydantic checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_gkd.job import documents, looking
from pytest_gkd.job.arguments import MISSING, MOST_NEAR, UNKNOWN
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.frameworks import config_file
from pytest_gkd.job.frameworks.nemo_rl import keys as nemo_rl_keys
from pytest_gkd.job.frameworks.nemo_rl import plan as nemo_rl_plan
from pytest_gkd.job.frameworks.nemo_rl import rules as nemo_rl_rules
from pytest_gkd.job.frameworks.nemo_rl.rules import Look
from pytest_gkd.job.frameworks.reading import Pool, Reading, Variable, derived, names
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.looking import NotCertainError
from pytest_gkd.job.omegaconf import Config, UnresolvedError, applied, flat
from pytest_gkd.job.overrides import Given, Override, parsed, refused
from pytest_gkd.job.releases import Release
from pytest_gkd.job.shell_values import NOBODY, Text, Word
from pytest_gkd.options import near

PROGRAM = re.compile(
    r"(?:.*/)?examples/(?:[\w.-]+/)*run_(?:vlm_)?"
    r"(?:\w*distillation|grpo|ppo|dpo|sft|rm|eval)(?:_\w+)?\.py"
)
# The sections that tell the algorithm, the more specific ones first.
ALGORITHMS = ("distillation", "ppo", "grpo", "dpo", "sft", "rm", "eval")
SECTIONS = {
    *("checkpointing", "cluster", "data", "data_plane", "defaults", "env"),
    *("generation", "logger", "loss_fn", "policy", "teacher", "tokenizer", "value"),
    *("async_rl", "on_policy_distillation", "teachers"),
    *ALGORITHMS,
}
FOLDER = "examples/configs"
MOST_FILES = 50
VARIABLE = re.compile(
    r"(?P<section>\w+\.(?:megatron_cfg|dtensor_cfg|generation\.vllm_cfg))\.env_vars\."
    r"(?P<name>\w+)"
)


def is_own(keys: AbstractSet[str]) -> bool:
    """Whether a configuration file is one of NeMo-RL's."""
    tops = {key.partition(".")[0] for key in keys}
    has_cluster = {"cluster.num_nodes", "cluster.gpus_per_node"} & keys
    inherits = "defaults" in keys and {"defaults"} < tops <= SECTIONS
    return bool("policy.model_name" in keys or has_cluster or inherits)


def read(launch: Launch, release: Release) -> Reading:
    """The values of a start of NeMo-RL, and what it would refuse or do differently."""
    schema = release.schema
    given, rest = config_file.given(launch)
    files = Files(schema, release)
    if given is not None and given.text.needs:
        needs = ", ".join(sorted(given.text.needs))
        problem = (
            f"which configuration {given.source[:60]} is cannot be determined: {needs}"
        )
        return _unread(rest, given.text.needs, problem)
    path = launch.document or files.find(launch, given)
    config = files.composed(path) if path else files.shipped(files.own_config(launch))
    config.environment = launch.command.environment
    if given is not None or launch.document:
        config.defaults -= {str(path)}
    said = list(parsed(rest))
    findings = [*files.findings, *_foreign(rest)]
    for looked, (override, text) in enumerate(applied(config, said)):
        looks = looked < MOST_NEAR and "no key" in text
        hint = near(override.key, config.settings) if looks else ""
        text = f"{text}{hint}" if hint else f"{text}: Hydra refuses it"
        findings.append(_finding(UNKNOWN, "error", text, override.word, override.key))
    for setting, text in config.unresolved():
        text = f"{setting.key}: {setting.value} cannot be resolved: {text}"
        findings.append(_finding(MISSING, "error", text, setting.word, setting.key))
    sections = [a for a in ALGORITHMS if config.has(a)]
    algorithm = sections[0] if sections else ""
    findings += nemo_rl_keys.judged(config, algorithm, schema, release)
    findings += nemo_rl_rules.judged(
        config, algorithm, is_script=launch.document is None
    )
    values = _values(config, algorithm, schema)
    variables = tuple(_variables(config))
    pools = _engines(config)
    recipe = nemo_rl_plan.recipe(Look(config), algorithm)
    return Reading(
        *(said, values, list(findings)),
        pools=pools,
        recipe=recipe,
        variables=variables,
    )


def _engines(config: Config) -> tuple[Pool, ...]:
    """SGLang's engines, whose GPUs on a node follow the first; all other GPUs are
    placed one by one (models/generation/sglang/sglang_generation.py;
    distributed/virtual_cluster.py, _create_placement_groups_internal).
    """
    backend = _value(config, "policy.generation.backend")
    start = "policy.generation.sglang_cfg.sglang_server_config"
    keys = ("num_gpus", "num_gpus_per_engine")
    sizes = [_value(config, f"{start}.{key}") for key in keys]
    sizes.append(_value(config, "cluster.gpus_per_node"))
    known = [one for one in sizes if one and type(one.value) is int and one.value > 0]
    if backend is None or backend.value != "sglang" or len(known) < len(sizes):
        return ()
    gpus, engine, node = known
    each = derived("the lesser of both keys", min, engine, node)
    number = derived("num_gpus / each", lambda gpus, each: gpus // each, gpus, each)
    return (Pool("an engine of SGLang's", number, each, f"{start}.{keys[1]}"),)


def _variables(config: Config) -> Iterator[Variable]:
    """What the user's configuration gives to the workers of policies and engines.

    models/policy/lm_policy.py, models/generation/vllm/vllm_generation.py, which
    converts all of them to strings.
    """
    for key, setting in config.settings.items():
        found = VARIABLE.fullmatch(key)
        if not found:
            continue
        try:
            given = config.value(key)
            is_on = config.value(f"{found['section']}.enabled")
        except UnresolvedError:  # is already reported
            continue
        is_off = is_on is not None and is_on.value is False
        if given and not given.needs and given.value is not None and not is_off:
            is_engine = found["section"].endswith("vllm_cfg")
            yield Variable(found["name"], given.value, setting.word, not is_engine)


def _unread(rest: Iterable[Word], needs: frozenset[str], problem: str) -> Reading:
    """What can be said about a start whose configuration cannot be determined."""
    said = list(parsed(rest))
    known = _values(Config(said), "distillation", {})
    tables = [*names("nemo-rl"), *names("nemo-rl-dtensor"), *DERIVED]
    values = {name: Given("undetermined", needs=needs) for name in tables}
    values |= {n: g for n, g in known.items() if n not in DERIVED}
    recipe = nemo_rl_plan.without(problem)
    return Reading(said, values, [], problem, recipe=recipe)


def _foreign(words: Iterable[Word]) -> Iterator[Finding]:
    """Words that are not overrides: argparse passes them on, and Hydra refuses them."""
    for word, text in refused(words, sweeps=True):
        shape = word.text.shape[:60]
        yield _finding(UNKNOWN, "error", f"{shape} {text}", word, shape)


# -- files -------------------------------------------------------------------------


@dataclass
class Files:
    """The files of a configuration, with what they inherit from."""

    schema: Mapping[str, Any]
    release: Release
    findings: list[Finding] = field(default_factory=list)
    read: int = 0

    def find(self, launch: Launch, given: Word | None) -> Path | None:
        """The file that --config names, or the program's own."""
        script = Path(launch.command.file)
        if given is None:
            program = launch.program.partition(f"{FOLDER.partition('/')[0]}/")[0]
            name = f"{program}{FOLDER}/{self.own_config(launch)}"
            return config_file.find(script, name)
        name = given.text.value or ""
        if not name:
            return config_file.find(script, f"{FOLDER}/{self.own_config(launch)}")
        path = config_file.find(script, name)
        if path is None:
            text = f"configuration {name} does not exist; NeMo-RL's defaults are judged"
            self._tell(MISSING, text, given, "defaults")
        return path

    def own_config(self, launch: Launch) -> str:
        """The file that the program takes if no configuration is given."""
        programs = self.schema["programs"]
        name = launch.program.rpartition("/")[2]
        usual = programs.get("run_distillation.py", next(iter(programs.values())))
        return str(programs.get(name, usual))

    def composed(self, path: Path, chain: tuple[Path, ...] = ()) -> Config:
        """A file's settings on top of those of its ``defaults``.

        As load_config_with_inheritance in nemo_rl/utils/config.py: relative to the
        file, depth first, the last one wins.
        """
        self.read += 1
        if self.read > MOST_FILES:
            raise CheckError(
                f"{path} is one of more than {MOST_FILES} files to inherit"
            )
        settings = documents.settings(path, documents.OMEGACONF)
        config = Config()
        for setting in settings:
            if setting.key.partition(".")[0] != "defaults":
                continue
            for name in self._names(setting):
                above = path.parent / name
                here = (*chain, path.resolve())
                if above.resolve() in here:
                    text = f"{name} inherits from {path.name}, which inherits from it"
                    self._tell("config.invalid-combination", text, setting.word, name)
                elif above.is_file():
                    _join(config, self.composed(above, here))
                else:
                    known = name.rpartition("/")[2] in self.schema["configs"]
                    more = f"; read is that of {self.release}" if known else ""
                    text = f"defaults: {name} does not exist (looked for {above}){more}"
                    self._tell(MISSING, text, setting.word, name)
                    if known:
                        _join(config, self.shipped(name.rpartition("/")[2]))
        own = Config(s for s in settings if s.key.partition(".")[0] != "defaults")
        if _is_shipped(path, self.schema):
            own.defaults.add(str(path))
        _join(config, own)
        return config

    def _names(self, setting: Override) -> list[str]:
        value = setting.value
        if setting.key == "defaults" and isinstance(value, str):
            return [value]
        if setting.key == "defaults" and isinstance(value, list):
            return [str(one) for one in value]
        text = "defaults is expected to be a file, or a list of files"
        self._tell(UNKNOWN, text, setting.word, "defaults")
        return []

    def shipped(self, name: str) -> Config:
        """A recorded configuration, with what it inherits from."""
        tree = dict(self.schema["configs"][name])
        above = tree.pop("defaults", [])
        config = Config()
        for one in [above] if isinstance(above, str) else above:
            _join(config, self.shipped(one))
        _join(config, Config(_recorded(flat(tree))))
        return config

    def _tell(self, cause: str, text: str, word: Word, key: str) -> None:
        self.findings.append(_finding(cause, "error", text, word, key))


def _is_shipped(path: Path, schema: Mapping[str, Any]) -> bool:
    where = path.resolve().as_posix()
    return any(where.endswith(f"/{FOLDER}/{name}") for name in schema["configs"])


def _recorded(settings: Iterable[tuple[str, Any]]) -> Iterator[Override]:
    for key, value in settings:
        word = Word(Text(key), "", 0, f"{key}: {value}"[:200])
        yield Override("", key, value, NOBODY, word)


def _join(config: Config, other: Config) -> None:
    """Merge; a top-level section with ``_override_: true`` replaces the previous
    one.
    """
    settings = dict(other.settings)
    for section in other.below(""):
        marker = settings.get(f"{section}._override_")
        if marker is not None and marker.value:
            config.remove(section)
            del settings[marker.key]
    config.merge(settings.values())
    config.defaults |= other.defaults


# -- values ------------------------------------------------------------------------


DERIVED: dict[str, tuple[Callable[[Look], Any], str]] = {
    "load_format": (nemo_rl_rules.load_format, "set by NeMo-RL"),
    "lora_rank": (nemo_rl_rules.lora_rank, "0 without LoRA"),
    "teacher": (nemo_rl_rules.teachers, "the models of all teachers"),
    "teacher_tensor_parallel_size": (
        nemo_rl_rules.teacher_tensor_parallel,
        "the teacher's own backend",
    ),
    "train_files": (nemo_rl_rules.train_files, "all of data.train"),
    "truncation": (nemo_rl_rules.truncation, "by the data's processor"),
    "placement": (nemo_rl_rules.placement, "policy.generation.colocated.enabled"),
    "trainer_gpus": (lambda look: nemo_rl_rules.gpus(look).trainer, "of the cluster"),
    "rollout_gpus": (lambda look: nemo_rl_rules.gpus(look).rollout, "of the cluster"),
    "teacher_gpus": (lambda look: nemo_rl_rules.gpus(look).teacher, "of the cluster"),
    "total_gpus": (
        lambda look: nemo_rl_rules.gpus(look).total,
        "nodes * gpus_per_node",
    ),
}


def _values(
    config: Config, algorithm: str, schema: Mapping[str, Any]
) -> dict[str, Given]:
    """All values that the job has."""
    found: dict[str, Given] = {}
    try:
        backend = Look(config).backend("policy")
    except NotCertainError:
        backend = "dtensor"
    for name, keys in (names("nemo-rl") | names(f"nemo-rl-{backend}")).items():
        for key in keys.format(algorithm=algorithm).split(" | "):
            given = _value(config, key) or nemo_rl_keys.default(key, algorithm, schema)
            if given is not None and (name not in found or found[name].value is None):
                found[name] = given
    found |= looking.derived(config, DERIVED, Look)
    return found


def _value(config: Config, key: str) -> Given | None:
    try:
        return config.value(key)
    except UnresolvedError as error:
        return Given("undetermined", needs=frozenset({str(error)}))


def _finding(cause: str, level: str, text: str, word: Word, key: str) -> Finding:
    return Finding(cause, level, text, word.file, word.line, key)
