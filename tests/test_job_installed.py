"""``gkd check`` beside an installed framework: its own copy is read, and never run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from pytest_gkd.job import check, releases
from pytest_gkd.job.check import Checked
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.sources import SOURCES, files, ms_swift

VERL = "verl/trainer/config/_generated_ppo_trainer.yaml"
KEYS = """\
actor_rollout_ref:
  model: {path: null}
  actor: {use_dynamic_bsz: true, of_the_fork: 3, entropy_coeff: 0}
  rollout: {name: vllm, n: 1, nnodes: 0, n_gpus_per_node: 8}
data: {train_batch_size: 77, max_prompt_length: 512}
trainer: {nnodes: 1, n_gpus_per_node: 8}
"""
START = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor."
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lays out files and a distribution's metadata where modules are imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def lay_out(name: str, told: str, sources: dict[str, str]) -> Path:
        (tmp_path / f"{name}-0.dist-info").mkdir()
        (tmp_path / f"{name}-0.dist-info/METADATA").write_text(told)
        for file, text in sources.items():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(text)
        return tmp_path

    return lay_out


def version(number: str, name: str = "verl") -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"


def faults(found: Checked) -> list[str]:
    return [f.message for f in found.findings if f.level == "error"]


def notes(found: Checked) -> list[str]:
    return [f.message for f in found.findings if f.level == "note"]


@pytest.mark.parametrize(
    ("number", "rules"),
    [("0.9.2.dev0+mine", "0.9.1"), ("0.9.0.dev1", "0.8.0"), ("0.7.1", "0.8.0")],
)
def test_a_forks_own_keys_and_defaults_count(
    number: str, rules: str, install: Install
) -> None:
    runs = "raise SystemExit('it was imported')"
    place = install("verl", version(number), {VERL: KEYS, "verl/__init__.py": runs})
    found = check.check(START + "of_the_fork=4")
    assert faults(found) == []
    assert (found.release, found.values["train_batch_size"].value) == (number, 77)
    assert found.release_by == f"read from {place}/verl; rules of {rules}"
    assert "verl" not in sys.modules
    (fault,) = faults(check.check(START + "of_the_frok=4"))
    assert fault.startswith(f"verl {number} has no key")
    assert "of_the_fork" in fault


def test_a_key_that_the_fork_has_not_generated_is_no_fault(install: Install) -> None:
    rollout = {"verl/trainer/config/rollout/rollout.yaml": "n: 1\nnew: 2\n"}
    install("verl", version("0.9.2.dev0"), {VERL: KEYS, **rollout})
    start = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout."
    found = check.check(f"{start}new=4")
    assert faults(found) == []
    assert any("rollout/rollout.yaml, and not in the tree" in t for t in notes(found))
    assert faults(check.check(f"{start}knew=4"))


def test_changed_files_of_a_recorded_release_are_read(install: Install) -> None:
    install("verl", version("0.9.1"), {VERL: KEYS})
    assert "rules of 0.9.1" in check.check(START + "of_the_fork=4").release_by
    asked = check.check(START + "of_the_fork=4", framework="verl==0.9.1")
    assert asked.release_by == "--framework"
    assert any("has no key" in fault for fault in faults(asked))


@pytest.mark.needs("accelerate", "transformers")
@pytest.mark.parametrize("package", ["accelerate", "transformers"])
def test_what_is_read_is_what_was_recorded(package: str) -> None:
    installed = metadata.version(package)
    if installed not in releases.recorded(package):
        pytest.skip(f"{package} {installed} is not recorded")
    _, texts = files.texts(SOURCES[package])
    schema = dict(releases.release(package, installed).schema)
    assert schema.pop("digest") == files.digest(texts)
    schema.pop("removed", None)  # is told by older releases
    assert json.loads(json.dumps(SOURCES[package].read(texts))) == schema
    assert releases.judge(package).by == "the installed one"


def test_the_installed_release_may_be_asked_for(install: Install) -> None:
    install("verl", version("0.9.2.dev0"), {VERL: KEYS})
    found = check.check(START + "of_the_fork=4", framework="verl==0.9.2.dev0")
    assert "read from" in found.release_by
    assert "read from" in check.check(START + "n=1", framework="verl").release_by
    with pytest.raises(CheckError, match=r"0\.9\.3 is neither installed nor recorded"):
        check.check(START + "of_the_fork=4", framework="verl==0.9.3")


@pytest.mark.parametrize("told", ["", "Name: verl\n\n", "Version: what?\n"])
def test_broken_metadata_is_no_obstacle(told: str, install: Install) -> None:
    install("verl", told, {VERL: KEYS})
    found = check.check(START + "of_the_fork=4")
    assert faults(found) == []
    assert "rules of 0.9.1" in found.release_by
    assert found.release in ("of unknown version", "what?")


TRAINING = """
from dataclasses import dataclass, field

