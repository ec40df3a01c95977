"""``gkd check`` on configurations and command lines of prime-rl."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.job import check, pydantic_types
from pytest_gkd.job.check import Checked
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.frameworks.prime_rl import rules as prime_rl_rules
from pytest_gkd.job.sources import prime_rl as sources

RELEASE = "prime-rl==0.8.0+main.559b4477"
BASE = """\
seq_len = 4096
[model]
name = "student"
[orchestrator]
batch_size = 64
group_size = 8
[orchestrator.algo]
type = "opd"
[orchestrator.algo.teacher]
name = "teacher"
base_url = "http://there:8001/v1"
[[orchestrator.train.source]]
env = { taskset = { id = "reverse-text" } }
[trainer.optim]
lr = 3e-6
[inference.vllm]
tensor_parallel_size = 1
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return tmp_path / "rl.toml"


def checked(path: Path, text: str, *overrides: str) -> Checked:
    path.write_text(text)
    return check.check(path, overrides, RELEASE)


def started(path: Path, options: str, base: str = BASE) -> Checked:
    path.write_text(base)
    script = path.parent / "run.sh"
    script.write_text(f"#!/bin/bash\nuv run --no-sync rl @ rl.toml {options}\n")
    return check.check(script, (), RELEASE)


def told(found: Checked) -> list[tuple[str, str]]:
    return [(f.level, f.key) for f in found.findings if f.level != "note"]


def value(found: Checked, name: str) -> tuple[Any, str]:
    one = found.values[name]
    return one.value, one.source


# -- values ------------------------------------------------------------------------


def test_values_come_with_the_lines_they_stand_in(job: Path) -> None:
    found = checked(job, BASE)
    assert told(found) == []
    expected = {
        "student": ("student", "user", 3),
        "tokenizer": ("student", "user", 3),
        "teacher": ("teacher", "user", 10),
        "teacher_server_ip": ("there", "user", 11),
        "teacher_server_port": (8001, "user", 11),
        "loss": ("opd", "user", 8),
        "max_length": (4096, "user", 1),
        "learning_rate": (3e-6, "user", 15),
        "train_batch_size": (8, "user", 0),
        "ppo_mini_batch_size": (64, "user", 5),
        "temperature": (1.0, "default", 0),
        "gpu_memory_utilization": (0.9, "default", 0),
        "lora_rank": (0, "default", 0),
        "trainer_gpus": (1, "default", 0),
        "rollout_gpus": (1, "default", 0),
        "total_gpus": (2, "default", 0),
    }
    values = found.values
    read = {n: (values[n].value, values[n].source, values[n].line) for n in expected}
    assert read == expected


def test_it_is_known_by_its_sections(job: Path) -> None:
    job.write_text(BASE)
    assert check.check(job).framework == "prime-rl"
    job.write_text('[model]\nname = "m"\n[data]\nname = "d"\n[optim]\nlr = 1e-5\n')
    found = check.check(job)
    assert (found.framework, value(found, "train_files")[0]) == ("prime-rl", "d")


def test_several_nodes_count_with_their_replicas(job: Path) -> None:
    text = BASE + (
        '[deployment]\ntype = "multi_node"\nnum_train_nodes = 2\n'
        "num_infer_replicas = 3\n[slurm]\n[inference.deployment]\n"
        'type = "disaggregated"\ndecode_nodes_per_replica = 2\n'
    )
    found = checked(job, text)
    assert told(found) == []
    names = ("trainer_gpus", "rollout_gpus", "nodes", "total_gpus")
    assert [found.values[name].value for name in names] == [16, 72, 11, 88]


def test_sources_may_have_algorithms_of_their_own(job: Path) -> None:
    text = BASE + '[[orchestrator.train.source]]\nname = "x"\nenv = {}\n'
    text += 'algo = { type = "grpo" }\n'
    assert value(checked(job, text), "loss") == (["opd", "grpo"], "user")
    text = BASE.replace("[trainer.optim]", "group_size = 4\n[trainer.optim]")
    assert "train_batch_size" not in checked(job, text).values


