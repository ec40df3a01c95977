"""slime and its fork miles: options of Megatron's, SGLang's and their own parsers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from pytest_gkd.job import arguments, releases
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.frameworks.reading import (
    UNKNOWN,
    Pool,
    Reading,
    Variable,
    derived,
    names,
)
from pytest_gkd.job.frameworks.recorded_options import parser
from pytest_gkd.job.frameworks.sglang_server import Server
from pytest_gkd.job.frameworks.slime import plan as slime_plan
from pytest_gkd.job.frameworks.slime import rules as slime_rules
from pytest_gkd.job.frameworks.slime.options import TABLES, Known
from pytest_gkd.job.launch import Launch
from pytest_gkd.job.overrides import Given
from pytest_gkd.job.releases import Release

# No other framework spells these with dashes.
OWN = {
    "--actor-num-nodes",
    "--actor-num-gpus-per-node",
    "--rollout-num-gpus",
    "--rollout-num-gpus-per-engine",
    "--rollout-batch-size",
    "--rollout-max-response-len",
}
HINT = re.compile(r"(?<![A-Za-z])(miles|slime)(?![A-Za-z])")


class Family:
    """One of the two, by name."""

    def __init__(self, name: str) -> None:
        self.NAME = name
        self.PROGRAM = re.compile(
            r"(?P<common>(?:.*/)?train(?:_async|_multi_lora_async)?\.py)"
        )

    def is_own(self, keys: AbstractSet[str]) -> bool:
        """Whether a train.py with these words is this framework's, by its options."""
        if not keys & OWN:
            return False
        hints = [found[1] for key in keys for found in HINT.finditer(key)]
        is_fork = hints.count("miles") > hints.count("slime")
        return is_fork == (self.NAME == "miles")

    def read(self, launch: Launch, release: Release) -> Reading:
        """The values of a start, and what the release makes of its options."""
        taken = parser(release, *TABLES)
        served = parser(release, "served").options
        is_slime = self.NAME == "slime"
        whose = f"{self.NAME} {release}"
        # slime's Megatron parser takes no abbreviations and SGLang's does; both ignore
        # unknown options (slime/utils/arguments.py, parse_args). miles has one parser,
        # Megatron's, which refuses them.
        found = arguments.parsed(
            launch.arguments,
            taken.options,
            whose,
            abbreviations=served if is_slime else (),
            refuses=not is_slime,
            elsewhere=lambda name: releases.elsewhere(
                release, lambda one: name in one.schema["options"]
            ),
        )
        known = Known(release, launch, found.said)
        findings = found.findings
        if not is_slime:
            findings = [_softened(finding, known) for finding in findings]
        for word in found.rest:
            text = f"{word.text.shape[:60]} does not belong to any option"
            level = "warning" if is_slime else "error"
            text += ": it is ignored" if is_slime else f": {whose} refuses it"
            findings.append(Finding(UNKNOWN, level, text, word.file, word.line, ""))
        findings += [*known.missing(), *known.sizes()]
        findings += slime_rules.judged(known)
        last = {o.key: o for o in found.said}
        # The model's shape from a sourced file may be overridden.
        said = [
            o
            for o in found.said
            if last[o.key] is o
            or (o.key not in taken.added and o.word.file == last[o.key].word.file)
        ]
        variables, problems = _variables(known, whose)
        findings += problems
        values = _values(known)
        pools = _engines(known, values)
        recipe = slime_plan.recipe(known)
        return Reading(said, values, findings, "", pools, recipe, variables)


def _softened(finding: Finding, known: Known) -> Finding:
    """miles' own forks of SGLang, and functions of the user's, may add options."""
    is_served = finding.key.startswith(("--sglang-", "--eval-sglang-", "--router-"))
    is_unknown = finding.key.startswith("--")
    adds = ("rollout_function_path", "custom_generate_function_path")
    is_added = any(known.is_given(key) for key in adds)
    backend = known.find("train_backend")
    if is_unknown and backend.value == "fsdp":
        text = f"{finding.key} is not judged: FSDP's own options are not recorded"
        return finding._replace(cause="", level="note", message=text)
    if is_unknown and (is_served or is_added):
        return finding._replace(level="warning")
    return finding


def _variables(known: Known, whose: str) -> tuple[tuple[Variable, ...], list[Finding]]:
    """The variables that ``--train-env-vars`` gives to the trainer's processes.

    slime/ray/actor_group.py (miles/ray/train/actor_factory.py), where they become Ray's
    env_vars.
    """
    if not (known.has("train_env_vars") and known.is_given("train_env_vars")):
        return (), []
    given = known.find("train_env_vars")
    if isinstance(given.value, dict) and given.word:
        return tuple(Variable(n, v, given.word) for n, v in given.value.items()), []
    is_told = str(given.value).startswith("{")  # as invalid JSON
    if given.word and not given.needs and not is_told:
        text = f"--train-env-vars is not a JSON object: {whose} refuses it"
        place = given.word.file, given.word.line, "train_env_vars"
        return (), [Finding(UNKNOWN, "error", text, *place)]
    return (), []