@dataclass
class TrainingArguments:
    output_dir: str = field(default="out")
    learning_rate: float = field(default=5e-5)

@dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    sortish: bool = field(default=False)
"""
TRL = {
    "trl/cli.py": "make_sft_parser",
    "trl/trainer/model_config.py": """
from dataclasses import dataclass

@dataclass
class ModelConfig:
    model_name_or_path: str | None = None
""",
    "trl/trainer/sft_config.py": """
from dataclasses import dataclass

@dataclass
class SFTConfig(TrainingArguments):
    of_the_fork: int = 3
""",
    "trl/scripts/sft.py": "parser = TrlParser((SFTConfig, ModelConfig))",
}


def test_trl_is_read_with_the_transformers_beside_it(install: Install) -> None:
    """The class that it inherits is that of the environment, whatever its release."""
    install("trl", version("1.12.0", "trl"), TRL)
    own = {"transformers/training_args.py": TRAINING, "transformers/__init__.py": ""}
    start = "trl sft --model_name_or_path m --output_dir o --of_the_fork 4 --lerning 1"
    found = check.check(start)
    assert "rules of 1.9.0; transformers" in found.release_by
    (fault,) = faults(found)
    assert "TRL 1.12.0 has no option --lerning" in fault
    assert found.values["student"].value == "m"
    without = check.check(start, framework="trl==1.9.0")
    assert any("--of_the_fork" in fault for fault in faults(without))
    install("transformers", version("9.9", "transformers"), own)
    assert releases.judge("transformers").release.schema["classes"].keys() == {
        "TrainingArguments",
        "Seq2SeqTrainingArguments",
    }


SWIFT = "from dataclasses import dataclass\n" + "".join(
    f"""
@dataclass
class {name}:
    rlhf_type: str = "dpo"
    model: str | None = None
    dataset: list[str] | None = None
    of_the_fork: int = 3
"""
    for name in ms_swift.PROGRAMS.values()
)


SWIFT_START = "swift rlhf --rlhf_type gkd --model m --dataset d --of_the_fork 4"


def test_ms_swift_is_read(install: Install) -> None:
    sources = {"swift/arguments/all.py": SWIFT}
    install("ms_swift", version("4.7.0", "ms-swift"), sources)
    found = check.check(SWIFT_START)
    assert "rules of 4.6.0" in found.release_by
    assert not any("has no option" in fault for fault in faults(found))


def test_another_package_of_the_same_name_is_told(install: Install) -> None:
    sources = {"swift/arguments/all.py": "class Proxy: pass"}
    install("ms_swift", version("4.7.0", "ms-swift"), sources)
    told = notes(check.check(SWIFT_START))[0]
    assert "ms-swift 4.7.0 is not read, but 4.6.0: it has no class" in told


NEMO = {
    "nemo_rl/__init__.py": "",
    "nemo_rl/utils/config.py": 'OmegaConf.register_new_resolver("twice", f)',
    "nemo_rl/algorithms/distillation.py": """
from typing import TypedDict

class PolicyConfig(TypedDict):
    model_name: str
    of_the_fork: int