def test_without_inference_there_is_no_rollout(job: Path) -> None:
    found = checked(job, BASE.partition("[inference")[0])
    assert value(found, "rollout_gpus") == (0, "default")
    assert "placement" not in found.values
    assert "gpu_memory_utilization" not in found.values


# -- command lines -----------------------------------------------------------------


def test_later_files_and_then_options_count(job: Path) -> None:
    more = job.parent / "more.toml"
    more.write_text("seq_len = 1024\n[orchestrator]\ngroup_size = 16\n")
    lora = job.parent / "lora.toml"
    lora.write_text("rank = 4\n")
    options = (
        "@ more.toml --trainer.model.lora @ lora.toml --trainer.optim.lr 1e-5 "
        "--inference.vllm.max-num-seqs 32 --seq-len=2048"
    )
    found = started(job, options)
    assert told(found) == []
    assert value(found, "max_length") == (2048, "user")
    assert value(found, "samples_per_prompt") == (16, "user")
    assert value(found, "lora_rank") == (4, "user")
    assert value(found, "learning_rate") == (1e-5, "user")
    assert value(found, "max_num_seqs") == (32, "user")
    assert found.values["learning_rate"].line == 2
    assert found.values["samples_per_prompt"].file == str(more)


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ("--trainer.model.fsdp-cpu-offload", "offload_param", True),
        ("--trainer.model.fsdp-cpu-offload false", "offload_param", False),
        ("--no-trainer.model.optim-cpu-offload", "offload_optimizer", False),
        ("--no-inference.vllm.enforce-eager", "enforce_eager", False),
        ("--inference.vllm.enforce-eager", "enforce_eager", True),
        ("--no-inference", "rollout_gpus", 0),
        ("--inference None", "rollout_gpus", 0),
        ("--inference", "rollout_gpus", 1),
        ("--trainer.model.lora", "lora_rank", 16),
        ("--trainer.model.lora.rank 4", "lora_rank", 4),
        (
            "--trainer.optim.max-norm None --trainer.model.cp 2",
            "context_parallel_size",
            2,
        ),
        ("--orchestrator.train.sampling.temperature -0", "temperature", 0),
    ],
)
def test_options_are_read_as_pydantic_config_does(
    options: str, name: str, expected: Any, job: Path
) -> None:
    assert started(job, options).values[name].value == expected


@pytest.mark.parametrize(
    ("options", "key", "says"),
    [
        ("--trainer.model.lora.rank=9", "trainer.model.lora.rank", "write --trainer"),
        ("--ckpt=x", "ckpt", "takes the = for a part of the name"),
        ("--no-orchestrator.resume.step", "orchestrator.resume.step", "at least 1"),
        ("--trainer.model.seqlen 9", "trainer.model.seqlen", "did you mean 'seq_len'"),
        ("--orchestrator 5", "orchestrator", "is a section"),
        ("stray", "stray", "is not an option"),
        ("@ gone.toml", "gone.toml", "does not exist"),
        ("@", "@", "is not followed by a file"),
        ("--max-steps", "max_steps", "has no value"),
        ("--orchestrator.group-size many", "orchestrator.group_size", "expects"),
        ("@ run.sh", "run.sh", "is not one of"),
    ],
)
def test_options_that_it_refuses(options: str, key: str, says: str, job: Path) -> None:
    found = started(job, options)
    assert ("error", key) in told(found)
    assert says in "".join(f.message for f in found.findings)


def test_an_option_of_vllm_with_its_value_behind_an_equals_sign_is_lost(
    job: Path,
) -> None:
    found = started(job, "--inference.vllm.max-model-len=9")
    assert told(found) == [("warning", "inference.vllm.max-model-len")]
    # Below a union of a union pydantic_config looks for no section.
    options = "--trainer.model.quantization.type=fp8 --trainer.model.impl custom"
    assert told(started(job, options)) == []


