"""What is certain of a start of slime or miles, by the options of a release."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from packaging.version import Version

from pytest_gkd.job import releases
from pytest_gkd.job.arguments import MISSING, Option
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.frameworks import sglang_server
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Given, Job, Override

CONFLICT = "config.invalid-combination"
# An array that the script itself never fills is taken to be empty, but for the one that
# a sourced file sets, by slime's convention, to options of the model's shape.
SHAPE = {"MODEL_ARGS"}
ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
SHAPE_KEYS = {
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups"),
    *("ffn_hidden_size", "moe_ffn_hidden_size", "num_experts", "layernorm_epsilon"),
    *("untie_embeddings_and_output_weights", "rotary_base", "group_query_attention"),
    *("mtp_num_layers", "moe_shared_expert_intermediate_size", "vocab_size"),
    *("decoder_last_pipeline_num_layers", "multi_latent_attention"),
}
# Numbers of processes, samples and parts: one at least.
SIZES = {
    *("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus_per_engine"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size"),
    *("expert_tensor_parallel_size", "rollout_batch_size", "n_samples_per_prompt"),
    *("global_batch_size", "num_steps_per_rollout", "num_query_groups"),
    *("sglang_dp_size", "sglang_pp_size", "sglang_ep_size"),
}
# As slime up to 0.2.4 called them, after SGLang's own long names.
OLD_NAMES = {
    "sglang_dp_size": "sglang_data_parallel_size",
    "sglang_pp_size": "sglang_pipeline_parallel_size",
    "sglang_ep_size": "sglang_expert_parallel_size",
}


@cache
def options(
    name: str, release: str
) -> tuple[dict[str, Option], frozenset[str], frozenset[str]]:
    """All options, the names of those that SGLang's parser takes, keys that add up."""
    whole = releases.schema(name, release)
    records = {**whole["served"], **whole["options"]}
    made = {
        option: Option(
            key=_key(option, record),
            type=record.get("type", "str"),
            nargs=record.get("nargs", ""),
            choices=record.get("choices", ()),
        )
        for option, record in records.items()
    }
    added = frozenset(_key(o, r) for o, r in records.items() if r.get("adds"))
    return made, frozenset(whole["served"]), added


def _key(option: str, record: Mapping[str, Any]) -> str:
    return str(record.get("key") or option.lstrip("-").replace("-", "_"))


@cache
def defaults(name: str, release: str) -> dict[str, Any]:
    """The certain defaults by key."""
    whole = releases.schema(name, release)
    found: dict[str, Any] = {}
    for option, record in {**whole["served"], **whole["options"]}.items():
        default = record.get("default")
        if default != "?":
            key = _key(option, record)
            found[key] = found.get(key) if default is None else default
    return found


@cache
def kinds(name: str, release: str) -> dict[str, str]:
    """The types of the keys that are numbers."""
    made = options(name, release)[0].values()
    return {o.key: o.type for o in made if o.type in ("int", "float")}


def _fits(value: Any, kind: str, key: str) -> bool:
    """Whether it is a number, and a size one that something can be divided by."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (kind == "float" or key not in SIZES or value > 0)


class UnsureError(Exception):
    """A value that is not certain."""


class Known:
    """The settings of a start, where they are certain."""

    def __init__(
        self, name: str, release: str, launch: Launch, said: list[Override]
    ) -> None:
        self.name, self.release, self.launch = name, release, launch
        self._job = Job(defaults(name, release), said)
        self._given = {override.key: override for override in said}
        self.shape, self.open = frozenset[str](), frozenset[str]()
        for override in said:
            found = ARRAY.fullmatch(override.word.source)
            if override.key:
                continue
            if override.needs == SHAPE or (found and override.needs == {found[1]}):
                self.shape |= override.needs
            else:
                self.open |= override.needs
        self.servers = list(sglang_server.servers(launch.beside))

    def find(self, key: str) -> Given:
        """A key's value; a default is none where words may be any option."""
        if not self._has(key):
            key = OLD_NAMES.get(key, key)
        given = self._job.value(key)
        needs = self.open | (self.shape if key in SHAPE_KEYS else frozenset())
        if given.source == "default" and needs:
            return Given("undetermined", None, None, needs)
        kind = kinds(self.name, self.release).get(key)
        single = not isinstance(given.value, list) and given.value is not None
        if kind and single and not _fits(given.value, kind, key):
            needs = frozenset({f"a value of {key} that is right"})
            return Given("undetermined", None, given.word, needs)
        return given

    def __getitem__(self, key: str) -> Any:
        """A key's certain value. Raises UnsureError.

        One that the parser demands and nobody gives is not certain, either.
        """
        given = self.find(key)
        if given.needs or (given.value is None and key == "rollout_batch_size"):
            raise UnsureError(key)
        return given.value

    def _has(self, key: str) -> bool:
        return key in defaults(self.name, self.release)

    def has(self, key: str) -> bool:
        """Whether the release has an option of this key."""
        return self._has(key) or self._has(OLD_NAMES.get(key, key))

    def is_given(self, key: str) -> bool:
        """Whether the user says something of it."""
        return key in self._given

    def is_at_least(self, release: str) -> bool:
        """Whether this is slime, and not of an older release."""
        return self.name == "slime" and Version(self.release) >= Version(release)

    def fault(self, cause: str, level: str, message: str, *keys: str) -> Finding:
        """A finding at the last of the keys that the user gives."""
        words = [self._given[key].word for key in keys if key in self._given]
        word = words[-1] if words else self.launch.command.words[0]
        key = next(iter(keys), "")
        return Finding(cause, level, message, word.file, word.line, key)

    def sizes(self) -> Iterator[Finding]:
        """Numbers below one, which divide nothing."""
        for key, override in self._given.items():
            value = override.value
            if key in SIZES and isinstance(value, int) and value < 1:
                text = f"--{key.replace('_', '-')} is {value}, and must be 1 at least"
                yield self.fault(CONFLICT, "error", text, key)

    def missing(self) -> Iterator[Finding]:
        """Options that the parser itself demands."""
        whole = releases.schema(self.name, self.release)
        for option, record in whole["options"].items():
            key = _key(option, record)
            if record.get("required") and not self.open and not self.is_given(key):
                text = f"{self.name} {self.release} refuses a start without {option}"
                yield self.fault(MISSING, "error", text, key)