class MasterConfig(TypedDict):
    policy: PolicyConfig

def text():
    return '''
class Lost(
'''
""",
    "examples/run_distillation.py": 'os.path.join(here, "configs", "own.yaml")',
    "examples/configs/own.yaml": "defaults: parts/base.yaml\npolicy: {of_the_fork: 3}",
    "examples/configs/parts/base.yaml": "policy: {model_name: m}",
}


def test_nemo_rl_is_read_with_the_examples_beside_it(install: Install) -> None:
    install("nemo_rl", version("0.8.0rc1", "nemo-rl"), NEMO)
    start = "uv run examples/run_distillation.py policy.of_the_"
    found = check.check(start + "fork=4")
    assert "rules of 0.7.0" in found.release_by
    assert (found.values["student"].value, found.values["student"].source) == (
        "m",
        "default",
    )
    assert not any("of_the_fork" in fault for fault in faults(found))
    assert any(
        "of_the_frok" in fault for fault in faults(check.check(start + "frok=4"))
    )


SLIME = {
    "slime/utils/arguments.py": """
def get_slime_extra_args_provider(add):
    def add_all(parser):
        parser.add_argument("--hf-checkpoint")
        parser.add_argument("--actor-num-nodes", type=int, default=1)
        parser.add_argument("--of-the-fork", type=int, default=LIMIT)
        reset_arg(parser, "--micro-batch-size", type=int, default=7)

LIMIT = 2 * 3
""",
    "slime/backends/sglang_utils/arguments.py": """
skipped_args = ["model_path"]
def add_sglang_arguments(parser):
    parser.add_argument("--sglang-server-concurrency", type=int, default=512)
""",
    "megatron/training/arguments.py": """
def _add_training_args(parser):
    group = parser.add_argument_group(title="training")
    group.add_argument("--micro-batch-size", type=int, default=None)
    ArgumentGroupFactory(TrainingConfig).build_group(parser)
""",
    "megatron/core/config.py": """
@dataclass
class TrainingConfig:
    train_iters: int = 5

def lost(): pass
""",
    "sglang/srt/server_args.py": """
class ServerArgs:
    def add_cli_args(parser):
        parser.add_argument("--model-path")
        parser.add_argument("--mem-fraction-static", type=float)
""",
    "sglang_router/router_args.py": """
class RouterArgs:
    def add_cli_args(parser):
        parser.add_argument("--router-policy", default="cache_aware")
""",
}
SLIME_START = (
    "python train.py --hf-checkpoint m --actor-num-nodes 1 --of-the-fork 4 "
    "--sglang-mem-fraction-static 0.5 --train-iters 3 --router-policy x"
)


def test_slime_is_read_with_the_megatron_and_sglang_beside_it(install: Install) -> None:
    install("slime", version("0.4.0", "slime"), SLIME)
    found = check.check(SLIME_START, framework="slime")
    assert "rules of 0.3.1" in found.release_by
    assert not any("has no option" in finding.message for finding in found.findings)
    options = releases.judge("slime").release.schema["options"]
    assert options["--micro-batch-size"] == {"type": "int", "default": 7}
    assert options["--of-the-fork"]["default"] == 6
    wrong = check.check(f"{SLIME_START} --sglang-model-path m", framework="slime")
    assert any("has no option" in finding.message for finding in wrong.findings)


def test_slime_without_its_megatron_is_told(install: Install) -> None:
    some = {name: text for name, text in SLIME.items() if "megatron" not in name}
    install("slime", version("0.4.0", "slime"), some)
    told = notes(check.check(SLIME_START, framework="slime"))[0]
    assert "slime 0.4.0 is not read, but 0.3.1: megatron is not found" in told


def test_openrlhf_is_read(install: Install) -> None:
    program = (
        'parser.add_argument("--of.the_fork")\nparser.add_argument("--actor.adam.lr")'
    )
    sources = {"openrlhf/cli/train_ppo_ray.py": program}
    install("openrlhf", version("0.12.0", "openrlhf"), sources)
    judged = releases.judge("openrlhf")
    assert "rules of 0.11.2" in judged.by
    assert judged.release.schema["train_ppo_ray"] == {
        "--of.the_fork": {},
        "--actor.adam.lr": {"key": "actor_learning_rate"},
    }


PRIME = {
    "prime_rl/configs/rl.py": """