def test_lists_take_words_or_json(job: Path) -> None:
    key = "trainer.log.ranks_filter"
    for options in ("0 1", "'[0, 1]'", ""):
        assert told(started(job, f"--trainer.log.ranks-filter {options}")) == []
    found = told(started(job, "--trainer.log.ranks-filter 0 x"))
    assert found == [("error", key)]
    # Below a section that may be absent, one word counts, and is not a list.
    found = told(started(job, "--trainer.model.ac.targets norm mlp"))
    assert found == [("error", "mlp"), ("error", "trainer.model.ac.targets")]


def test_what_a_variable_decides_is_undetermined(job: Path) -> None:
    found = started(job, '--trainer.optim.lr $LR --orchestrator.group-size "$N"')
    assert value(found, "learning_rate") == (None, "undetermined")
    assert value(found, "train_batch_size") == (None, "undetermined")
    assert told(found) == []
    found = started(job, "@ $FILE $MORE")
    assert any("is not known" in f.message for f in found.findings)


def test_other_programs_have_classes_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text("[model]\nseq_len = 8\n[optim]\nlr = 1\n[data]\n")
    script = tmp_path / "run.sh"
    script.write_text("torchrun -m prime_rl.trainer.rl.train @ t.toml --model.cp 2\n")
    found = check.check(script)
    assert (found.framework, told(found)) == ("prime-rl", [])
    assert value(found, "max_length") == (8, "user")
    script.write_text("uv run trainer @ t.toml --modell.cp 2\n")
    assert told(check.check(script)) == [("error", "modell")]


def test_an_rl_of_somebody_else_is_not_taken(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("uv run rl --config x.yaml\n")
    with pytest.raises(CheckError, match="no command was found"):
        check.check(script)


# -- keys and types ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "key", "says"),
    [
        ("[trainer.model]\nimp = 'hf'", "trainer.model.imp", "did you mean 'impl'"),
        ("[trainer.optim2]", "trainer.optim2", "no key"),
        ("[trainer.loss]\ntype = 'x'", "trainer.loss", "known values are default, ipo"),
        ("[weight_broadcast]\nport = 1", "weight_broadcast", "needs a type"),
        (
            "[trainer.scheduler]\nwarmup_steps = 1",
            "trainer.scheduler.warmup_steps",
            "no",
        ),
        ("[trainer.model]\ncp = 'x'", "trainer.model.cp", "expects int"),
        ("[trainer.model]\nattn = 'sdpa'", "trainer.model.attn", "flash_attention_2"),
        ("[trainer]\nmodel = 5", "trainer.model", "expects ModelConfig of trainer"),
        ("[trainer]\ntrace_path = {}", "trainer.trace_path", "expects Path"),
        ("[trainer.gc]\ninterval = 0", "trainer.gc.interval", "at least 1"),
        ("[trainer.env_vars]\nWANDB_RUN_ID = 'x'", "trainer.env_vars.WANDB_RUN_ID", ""),
        ("[[orchestrator.eval.source]]\nratio = 0\nenv = {}", "", "above 0"),
        ("[[orchestrator.eval.source]]\nrate = 0\nenv = {}", "", "'ratio'"),
    ],
)
def test_what_no_class_takes_is_told(more: str, key: str, says: str, job: Path) -> None:
    text = BASE.replace("[trainer.optim]\nlr = 3e-6\n", "") + more + "\n"
    found = checked(job, text if "[trainer" in more else f"{text}[trainer]\n")
    (fault,) = [f for f in found.findings if f.level != "note"]
    assert (fault.level, fault.cause) == ("error", "config.unknown-option")
    assert key in fault.key
    assert says in fault.message
    assert fault.line > 14


