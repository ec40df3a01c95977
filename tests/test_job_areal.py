"""``gkd check`` on AReaL: values, keys and types, and what it refuses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.job import debug_config
from pytest_gkd.job.check import Checked, check
from pytest_gkd.job.findings import CheckError, Finding
from pytest_gkd.job.frameworks.areal import backends

NAMES = "experiment_name: e, trial_name: t"
FILE = f"""\
experiment_name: e
trial_name: t
total_train_epochs: 2
tokenizer_path: ${{actor.path}}
cluster: {{n_nodes: 1, n_gpus_per_node: 8}}
scheduler: {{type: null}}
rollout: {{backend: "vllm:d2t1", {NAMES}}}
gconfig: {{n_samples: 4, max_new_tokens: 1024}}
actor:
  backend: "fsdp:d2"
  {NAMES.replace(", ", chr(10) + "  ")}
  path: Qwen/Qwen3-0.6B
  kl_ctl: 0.0
  mb_spec: {{max_tokens_per_mb: 10240}}
  optimizer: {{lr: 1e-5}}
  reward_norm: {{mean_level: group, std_level: group, group_size: 4}}
  use_decoupled_loss: true
  rejection_sampling: {{metric: ratio, upper: 5.0}}
teacher:
  backend: "fsdp:d1t4"
  {NAMES.replace(", ", chr(10) + "  ")}
  path: Qwen/Qwen3-8B