from prime_rl.configs.trainer import TrainerConfig

class InferenceConfig(BaseConfig):
    model: str = "m"

class RLConfig(BaseConfig):
    trainer: TrainerConfig
    orchestrator: OrchestratorConfig
    inference: InferenceConfig | None = None
    max_steps: int | None = None

    @model_validator(mode="before")
    def fold(cls, data): ...

class OrchestratorConfig(BaseConfig):
    max_steps: int | None = None
    batch_size: int | None = None
    group_size: int = 4
""",
    "prime_rl/configs/trainer.py": """
raise SystemExit("it was run")

class TrainerConfig(BaseConfig):
    max_steps: int | None = None
    of_the_fork: int = 3
""",
    "prime_rl/entrypoints/rl.py": "rl(cli(RLConfig))",
}
PRIME_JOB = """
max_steps = 5
[model]
name = "m"
[trainer]
of_the_fork = 4
[orchestrator]
batch_size = 6
[inference]
"""


def test_prime_rl_is_read(install: Install, tmp_path: Path) -> None:
    place = install("prime_rl", version("0.9.0.dev0", "prime-rl"), PRIME)
    job = tmp_path / "rl.toml"
    job.write_text(PRIME_JOB)
    found = check.check(job)
    assert found.release_by == (
        f"read from {place}/prime_rl; rules of 0.8.0+main.559b4477"
    )
    # It has neither the record's check of batches nor its keys of an engine.
    assert faults(found) == []
    (told,) = [one for one in found.findings if one.level == "warning"]
    assert told.message == (
        "prime-rl 0.9.0.dev0 has no key model, and whether its fold reads it is not "
        "known."
    )
    assert found.values["samples_per_prompt"].value == 4
    job.write_text(PRIME_JOB.replace("of_the_fork", "of_the_frok"))
    (fault,) = faults(check.check(job))
    assert "did you mean 'of_the_fork'" in fault


def test_a_check_of_prime_rls_counts_where_it_is_there(
    install: Install, tmp_path: Path
) -> None:
    install("prime_rl", version("0.9.0.dev0", "prime-rl"), PRIME)
    job, own = tmp_path / "rl.toml", tmp_path / "prime_rl/configs/rl.py"
    job.write_text(PRIME_JOB.replace("[trainer]", "[trainer]\nmax_steps = 6"))
    check_of = "    def resolve_batching(self): ...\n"
    for more, told in (
        ("    token_batch_size: int | None = None\n", 0),
        # The record's rule reads token_batch_size, too, which it does not have here.
        (check_of, 0),
        (f"{check_of}    token_batch_size: int | None = None\n", 1),
        ("    def propagate_shared_fields(self): ...\n", 1),
    ):
        own.write_text(PRIME["prime_rl/configs/rl.py"] + more)
        releases.installed_copy.cache_clear()
        assert len(faults(check.check(job))) == told


FOLDING = """
class ModelConfig(BaseConfig):
    name: str = "m"
    lora: LoraConfig | None = None

class LoraConfig(BaseConfig):
    rank: int = 16

class RolloutConfig(BaseConfig):
    model: ModelConfig = ModelConfig()
    retries: int = 3

class OrchestratorConfig(BaseConfig):
    batch_size: int | None = None
    student: RolloutConfig = Field(
        RolloutConfig(), validation_alias=AliasChoices("student", "model")
    )
    BEFORE
    def fold(cls, data):
        return moved(data, set(ModelConfig.model_fields))