@pytest.mark.parametrize(
    "raw",
    [
        b"[[orchestrator.train.source]]\n" * 4_000,
        b"[trainer.model]\nlora = []\ncp = {}\n[orchestrator]\nalgo = []\nmodel = 1\n",
        b"seq_len = nan\n[trainer]\n[deployment]\ntype = [1]\ngpus_per_node = 1e400\n",
        b"[inference]\nvllm = 1\nrouter = 1\n[orchestrator]\ntrain = { source = {} }",
        b"[orchestrator.algo]\ntype = 'opd'\nteacher = []",
        b"[trainer]\n[orchestrator.algo.teacher]\nbase_url = 'http://[x:y'\n",
    ],
)
def test_values_of_any_type_are_taken_in_stride(raw: bytes, job: Path) -> None:
    job.write_bytes(raw)
    found = check.check(job, framework=RELEASE)
    assert any(f.level == "error" for f in found.findings)
    assert len(found.findings) <= check.MOST_FINDINGS
    assert check.text(found)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"#" * (2 << 20), "2.1 MB"),
        (b"[trainer]\nx = " + b"[" * 50_000, "nested deeper"),
        ("[trainer]\n".encode("utf-16"), "binary"),
        (b"[trainer\n", "is not valid TOML"),
    ],
)
def test_files_that_are_none_are_refused(raw: bytes, says: str, job: Path) -> None:
    job.write_bytes(raw)
    with pytest.raises(CheckError, match=r"rl\.toml") as caught:
        check.check(job, framework=RELEASE)
    assert says in str(caught.value)
    (job.parent / "a.toml").mkdir()
    with pytest.raises(CheckError, match="directory"):
        check.check(job.parent / "a.toml", framework=RELEASE)


def test_what_is_missing_is_told(job: Path) -> None:
    found = checked(job, "[orchestrator.algo]\ntype = 'opd'\n")
    missing = [(f.cause, f.key) for f in found.findings if "without" in f.message]
    assert missing == [
        ("config.missing-value", "orchestrator.algo.teacher"),
        ("config.missing-value", "trainer"),
    ]


def test_any_argument_of_vllm_passes(job: Path) -> None:
    assert told(checked(job, f"{BASE}whatever = 1\n")) == []


def test_a_text_none_is_no_value(job: Path) -> None:
    text = BASE.replace(
        "[inference.vllm]", "[inference]\nrouter = 'None'\n[inference.vllm]"
    )
    assert told(checked(job, text)) == []


# -- rules -------------------------------------------------------------------------

REFUSED = tomllib.loads((Path(__file__).parent / "prime_rl_refused.toml").read_text())
CASES = [(case["source"], case["text"]) for case in REFUSED["case"]]


@pytest.mark.parametrize(("source", "text"), CASES)
def test_a_rule_of_its_own_speaks_alone(source: str, text: str, job: Path) -> None:
    found = checked(job, text)
    errors = [f for f in found.findings if f.level != "note"]
    assert errors
    assert {f.cause for f in errors} == {"config.invalid-combination"}
    others = {f.message for f in errors if f"({source})" not in f.message}
    # Of some, prime-rl refuses the same in another section too.
    assert len(others) <= 1
    assert len(others) < len(errors)