def _values(known: Known) -> dict[str, Given]:
    """All values of the job on one path through the script."""
    find = known.find
    values = {name: find(key) for name, key in names("slime").items() if known.has(key)}
    values["dtype"] = derived(
        "--fp16", lambda half: "float16" if half else "bfloat16", find("fp16")
    )
    values["rollout_engine"] = Given("default", "sglang", expression="the only one")
    values["tensor_parallel_size"] = derived(
        "--rollout-num-gpus-per-engine",
        lambda gpus, pipeline: gpus // max(1, pipeline),
        find("rollout_num_gpus_per_engine"),
        find("sglang_pp_size"),
    )
    values["offload_param"] = derived(
        "--offload-train, or else --colocate",
        lambda own, both, shares: shares if own is None and not both else own or both,
        find("offload_train"),
        find("offload"),
        find("colocate"),
    )
    # slime/utils/data.py (miles/utils/data.py), filter_long_prompt; nothing is
    # truncated.
    values["truncation"] = derived(
        "--rollout-max-prompt-len",
        lambda most: "keep" if most is None else "drop",
        find("rollout_max_prompt_len"),
    )
    trainer = derived(
        "--actor-num-nodes * --actor-num-gpus-per-node",
        lambda nodes, gpus: nodes * gpus,
        find("actor_num_nodes"),
        find("actor_num_gpus_per_node"),
    )
    rollout = _rollout(known, trainer)
    values["trainer_gpus"], values["rollout_gpus"] = trainer, rollout
    values["placement"] = derived(
        "--colocate",
        lambda shares: "colocated" if shares else "split",
        find("colocate"),
    )
    values |= _teacher(known)
    # slime/ray/placement_group.py, _get_placement_group_layout
    values["total_gpus"] = derived(
        "trainer_gpus and rollout_gpus, and teacher_gpus",
        lambda shares, train, roll, teacher: (
            None
            if roll is None
            else (max(train, roll) if shares else train + roll) + teacher
        ),
        find("colocate"),
        trainer,
        rollout,
        values["teacher_gpus"],
    )
    return values


def _rollout(known: Known, trainer: Given) -> Given:
    """How many GPUs the rollout has, including those shared with the trainer."""

    def number(
        own: int | None, shares: bool, train: int, trains_only: bool, data: str | None
    ) -> int | None:
        if trains_only or data is not None:
            return 0
        # miles, and slime up to 0.2.4, ignore --rollout-num-gpus in this case.
        is_set = own is not None and known.is_at_least("0.3.0")
        return train if shares and not is_set else own

    if known.is_given("rollout_external_engine_addrs"):
        needs = frozenset({"what runs at --rollout-external-engine-addrs"})
        return Given("undetermined", None, None, needs)
    return derived(
        "--rollout-num-gpus, or --colocate",
        number,
        known.find("rollout_num_gpus"),
        known.find("colocate"),
        trainer,
        known.find("debug_train_only"),
        known.find("load_debug_rollout_data"),
    )


def _engines(known: Known, values: Mapping[str, Given]) -> tuple[Pool, ...]:
    """SGLang's engines: an engine's GPUs on a node follow its first one, and all other
    GPUs are placed one by one (slime/ray/rollout.py, ServerGroup.start_engines;
    placement_group.py; miles/ray/rollout/server_group.py).
    """
    others = ("sglang_config", "rollout_external", "rollout_external_engine_addrs")
    if any(known.has(key) and known.is_given(key) for key in others):
        return ()
    each = derived(
        "the lesser of both options",
        min,
        known.find("rollout_num_gpus_per_engine"),
        known.find("num_gpus_per_node"),
    )
    number = derived(
        "rollout_gpus / each",
        lambda gpus, each: gpus // each if gpus and each > 0 else 0,
        values["rollout_gpus"],
        each,
    )
    before = derived(
        "--colocate",
        lambda shares, trains, gpus: 0 if shares or trains else gpus,
        known.find("colocate"),
        known.find("debug_rollout_only"),
        values["trainer_gpus"],
    )
    key = "rollout_num_gpus_per_engine"
    return (Pool("an engine of SGLang's", number, each, key, after=before),)


def _teacher(known: Known) -> dict[str, Given]:
    """The teacher: a checkpoint in the trainer, or an SGLang server."""
    kind = derived(
        "--use-opd and --opd-type",
        lambda uses, kind: kind if uses else None,
        known.find("use_opd"),
        known.find("opd_type"),
    )
    if kind.needs:
        return dict.fromkeys(("teacher", "teacher_gpus"), kind)
    none = Given("default", 0, expression="none of its own")
    if kind.value != "sglang":
        teacher = known.find("opd_teacher_load") if kind.value else Given("default")
        return {"teacher": teacher, "teacher_gpus": none}
    values = dict[str, Given]()
    places = slime_rules.teacher_places(known)
    if len(places) == 1:
        ip, port = places[0]
        url = known.find("rm_url" if known.is_given("rm_url") else "opd_teacher_urls")
        values["teacher_server_ip"] = Given("user", ip, url.word)
        values["teacher_server_port"] = Given("user", port, url.word)
    served = slime_rules.teachers(known)
    if not served:
        needs = frozenset({"what is served at the teacher's address"})
        unknown = Given("undetermined", None, None, needs)
        return {**values, "teacher": unknown, "teacher_gpus": unknown}
    return values | _served(served)


def _served(servers: list[Server]) -> dict[str, Given]:
    """The options of the teachers' servers; lists if there are several."""
    keys = {
        "teacher": "model_path",
        "teacher_tensor_parallel_size": "tp_size",
        "teacher_gpu_memory_utilization": "mem_fraction_static",
        "teacher_max_model_len": "context_length",
    }
    found = {}
    for name, key in keys.items():
        each = [server.find(key) for server in servers]
        found[name] = (
            each[0]
            if len(each) == 1
            else derived("each server", lambda *values: list(values), *each)
        )
    found["teacher_gpus"] = derived(
        "the servers' CUDA_VISIBLE_DEVICES, or --tp * --dp",
        lambda *numbers: sum(numbers),
        *(server.number_of_gpus() for server in servers),
    )
    return found