"""
BEFORE = "@model_validator(mode='before')"


def test_keys_that_a_validator_of_prime_rls_moves_down_are_taken(
    install: Install, tmp_path: Path
) -> None:
    files = {
        "prime_rl/configs/orchestrator.py": FOLDING.replace("BEFORE", BEFORE),
        "prime_rl/entrypoints/orchestrator.py": "cli(OrchestratorConfig)",
    }
    place = install("prime_rl", version("0.6.0", "prime-rl"), files)
    job = tmp_path / "orchestrator.toml"

    def judged() -> check.Checked:
        return check.check(job, framework="prime-rl")

    start = "batch_size = 4\n[model]\nname = 'x'\nretries = 4\n[model.lora]\n"
    job.write_text(start + "rank = 8\n")
    assert faults(judged()) == []
    job.write_text(start + "rnak = 8\n")
    (fault,) = faults(judged())
    assert "has no key model.lora.rnak; did you mean 'rank'?" in fault
    job.write_text(start.replace("name", "nmae"))
    assert "has no key model.nmae" in faults(judged())[0]
    # Of another validator nothing is known.
    own = place / "prime_rl/configs/orchestrator.py"
    own.write_text(FOLDING.replace("BEFORE", "@model_validator(mode='after')"))
    releases.installed_copy.cache_clear()
    job.write_text(start)
    assert "has no key model.name" in faults(judged())[0]


def test_programs_of_an_early_prime_rl_are_read(
    install: Install, tmp_path: Path
) -> None:
    files = {
        **PRIME,
        "prime_rl/trainer/rl/train.py": "train(cli(TrainerConfig))",
        "prime_rl/orchestrator/orchestrator.py": "run(cli(OrchestratorConfig))",
    }
    install("prime_rl", version("0.5.0", "prime-rl"), files)
    job = tmp_path / "job.toml"
    for text in ("of_the_fork = 4\n", "batch_size = 6\ngroup_size = 3\n"):
        job.write_text(f"max_steps = 5\n{text}")
        assert faults(check.check(job, framework="prime-rl")) == []


def test_a_program_that_the_installed_prime_rl_has_not_is_told(
    install: Install,
) -> None:
    install("prime_rl", version("0.9.0.dev0", "prime-rl"), PRIME)
    (fault,) = faults(check.check("uv run evals @ x.toml"))
    assert fault == "prime-rl 0.9.0.dev0 has no program evals"


def test_a_prime_rl_of_another_layout_is_told(install: Install) -> None:
    own = {**PRIME, "prime_rl/entrypoints/rl.py": "main()"}
    install("prime_rl", version("0.9.0.dev0", "prime-rl"), own)
    found = check.check("uv run rl --max_steps 1", framework="prime-rl")
    assert "none of its programs reads a class of prime_rl" in notes(found)[0]


SKYRL = """\
import copy
from dataclasses import dataclass, field
from enum import Enum

KWARGS = {"a": 1}

class Kind(str, Enum):
    one = "first"
    two = "second"

class NotOne:
    x: int = 1

@dataclass
class ModelConfig:
    path: str | None = None
    kind: Kind = Kind.two
    of_nobody: int = 1

@dataclass
class AlgorithmConfig:
    of_the_fork: int = 5

@dataclass
class TrainerConfig:
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    model: ModelConfig = field(default_factory=lambda: copy.copy(ModelConfig(path="p")))
    kwargs: dict = field(default_factory=lambda: copy.deepcopy(KWARGS))
    ckpt: str = field(default_factory=lambda: os.path.expanduser("~/c"))

@dataclass
class SkyRLTrainConfig:
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
"""
DAPO = """\
from skyrl.train.config import AlgorithmConfig, make_config

@dataclass
class DAPOAlgorithmConfig(AlgorithmConfig):
    buffer: int = 7

@register_advantage_estimator("mine")
def one(): ...

DAPOConfig = make_config(algorithm_cls=DAPOAlgorithmConfig)
cfg = DAPOConfig.from_cli_overrides(sys.argv[1:])
"""
ESTIMATORS = """\
class AdvantageEstimator(StrEnum):
    GAE = "gae"