def test_every_rule_has_a_case(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = set(prime_rl_rules.RULES)

    def heard(rule: prime_rl_rules.Rule) -> prime_rl_rules.Rule:
        def refused(view: prime_rl_rules.View) -> bool:
            if is_refused := bool(rule.refused(view)):
                silent.discard(rule)
            return is_refused

        return rule._replace(refused=refused)

    monkeypatch.setattr(prime_rl_rules, "RULES", [*map(heard, prime_rl_rules.RULES)])
    for _, text in CASES:
        checked(job, text)
    assert [(rule.section, rule.key) for rule in silent] == []


def test_an_address_that_is_a_list_is_told(job: Path) -> None:
    found = checked(job, BASE.replace('"http://there:8001/v1"', '["http://there"]'))
    assert any("base_url" in one.key for one in found.findings)
    assert "teacher_server_ip" not in found.values


def test_a_shared_key_that_a_role_contradicts_is_refused(job: Path) -> None:
    text = f"{BASE}[trainer.model]\nname = 'other'\n"
    found = checked(job, text)
    assert told(found) == [("error", "trainer.model.name")]
    assert "the shared model.name is student" in found.findings[0].message
    assert found.findings[0].line == 19
    assert told(checked(job, text.replace("other", "student"))) == []


def test_a_shared_transport_has_the_type_of_the_roles(job: Path) -> None:
    assert told(checked(job, f"{BASE}[rollout_transport]\nport = 9\n")) == []


def test_lengths_that_are_cut_short(job: Path) -> None:
    key = "orchestrator.train.sampling.max_completion_tokens"
    text = f"{BASE}max_model_len = 4097\n[orchestrator.train.sampling]\n"
    assert told(checked(job, f"{text}max_completion_tokens = 4096\n")) == []
    assert told(checked(job, f"{text}max_completion_tokens = 4097\n")) == [
        ("warning", key),
        ("warning", key),
    ]


# -- its parts ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "value", "says"),
    [
        ("Annotated[int, Field(ge=1)]", 0, "at least 1"),
        ("Annotated[int, Field(ge=1)]", 1, ""),
        ("Annotated[float, Field(gt=0, lt=1)]", 1, "below 1"),
        ("Annotated[float, Field(gt=0, le=1)]", 0, "above 0"),
        ("Annotated[float, Field(le=2.0)]", 2.1, "at most 2.0"),
        ("Annotated[int | None, Field(ge=1)]", None, ""),
        ("int", -1, ""),
    ],
)
def test_bounds_of_a_field(annotation: str, value: Any, says: str) -> None:
    node = ast.parse(annotation, mode="eval").body
    assert pydantic_types.out_of_bounds(node, value) == says


SOURCES = {
    "configs/shared.py": (
        "from typing import TypeAlias\n"
        "Vars: TypeAlias = Annotated[dict[str, str], AfterValidator(f)]\n"
        "class Model(BaseConfig):\n    a: 'Other | None' = None\n"
        "    b: Annotated['Other | None', Field()] = None\n"
        "class Other(BaseConfig):\n    model_config = ConfigDict(extra='allow')\n"
    ),
    "configs/rl.py": (
        "from prime_rl.configs.shared import Model as Shared, Vars\n"
        "class Model(Shared):\n    KIND: ClassVar[int] = 1\n"
        "    n: int = Field(1, ge=1, validation_alias=AliasChoices('n', 'number'))\n"
        "    need: int = Field(..., gt=0)\n"
        "    own: Shared = Field(default_factory=Shared)\n"
        "    many: list[int] = Field(default_factory=lambda: [1])\n    v: Vars = {}\n"
        "    @model_validator(mode='before')\n    def fold(cls, data): ...\n"
        "    @model_validator(mode='after')\n    def check(self): ...\n"
        "class Strange(Unknown):\n    a: int\n"
        "class Child(Strange):\n    c: int\n"
    ),
    "entrypoints/rl.py": "def main():\n    rl(cli(Model))\n",
    "entrypoints/of_a_stranger.py": "cli(Strange)\n",
}


def test_classes_are_recorded_with_what_their_names_mean() -> None:
    found = sources.read({f"prime_rl/{name}": text for name, text in SOURCES.items()})
    assert found.pop("programs") == {"rl": "Model__at__rl"}
    assert found.pop("checks") == ["check", "fold"]
    assert found.pop("classes") == {
        "Model__at__shared": {
            "bases": [],
            "fields": {
                "a": "Other | None = None",
                "b": "Annotated[Other | None, Field()] = None",
            },
        },
        "Other": {"bases": [], "fields": {}, "any": True},
        "Model__at__rl": {
            "bases": ["Model__at__shared"],
            "aliases": {"n": "n", "number": "n"},
            "before": ["fold"],
            "fields": {
                "n": "Annotated[int, Field(ge=1)] = 1",
                "need": "Annotated[int, Field(gt=0)]",
                "own": "Model__at__shared = lambda: Model__at__shared()",
                "many": "list[int] = ...",
                "v": "Annotated[dict[str, str], AfterValidator(f)] = {}",
            },
        },
    }
    assert not found