train_dataset: {{batch_size: 64, path: openai/gsm8k, type: rl, max_length: 512}}
saver: {{{NAMES}, fileroot: /tmp}}
recover: {{{NAMES}, fileroot: /tmp}}
evaluator: {{{NAMES}, fileroot: /tmp}}
stats_logger: {{{NAMES}, fileroot: /tmp}}
"""
SHARED = "++actor.scheduling_strategy.target=rollout"
KIND = "++actor.scheduling_strategy.type=colocation"
MOE = '++actor.backend="megatron:(attn:d4p2t2|ffn:'


def faults(found: Checked) -> list[Finding]:
    return [f for f in found.findings if f.level != "note"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(FILE)
    return path


def told(file: Path, *more: str) -> list[Finding]:
    return faults(check(file, more))


def test_a_file_that_is_right_has_no_fault(file: Path) -> None:
    found = check(file)
    assert found.framework == "areal"
    assert not faults(found)
    values = {name: value.value for name, value in found.values.items()}
    assert (values["student"], values["teacher"]) == (
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-8B",
    )
    assert values["tokenizer"] == "Qwen/Qwen3-0.6B"
    assert (values["trainer_gpus"], values["rollout_gpus"]) == (2, 2)
    assert (values["teacher_gpus"], values["total_gpus"]) == (4, 8)
    assert (values["placement"], values["rollout_engine"]) == ("split", "vllm")
    assert (values["learning_rate"], values["max_model_len"]) == (1e-5, 32768)
    assert found.values["max_model_len"].source == "default"
    assert found.values["student"].line == 13
    assert values["ppo_mini_batch_size"] == 16


LAUNCHER = "python -m areal.infra.launcher.local examples/math/gsm8k_rl.py --config "


def test_an_allocation_mode_counts_for_the_older_launchers_alone(file: Path) -> None:
    start = f"python examples/math/gsm8k_rl.py --config {file}"
    found = check(f"{start} ++allocation_mode=sglang:d2+fsdp:d2", framework="areal")
    told = [(f.level, f.key) for f in faults(found) if f.key == "allocation_mode"]
    assert told == [("warning", "allocation_mode")]
    assert found.values["rollout_gpus"].value == 2


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # Engine, its tensor and pipeline ranks, all of its GPUs.
        ("vllm:d1t2+fsdp:d2", ("vllm", 2, 1, 2)),
        ("sglang[r]:d2t2p2 + fsdp[a]:d2", ("sglang", 2, 2, 8)),
        ("fsdp:d2 + vllm:t4", ("vllm", 4, 1, 4)),
        ("sglang[r]:d2|fsdp[a]:d2", ("sglang", 1, 1, 2)),
        ("vllm:d2+megatron:(attn:d1t2|ffn:e2)", ("vllm", 1, 1, 2)),
    ],
)
def test_the_older_launchers_serve_by_allocation_mode(
    file: Path, mode: str, expected: tuple[Any, ...]
) -> None:
    more = f"'++allocation_mode=\"{mode}\"'"  # quoted for Hydra, too
    found = check(f"{LAUNCHER}{file} {more}", framework="areal")
    names = ("tensor_parallel_size", "pipeline_parallel_size", "rollout_gpus")
    values = (found.values[name].value for name in ("rollout_engine", *names))
    assert tuple(values) == expected
    assert found.values["trainer_gpus"].value == 2
    told = {(f.level, f.key) for f in faults(found) if "n_gpus" not in f.key}
    # The trainer takes the rollout for what its own backend says.
    is_same = expected == ("vllm", 1, 1, 2)
    assert told == (set() if is_same else {("warning", "rollout.backend")})


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("", "is none, and the older launchers need it"),
        ("d2+d2", "is none"),  # no backend is chosen any more
        ("sglang.d2+fsdp.d2", "is none"),
        ("sglang:c2+fsdp:d2", "is none"),
        ("sglang[r]:d2|fsdp[a]:d4", "is none"),  # not as many GPUs
        ("sglang:d2+vllm:d2", "one engine and one trainer"),
        ("sglang[r]:d2+fsdp[a]:d2+fsdp[c]:d2", "one engine and one trainer"),
        ("vllm:d2+fsdp:d4", "starts 4 processes of the trainer, and actor.backend="),
    ],
)
def test_an_allocation_mode_that_is_none_is_refused(
    file: Path, mode: str, said: str
) -> None:
    more = f"'++allocation_mode=\"{mode}\"'" if mode else ""
    found = check(f"{LAUNCHER}{file} {more}", framework="areal")
    (told,) = (f for f in faults(found) if f.key == "allocation_mode")
    assert told.level == "error"
    assert said in told.message


def test_what_no_launcher_serves_is_not_certain(file: Path) -> None:
    found = check(f"{LAUNCHER}{file} ++allocation_mode=$MODE", framework="areal")
    rollout = found.values["rollout_gpus"]
    assert rollout.source == "undetermined"
    assert not faults(found)


def test_an_unknown_key_is_told_once(file: Path) -> None:
    text = "actor.pathh=1 foo=2 +bar.x=3 ++actor.baz=4"
    start = f"python examples/math/gsm8k_rl.py --config {file}"
    found = check(f"{start} {text}", framework="areal")
    told = [f for f in faults(found) if "no key" in f.message]
    assert sorted(f.key for f in told) == ["actor.baz", "actor.pathh", "bar", "foo"]
    (path,) = (f.message for f in told if f.key == "actor.pathh")
    assert "did you mean 'actor.path'" in path


def test_files_that_defaults_names_are_read(file: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "base.yaml").write_text(file.read_text())
    (tmp_path / "site" / "big.yaml").write_text("n_nodes: 1\nn_gpus_per_node: 4\n")
    (tmp_path / "site" / "small.yaml").write_text("n_gpus_per_node: 6\n")
    own = tmp_path / "own.yaml"
    own.write_text(
        "defaults:\n  - base\n  - site@cluster: big\n  - _self_\n"
        "train_dataset: {batch_size: 64}\n"
    )
    found = check(own, framework="areal")
    values = {name: value.value for name, value in found.values.items()}
    assert values["student"] == "Qwen/Qwen3-0.6B"
    assert Path(found.values["student"].file).name == "base.yaml"
    assert (values["train_batch_size"], values["gpus_per_node"]) == (64, 4)
    start = f"python examples/math/gsm8k_rl.py --config {own} site@cluster=small"
    chosen = check(start, framework="areal")
    assert chosen.values["gpus_per_node"].value == 6
    assert not [f for f in faults(chosen) if f.key == "site@cluster"]


def test_a_file_that_defaults_names_and_is_not_there_is_told(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("defaults:\n  - none\n  - _self_\nactor: {backend: fsdp:d2}\n")
    found = faults(check(own, framework="areal"))
    (told,) = (f for f in found if f.key == "defaults")
    assert "own is to take none.yaml, which is not there" in told.message


def test_roles_that_share_gpus_count_once(file: Path) -> None:
    more = [SHARED, KIND, "++enable_offload=true", "++actor.weight_update_mode=disk"]
    found = check(file, more)
    assert not faults(found)
    assert found.values["placement"].value == "colocated"
    assert found.values["total_gpus"].value == 2 + 4
    ref = [
        "++ref.backend=fsdp:d2",
        "++ref.experiment_name=e",
        "++ref.trial_name=t",
        "actor.kl_ctl=0.1",
    ]
    assert check(file, ref).values["total_gpus"].value == 10
    assert check(file, ref[:3]).values["total_gpus"].value == 8


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["actor.backend=fdsp:d2"], "did you mean 'fsdp'"),
        (["actor.backend=fsdp:d2+sglang:d2"], "none of several with a +"),
        (["actor.backend=vllm:d2"], "is not a backend"),
        (["rollout.backend=fsdp:d2"], "is not a backend"),
        (["teacher.backend=d4"], "is not a backend"),
        (["rollout.backend=vllm:d2c2"], "is not a backend"),
        (["actor.backend=fsdp:d2p2"], "FSDP has no pipeline"),
        (["actor.backend=megatron:d1e2"], "cannot be divided by p * t * e"),
        ([MOE + 'd4p4e1)"'], "they must be the same"),
        ([MOE + 'd4p2e4)"'], "attn has 16 GPUs and ffn 32"),
        ([MOE + 'e3)"'], "cannot be divided by p * t * e"),
        (
            [SHARED, KIND, "++actor.weight_update_mode=disk"],
            "rollout.scheduling_strategy needs enable_offload",
        ),
        (["++teacher.offload=true"], "teacher.offload needs enable_offload=true"),
        (
            [SHARED, KIND, "++enable_offload=true"],
            "must be disk where actor and rollout",
        ),
        (["++rollout.return_routed_experts=true"], "works with SGLang only"),
        (
            [
                "++actor.use_lora=true",
                "actor.backend=megatron:d2",
                "rollout.backend=sglang:d2",
            ],
            "needs a rollout by vLLM",
        ),
        (["++actor.weight_update_mode=nccl"], "it must be disk or xccl"),
        (["actor.reward_norm.mean_level=token"], "it must be batch, group or null"),
        (["actor.reward_norm.group_size=0"], "must be at least 1"),
        (["++actor.rejection_sampling.level=word"], "known values are token, sequence"),
        (["actor.rejection_sampling.metric=[1]"], "known values are ratio"),
        (["actor.rejection_sampling.upper=1"], "must be above 1.0 for metric=ratio"),
        (["++actor.rejection_sampling.lower=6"], "must be above 0 and at most"),
        (
            [
                "++actor.rejection_sampling.action=clamp",
                "actor.rejection_sampling.metric=kl_k3",
            ],
            "=clamp works with metric=ratio",
        ),
        (["++actor.use_sapo_loss=true"], "needs actor.use_decoupled_loss=false"),
        (
            ["++actor.use_sapo_loss=true", "++actor.sapo_tau_pos=0"],
            "sapo_tau_pos = 0 must be above 0",
        ),
        (["++actor.mb_spec.packing_algorithm=best"], "it must be ffd or kk"),
        (["++actor.attn_impl=flash"], "known values are eager"),
        (
            [
                "++actor.fsdp.memory_efficient_load=true",
                "++actor.init_from_scratch=true",
            ],
            "cannot be used with actor.init_from_scratch",
        ),
        (["++actor.fsdp.optim_step_prefetch_layers=-1"], "must be at least 0"),
        (["++actor.scheduling_spec=[]"], "it has 1 or 2"),
        (["total_train_epochs=0"], "must be above 0"),
        (
            ["++rollout.agent.mode=online", "++valid_dataset.path=p"],
            "valid_dataset cannot be used with",
        ),
        (["++rollout.agent.mode=online"], "must be at least total_train_epochs"),
        (
            ["++rollout.agent.mode=online", "++total_train_steps=1"],
            "must be at least total_train_epochs",
        ),
        (["scheduler.type=slurm"], "Slurm gives whole nodes"),
    ],
)
def test_what_areal_refuses_is_told(more: list[str], said: str, file: Path) -> None:
    found = {f.level for f in told(file, *more) if said in f.message}
    assert found == {"error"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["cluster.n_gpus_per_node=4"], "the roles have 8 GPUs, and the cluster 1 * 4"),
        (
            [
                "++teacher.scheduling_strategy.type=colocation",
                "++teacher.scheduling_strategy.target=critic",
            ],
            "is not a role of this job",
        ),
        (["actor.kl_ctl=0.1"], "has no effect: there is no ref"),
        (["++teacher.distill_loss_weight=0"], "is run and has no effect"),
        (["teacher.path=Qwen/Qwen3-0.6B"], "distilled from itself"),
        (["++actor.use_decoupled_loss=false"], "rejection_sampling has no effect"),
        (["gconfig.n_samples=8"], "a prompt has gconfig.n_samples = 8 samples"),
        (["++vllm.max_model_len=1024"], "are longer than vllm.max_model_len"),
        (
            ["rollout.backend=sglang:d2", "++sglang.context_length=1024"],
            "are longer than sglang.context_length",
        ),
    ],
)
def test_what_is_doubtful_is_a_warning(more: list[str], said: str, file: Path) -> None:
    found = [f.level for f in told(file, *more) if said in f.message]
    assert found == ["warning"]


def test_a_local_scheduler_finds_its_gpus_itself(file: Path) -> None:
    more = ["cluster.n_gpus_per_node=4", "scheduler.type=local"]
    assert not told(file, *more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("actor.pth=x", "did you mean 'actor.path'"),
        ("actor.dtype=float16", "adds it with a +: +actor.dtype"),
        ("+actor.path=x", "is there already"),
        ("+actor.gradient_chekpointing=true", "did you mean 'gradient_checkpointing'"),
        ("+actor.behave_imp_weight_cap=5", "rejection_sampling took its place"),
        ("+actor.temprature=1", "has no key actor.temprature"),
        ("gconfig.n_samples=1.5", "expects int"),
        ("gconfig.n_samples=4.0", "expects int"),
        ("+gconfig.temperature=hot", "expects float"),
        ("+gconfig.greedy=maybe", "expects bool"),
        ("+gconfig.stop_token_ids=[a]", "expects list[int]"),
        ("train_dataset.path=[a]", "expects str"),
        ("actor.path=null", "expects str"),
        ("actor.mb_spec=3", "expects MicroBatchSpec"),
        ("gconfig.n_samples.x=3", "gconfig.n_samples is a section"),
        ("~train_dataset.type", "without train_dataset.type"),
        ("~saver", "without saver.fileroot"),
        (
            "+actor.scheduling_spec=[{gpus: 1}]",
            "has no key actor.scheduling_spec.0.gpus",
        ),
        ("tokenizer_path=${actor.pth}", "there is no key actor.pth"),
        ("a b=1", "no key that Hydra reads"),
    ],
)
def test_keys_and_values_that_do_not_fit_are_told(
    more: str, said: str, file: Path
) -> None:
    found = {f.level for f in told(file, more) if said in f.message}
    assert found == {"error"}


def test_what_omegaconf_converts_is_taken(file: Path) -> None:
    more = [
        "+gconfig.top_k='4'",
        "+gconfig.greedy=no",
        "+gconfig.temperature=1",
        "+gconfig.stop=null",
        "+actor.gradient_checkpointing=1",
        "+actor.target_modules=[all-linear]",
        "+train_dataset.dataset_kwargs={a: 1}",
        "+vllm.max_num_seqs=64",
    ]
    assert not told(file, *more)


def test_a_key_that_nothing_reads_is_told(file: Path) -> None:
    (fault,) = told(file, "+total_train_n_seqs=5")
    assert (fault.level, fault.key) == ("warning", "total_train_n_seqs")
    assert not told(file, "+total_train_n_seqs=null")


def test_a_section_of_ones_own_is_a_warning_in_a_file_alone(
    file: Path, tmp_path: Path
) -> None:
    file.write_text(f"{FILE}mine: {{a: 1}}\n")
    assert [f.level for f in told(file)] == ["warning"]
    script = tmp_path / "run.sh"
    start = "python examples/math/gsm8k_rl.py --config job.yaml scheduler.type=local"
    script.write_text(start)
    assert [f.level for f in told(script)] == ["error"]
    script.write_text(start.replace("examples/math/gsm8k_rl", "mine"))
    assert [f.level for f in told(script)] == ["warning"]


def test_a_script_needs_a_scheduler_and_a_file(file: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    start = f"python examples/math/gsm8k_rl.py --conf={file} rollout.backend=vllm:d1\n"
    script.write_text(start)
    (fault,) = told(script)
    assert "needs scheduler.type=local, ray or slurm" in fault.message
    found = check(script, framework="areal")
    assert found.values["rollout_gpus"].value == 1
    script.write_text("python train.py --config x.yaml scheduler.type=local\n")
    assert any("x.yaml does not exist" in f.message for f in told(script))
    script.write_text("python train.py scheduler.type=local\n")
    assert any("needs --config=FILE" in f.message for f in told(script))
    script.write_text("python train.py --config $(f) scheduler.type=local\n")
    found = check(script)
    assert found.values["student"].source == "undetermined"
    assert not faults(found)


def test_the_older_launchers_ranks_read_a_part_of_a_batch_each(
    file: Path, tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    mode = "++allocation_mode=vllm:d2+fsdp:d2"
    script.write_text(f'{LAUNCHER}{file} {mode} "$@"\n')
    assert not told(script)
    (fault,) = told(script, "train_dataset.batch_size=33")
    assert "cannot be divided by the actor's 2 ranks" in fault.message


def test_what_reward_models_and_dpo_want_of_the_actor(
    file: Path, tmp_path: Path
) -> None:
    kept = (
        *("experiment_name", "trial_name", "train_dataset", "saver", "recover"),
        *("evaluator", "stats_logger"),
    )
    lines = [line for line in FILE.splitlines() if line.startswith(kept)]
    file.write_text("\n".join(lines) + f"\nactor: {{backend: 'fsdp:d1', {NAMES}}}\n")
    assert not told(file)
    script = tmp_path / "run.sh"
    start = f"--config {file} +scheduler.type=local"
    script.write_text(f"python examples/alignment/hhrlhf_rw.py {start}\n")
    assert "must be true for a reward model" in told(script)[0].message
    script.write_text(f"python examples/alignment/hhrlhf_dpo.py {start}")
    more = "+actor.is_critic=true ++ref.backend=fsdp:d1 ++ref.experiment_name=e"
    script.write_text(f"{script.read_text()} {more} ++ref.trial_name=t\n")
    assert any("must be false for DPO" in f.message for f in told(script))


def test_another_tokenizer_is_told(file: Path, tmp_path: Path) -> None:
    for name, tokens in (("s", {"a": 0, "b": 1}), ("t", {"a": 1, "b": 0})):
        (tmp_path / name).mkdir()
        text = json.dumps({"model": {"vocab": tokens}})
        (tmp_path / name / "tokenizer.json").write_text(text)
        (tmp_path / name / "config.json").write_text("{}")
    more = [f"actor.path={tmp_path}/s", f"teacher.path={tmp_path}/t"]
    (fault,) = told(file, *more)
    assert fault.cause == "tokenizer.vocab-mismatch"


def test_a_python_file_of_any_name_is_none(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python train.py --config x.yaml lr=1\n")
    with pytest.raises(CheckError, match="no command was found"):
        check(script)


@pytest.mark.parametrize("release", ["1.0.4", "1.0.4+main.4aef98d8"])
def test_every_recorded_release_judges(release: str, file: Path) -> None:
    found = check(file, framework=f"areal=={release}")
    assert not faults(found)


@pytest.mark.parametrize(
    ("text", "gpus", "expert"),
    [
        ("fsdp:d4", 4, 1),
        ("fsdp[actor]:d2t2", 4, 1),
        ("archon: d2 c2", 4, 1),
        ("megatron:(attn:d4p2t2|ffn:e4)", 16, 4),
        ("megatron:attn:d4|ffn:d2e2", 4, 2),
        ("sglang:d2t2p2", 8, 1),
    ],
)
def test_backends_are_read_as_by_its_grammar(text: str, gpus: int, expert: int) -> None:
    found = backends.read(text)
    assert found is not None
    assert (found.gpus, found.expert) == (gpus, expert)
    assert not list(backends.faults(found))


@pytest.mark.parametrize(
    "text", ["fsdp", "fsdp:", "fsdp:d0", "fsdp:x2", "vllm:e2", "d4"]
)
def test_what_is_no_backend_is_none(text: str) -> None:
    assert backends.read(text) is None


def test_its_smallest_run_has_no_fault(file: Path) -> None:
    small = debug_config.smallest(
        lambda overrides=(), added=(): check(file, overrides, added=added)
    )
    changes = [change.text for change in small.changes]
    assert "++train_dataset.batch_size=1" in changes
    rows = tomllib.loads(debug_config.TABLE.read_text())["areal"]
    keys = [row["set"].partition("=")[0] for row in rows]
    assert [change.partition("=")[0] for change in changes] == keys
    assert not small.left