x = cfg.path, cfg.kind, cfg.ckpt, cfg.kwargs, cfg.of_the_fork
"""


def test_skyrl_is_read_with_what_make_config_makes(install: Install) -> None:
    main = "cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])"
    sources = {
        "skyrl/train/config/config.py": SKYRL,
        "skyrl/train/entrypoints/main_base.py": main,
        "skyrl/backends/ppo_utils.py": ESTIMATORS,
        "skyrl_gym/envs/sql/env.py": "",
        "examples/train/dapo/main_dapo.py": DAPO,
    }
    install("skyrl", version("0.9.0", "skyrl"), sources)
    install("skyrl_gym", version("0.9.0", "skyrl_gym"), sources)
    judged = releases.judge("skyrl")
    assert "rules of 0.3.0" in judged.by
    schema = judged.release.schema
    fields = schema["classes"]["TrainerConfig"]["fields"]
    assert fields["model"] == "ModelConfig = ModelConfig(path='p')"
    assert fields["kwargs"] == "dict = {'a': 1}"
    assert fields["ckpt"] == "str = '~/c'"
    assert schema["classes"]["ModelConfig"]["fields"]["kind"] == (
        "Literal['one', 'two'] = 'two'"
    )
    assert schema["unread"] == {"ModelConfig": ["of_nobody"]}
    assert "NotOne" not in schema["classes"]
    dapo = "examples.train.dapo.main_dapo"
    assert schema["estimators"][""] == ["gae"]
    assert schema["estimators"][dapo] == ["mine"]
    found = check.check(f"python -m {dapo} trainer.algorithm.bufer=1")
    (told,) = [f.message for f in found.findings if "bufer" in f.message]
    assert "did you mean 'buffer'" in told


def test_skyrl_without_its_examples_has_those_of_the_record(install: Install) -> None:
    main = "cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])"
    sources = {
        "skyrl/train/config/config.py": SKYRL,
        "skyrl/train/entrypoints/main_base.py": main,
        "skyrl_gym/envs/sql/env.py": "",
    }
    install("skyrl", version("0.9.0", "skyrl"), sources)
    install("skyrl_gym", version("0.9.0", "skyrl_gym"), sources)
    schema = releases.judge("skyrl").release.schema
    name = "examples.train.on_policy_distillation.main_on_policy_distill"
    assert schema["programs"][name] == "SkyRLTrainConfig"
    assert schema["estimators"][name] == ["no_op"]
    own = schema["classes"]["AlgorithmConfig"]["fields"]
    assert own == {"of_the_fork": "int = 5"}


AREAL = """\
@dataclass
class ActorConfig:
    path: str = ""
    backend: str = MISSING
    top: int = field(default=int(1e3))

@dataclass
class PPOConfig:
    actor: ActorConfig = field(default_factory=ActorConfig)
    of_the_fork: int = 1
"""
TRAIN = """\
from configs import MineConfig
config, _ = load_expr_config(args, MineConfig)
"""
MINE = """\
from areal.api.cli_args import PPOConfig

@dataclass
class MineConfig(PPOConfig):
    mine: int = 2
"""


def test_areal_is_read_with_the_classes_of_its_examples(
    install: Install, tmp_path: Path
) -> None:
    sources = {
        "areal/api/cli_args.py": AREAL,
        "areal/trainer.py": "x.actor.path, x.backend, x.top, x.mine",
        "examples/one/train.py": TRAIN,
        "examples/one/configs.py": MINE,
        "examples/two/configs.py": MINE.replace("int = 2", "int = 3"),
    }
    install("areal", version("1.9.0", "areal"), sources)
    judged = releases.judge("areal")
    assert "rules of 1.0.4" in judged.by
    schema = judged.release.schema
    assert schema["programs"]["examples.one.train"] == "MineConfig@examples_one_configs"
    assert schema["unread"]["PPOConfig"] == ["of_the_fork"]
    assert schema["classes"]["ActorConfig"]["fields"]["backend"] == "str"
    path = tmp_path / "job.yaml"
    path.write_text("actor: {path: P}\nmin: 1\n")
    script = tmp_path / "run.sh"
    start = f"python examples/one/train.py --config {path} scheduler.type=local"
    script.write_text(start)
    (told,) = [f for f in faults(check.check(script)) if "has no key min" in f]
    assert "did you mean 'mine'" in told
    assert "AReaL 1.9.0 refuses a configuration without actor.backend" in faults(
        check.check(script)
    )


BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        (
            {"verl/trainer/config/ppo_trainer.yaml": KEYS},
            "has no verl/trainer/",
        ),
        ({VERL: "- a list"}, "laid out otherwise (CheckError: "),
        ({VERL: "a: {b: 1}"}, "has no key actor_rollout_ref.model.path"),
        ({VERL: "a: [" * 500}, "nested deeper"),
        ({VERL: BOMB}, "stands for more than"),
        ({VERL: "#" * (33 << 20)}, "has more than is read"),
        ({"verl.py": "x = 1"}, "is not found where"),
    ],
)
def test_another_layout_is_told_and_the_newest_recorded_judges(
    sources: dict[str, str], why: str, install: Install
) -> None:
    install("verl", version("1.2.3"), sources)
    found = check.check(START + "use_dynamic_bsz=True")
    (told,) = [text for text in notes(found) if "installed" in text]
    assert told.startswith("the installed verl 1.2.3 is not read, but 0.9.1: ")
    assert why in told
    assert (found.release, found.release_by) == ("0.9.1", "the newest recorded")


def test_a_folder_that_may_not_be_read_is_told(install: Install) -> None:
    place = install("verl", version("1.2.3"), {VERL: KEYS})
    (place / VERL).parent.chmod(0)
    if os.access((place / VERL).parent, os.R_OK):
        pytest.skip("this user may read everything")
    try:
        found = check.check(START + "use_dynamic_bsz=True")
    finally:
        (place / VERL).parent.chmod(0o755)
    assert any("is not read" in text for text in notes(found))


ROLL = """\
from dataclasses import dataclass, field
from roll.configs.worker_config import WorkerConfig
@dataclass
class RLVRConfig:
    sequence_length: int = field(default=None, metadata={"help": "tokens"})
    of_the_fork: int = 3
    unread_by_it: int = 3
    actor_train: WorkerConfig = field(default_factory=WorkerConfig)
"""
WORKER = """\
from dataclasses import dataclass, field
@dataclass
class WorkerConfig:
    device_mapping: str = field(default=None)
"""


def test_roll_is_read_without_the_start_scripts_of_its_examples(
    install: Install, tmp_path: Path
) -> None:
    sources = {
        "roll/configs/base_config.py": ROLL,
        "roll/configs/worker_config.py": WORKER,
        "roll/pipeline/own.py": "x.of_the_fork, x.sequence_length, x.actor_train",
        "roll/datasets/chat_template.py": '@register_chat_template("mine")\n',
        "roll/utils/fsdp_utils.py": 'config.get("own_size", 1)',
    }
    install("roll", version("1.9.0", "roll"), sources)
    judged = releases.judge("roll")
    assert "rules of 0.3.0" in judged.by
    schema = judged.release.schema
    assert schema["programs"]["examples.start_rlvr_pipeline"] == "RLVRConfig"
    assert schema["unread"]["RLVRConfig"] == ["unread_by_it"]
    assert (schema["templates"], schema["fsdp2"]) == (["mine"], ["own_size"])
    assert "tensor_model_parallel_size" in schema["megatron"]


def test_another_package_of_the_name_roll_is_not_read(install: Install) -> None:
    install("roll", version("0.13.1", "roll"), {"roll/__init__.py": "class Roll: ..."})
    judged = releases.judge("roll")
    assert judged.release == releases.newest("roll")
    assert "has no roll/configs/base_config.py" in judged.problems[0]
