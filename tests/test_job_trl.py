"""``gkd check`` on TRL: its scripts, its configurations and what starts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.job import check
from pytest_gkd.job.check import Checked
from pytest_gkd.job.findings import CheckError

GKD = (
    "examples/scripts/gkd.py --model_name_or_path s --teacher_model_name_or_path t "
    "--dataset_name d"
)
GOLD = GKD.replace("gkd.py", "gold.py")
GRPO = "trl grpo --model_name_or_path s --dataset_name d --reward_funcs r"


def checked(
    place: Path, text: str, release: str = "1.9.0", name: str = "run.sh", **given: str
) -> Checked:
    path = place / name
    path.write_text(text + "\n")
    return check.check(path, (), f"trl=={release}", given)


def told(found: Checked) -> list[tuple[str, str]]:
    faults = [f for f in found.findings if f.level != "note"]
    return [(f.level, f.key.lstrip("-")) for f in faults]


def values(found: Checked) -> dict[str, Any]:
    return {name: value.value for name, value in found.values.items()}


def test_an_option_counts_before_the_configuration_and_that_before_the_default(
    tmp_path: Path,
) -> None:
    (tmp_path / "c.yaml").write_text(
        "learning_rate: 1e-6\nmax_new_tokens: 64\nlmbda: 1.0\nbf16: true\n"
        "gradient_checkpointing_kwargs:\n  use_reentrant: false\n"
    )
    found = checked(tmp_path, f"python {GKD} --config c.yaml --max_new_tokens 32")
    assert not told(found)
    rate, beta = found.values["learning_rate"], found.values["loss_beta"]
    assert (rate.value, rate.source, rate.line) == (1e-6, "user", 1)
    assert rate.file.endswith("c.yaml")
    assert (beta.value, beta.source) == (0.5, "default")
    # SFTConfig has one, and GKD reads it nowhere.
    assert "loss" not in found.values
    assert values(found)["max_response_length"] == 32
    assert values(found)["loss_lambda"] == 1.0


def test_of_a_configuration_that_is_not_found_no_default_is_told(
    tmp_path: Path,
) -> None:
    found = checked(tmp_path, f"python {GKD} --config $C")
    assert values(found)["student"] == "s"
    assert found.values["learning_rate"].source == "undetermined"
    assert found.values["learning_rate"].alternatives == ["give it with --set C=VALUE"]


@pytest.mark.parametrize(
    ("line", "level", "key", "says"),
    [
        (f"python {GKD} --lambda 1", "error", "lambda", "has no option --lambda; did"),
        (f"python {GKD} --max_seq_length 9", "error", "max_seq_length", "TRL 0.16.1"),
        (f"python {GKD} --no_cuda", "error", "no_cuda", "transformers 4.57.6"),
        (f"python {GKD} --learning_rate fast", "error", "learning_rate", "a number"),
        (f"python {GKD} --dtype bf16", "error", "dtype", "knows auto, bfloat16"),
        (f"python {GKD} --bf16 --fp16", "error", "bf16", "expects a value"),
        (f"python {GKD} --bf16 1 --fp16", "error", "fp16", "both on"),
        (
            f"python {GKD} --load_in_8bit --load_in_4bit",
            "error",
            "load_in_4bit",
            "both on",
        ),
        (f"python {GKD} --beta 1.5", "error", "beta", "between 0 and 1"),
        (f"python {GKD} --lmbda -0.1", "error", "lmbda", "between 0 and 1"),
        (f"python {GKD} --lmbda 1 --seq_kd", "warning", "seq_kd", "changes nothing"),
        (f"python {GKD} --config=c.yaml", "error", "config", "as two words only"),
        (f"trl vllm-serve --mdl s &\n{GRPO}", "error", "mdl", "vllm-serve has no"),
        (
            f"vllm serve s &\n{GRPO} --use_vllm --vllm_mode server",
            "error",
            "vllm_mode",
            "`vllm serve` of line 1 has no place",
        ),
        (
            "python3 -m vllm.entrypoints.openai.api_server --model s &\n"
            f"{GRPO} --use_vllm --vllm_mode server",
            "error",
            "vllm_mode",
            "`vllm serve` of line 1 has no place",
        ),
        (f"python {GKD} stray", "error", "", "stray belongs to no option"),
        ("trl gkd --lmbda 1", "error", "gkd", "accelerate launch examples/scripts/gkd"),
        (GRPO.replace(" --reward_funcs r", ""), "error", "reward_funcs", "neither"),
        (GRPO.replace(" --dataset_name d", ""), "error", "dataset_name", "neither"),
        (f"{GRPO} --max_prompt_length 9", "error", "max_prompt_length", "0.27.2"),
        (f"{GRPO} --vllm_mode server", "warning", "vllm_mode", "without use_vllm"),
        (
            f"{GRPO} --num_processes 4 --per_device_train_batch_size 1",
            "error",
            "num_generations",
            "1 per device * 4 processes * 1 steps = 4, which num_generations 8",
        ),
        (
            f"{GRPO} --generation_batch_size 8 --steps_per_generation 2",
            "error",
            "steps_per_generation",
            "both given",
        ),
        (
            f"{GRPO} --num_processes 4 --generation_batch_size 40",
            "error",
            "generation_batch_size",
            "40 is not a multiple of per_device_train_batch_size 8 * 4 processes",
        ),
        (
            f"{GRPO} --num_generations 1",
            "error",
            "num_generations",
            "num_generations is 1: TRL 1.9.0 requires 2 or more",
        ),
        (
            f"{GRPO} --use_vllm --vllm_mode local",
            "error",
            "vllm_mode",
            "vllm_mode is local: TRL 1.9.0 knows server and colocate",
        ),
        (
            f"{GRPO} --use_vllm --vllm_max_model_length 256",
            "warning",
            "vllm_max_model_length",
            "256 does not fit in vllm_max_model_length 256",
        ),
        (
            f"{GRPO} --num_processes 4 --use_vllm --vllm_tensor_parallel_size 3",
            "error",
            "vllm_tensor_parallel_size",
            "does not divide the 4 processes",
        ),
        (
            f"{GRPO} --num_processes 4 --eval_strategy steps "
            "--per_device_eval_batch_size 1",
            "error",
            "per_device_eval_batch_size",
            "not a multiple of the 8 generations",
        ),
        (
            f"python {GOLD} --num_generations 3",
            "error",
            "num_generations",
            "is not generation_batch_size 2 * num_generations 3",
        ),
        (
            f"python {GOLD} --max_length 128",
            "error",
            "max_completion_length",
            "leaves no room",
        ),
        (
            f"python {GOLD} --use_uld_loss --use_liger_kernel",
            "error",
            "use_liger_kernel",
            "are mutually exclusive",
        ),
        (
            f"python {GKD} --lora_target_modules q_proj, v_proj",
            "warning",
            "lora_target_modules",
            "q_proj, with its comma",
        ),
        (
            f"CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=4 {GKD}",
            "error",
            "CUDA_VISIBLE_DEVICES",
            "4 processes are started",
        ),
        (
            f"accelerate launch --num_processes 8 --num_machines 3 {GKD}",
            "error",
            "num_processes",
            "8 processes cannot be spread over 3 machines",
        ),
        (
            f"accelerate launch --num_proceses 8 {GKD}",
            "error",
            "num_proceses",
            "has no option --num_proceses; did you mean '--num_processes'",
        ),
        (
            f"python {GKD} --load_best_model_at_end",
            "error",
            "load_best_model_at_end",
            "to be the same",
        ),
        (
            "python examples/scripts/gkd.py --model_name_or_path s --dataset_name d",
            "error",
            "teacher_model_name_or_path",
            "is not given",
        ),
        (f"python {GKD} --config /nowhere.yaml", "error", "config", "no such file"),
        (
            f"{GRPO} --num_generations 1 --generation_batch_size 8 "
            "--steps_per_generation 2",
            "error",
            "steps_per_generation",
            "both given",
        ),
        (f"{GRPO} --num_generations 0", "error", "num_generations", "2 or more"),
        (f"python {GOLD} --num_generations 0", "error", "num_generations", "1 or more"),
        (
            f"python {GOLD} --generation_batch_size 3",
            "error",
            "num_generations",
            "8 is not generation_batch_size 3 * num_generations 1",
        ),
        (
            f"{GRPO} --generation_batch_size x",
            "error",
            "generation_batch_size",
            "an integer",
        ),
        (
            f"{GRPO} --num_processes 4 --generation_batch_size 4 "
            "--per_device_train_batch_size 0",
            "error",
            "num_generations",
            "which num_generations 8 does not divide",
        ),
        (
            "accelerate launch trl/scripts/sft.py --model_name_or_path s",
            "error",
            "dataset_name",
            "neither",
        ),
        (
            f"python {GKD} --lora_target_modules a, b",
            "warning",
            "lora_target_modules",
            "has a, with its comma",
        ),
        (
            f"CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node=2 {GKD}",
            "error",
            "CUDA_VISIBLE_DEVICES",
            "2 processes are started",
        ),
    ],
)  # fmt: skip
def test_what_trl_refuses_is_told(
    line: str, level: str, key: str, says: str, tmp_path: Path
) -> None:
    found = checked(tmp_path, line).findings
    faults = [(f.level, f.key.lstrip("-")) for f in found if says in f.message]
    assert faults == [(level, key)], found


@pytest.mark.parametrize(
    "line",
    [
        f"python {GKD}",
        f"python {GKD} --learning-rate 1e-6 --no_disable_dropout --lora_r 8",
        f"python {GKD} --lora_target_modules all-linear --report_to none",
        f"python {GKD} --max_length none",
        f"{GRPO} --num_processes 8 --use_vllm --vllm_tensor_parallel_size 4",
        f"{GRPO} --accelerate_config zero3 --num_generations 4",
        "accelerate launch --config_file={} --num_processes=2 -m trl.scripts.sft "
        "--model_name_or_path s --dataset_name d",
        f"python {GOLD} --num_generations 4 --gradient_accumulation_steps 2",
        f"python {GKD} --beta 0 --lmbda 1",
        f"python {GKD} --seq_kd --lmbda 0.9",
        f"python {GKD} --load_in_4bit --bf16 0 --fp16",
        f"python {GOLD} --max_length 129",
        f"{GRPO} --use_vllm --vllm_max_model_length 257",
        f"{GRPO} --num_generations 2 --num_processes 4 --generation_batch_size 64",
        f"{GRPO} --num_processes 4 --per_device_train_batch_size 1 "
        "--steps_per_generation 2",
        f"{GRPO} --num_processes 4 --eval_strategy steps "
        "--per_device_eval_batch_size 1 --num_generations_eval 4",
        f"{GRPO} --num_processes 4 --per_device_eval_batch_size 1",
        f"{GRPO} --num_processes 4 --vllm_tensor_parallel_size 3 --use_vllm "
        "--vllm_mode server",
        f"CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 {GKD}",
        f"python {GKD} --load_best_model_at_end --eval_strategy steps "
        "--save_strategy steps",
        f"python {GKD} --load_best_model_at_end --save_strategy best",
        f"python {GOLD} --max_length none",
        # CPOConfig has both lengths, and only cuts with them.
        "python examples/scripts/cpo.py --model_name_or_path s --dataset_name d "
        "--max_length 9 --max_completion_length 9",
        # A trainer that generates itself asks no server, whatever else is started.
        f"trl vllm-serve --model s --port 8001 &\n{GRPO} --num_processes 8 --use_vllm "
        "--vllm_mode colocate",
        f"CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=4 {GKD} --use_cpu",
        f"CUDA_VISIBLE_DEVICES= torchrun --nproc_per_node=1 {GKD}",
        f"CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 8 "
        f"--num_machines 4 {GKD}",
        f"CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 2 "
        f"--num_machines 0 {GKD}",
        GRPO.replace("--reward_funcs r", "--reward_model_name_or_path m"),
        # RLOO's script refuses no list of rewards that is empty.
        "trl rloo --model_name_or_path s --dataset_name d",
        # PEFT passes over a word that names no module.
        f"python {GKD} --lora_target_modules q_proj , v_proj",
    ],
)
def test_what_trl_takes_is_no_fault(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    assert not told(checked(tmp_path, line.replace("{}", "a.yaml")))


@pytest.mark.parametrize(
    "line",
    [
        f"python {GOLD} --per_device_train_batch_size $X",
        f"python {GOLD} --gradient_accumulation_steps $X",
        f"python {GOLD} --num_generations 3 --generation_batch_size $X",
        f"python {GOLD} --max_length 9 --max_completion_length $X",
        f"{GRPO} --num_processes 4 --num_generations 3 --generation_batch_size $X",
        f"{GRPO} --num_processes 4 --generation_batch_size 9 --steps_per_generation $X",
        f"{GRPO} --num_processes 4 --eval_strategy steps "
        "--per_device_eval_batch_size $X",
        f"{GRPO} --use_vllm --vllm_max_model_length 9 --max_completion_length $X",
        f"{GRPO} --num_processes 4 --use_vllm --vllm_tensor_parallel_size $X",
        f"{GRPO} --use_vllm $X --vllm_mode local",
        f"{GRPO} --use_vllm --vllm_mode $X",
        GRPO.replace("path s", "path $X"),
        GRPO.replace("--reward_funcs r", "--reward_funcs $X"),
        f"python {GKD.replace('--model_name_or_path s', '')} --config $X",
        f"CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=$X {GKD}",
        f"CUDA_VISIBLE_DEVICES=$X torchrun --nproc_per_node=4 {GKD}",
        f"CUDA_VISIBLE_DEVICES=0 accelerate launch --num_processes 8 "
        f"--num_machines $X {GKD}",
        f"python {GKD} --load_best_model_at_end --eval_strategy steps "
        "--save_strategy $X",
        f"python {GKD} --load_best_model_at_end --save_strategy epoch "
        "--eval_strategy $X",
    ],
)
def test_what_only_the_run_knows_is_not_judged(line: str, tmp_path: Path) -> None:
    assert not told(checked(tmp_path, line))


@pytest.mark.parametrize(
    ("release", "line", "keys"),
    [
        # No Liger loss refuses use_uld_loss before 1.9, and 1.16 has none there.
        ("0.29.1", f"python {GOLD} --use_uld_loss --use_liger_kernel", []),
        ("1.9.0", f"python {GOLD} --use_liger_kernel", []),
        ("1.9.0", f"python {GOLD} --use_uld_loss --use_liger_kernel",
         ["use_liger_kernel"]),
        ("1.16.0", f"python {GOLD} --use_uld_loss --use_liger_kernel", []),
        # 0.29.1 trains on rewards of zero.
        ("0.29.1", GRPO.replace("--reward_funcs r", ""), []),
        # 1.16 asks for what vLLM's own server has.
        ("1.16.0", f"vllm serve s &\n{GRPO} --use_vllm --vllm_mode server", []),
    ],
)  # fmt: skip
def test_a_rule_is_that_of_its_releases(
    release: str, line: str, keys: list[str], tmp_path: Path
) -> None:
    assert [key for _, key in told(checked(tmp_path, line, release))] == keys


@pytest.mark.parametrize(
    ("release", "program", "keys"),
    [
        ("0.29.1", "grpo", []),
        ("1.9.0", "grpo", ["auto_find_batch_size"]),
        ("1.16.0", "rloo", ["auto_find_batch_size"]),
        ("1.9.0", "sft", []),
    ],
)
def test_a_batch_size_that_is_found_is_refused_where_groups_are_whole(
    release: str, program: str, keys: list[str], tmp_path: Path
) -> None:
    line = f"{GRPO.replace('grpo', program)} --auto_find_batch_size"
    if program == "sft":
        line = line.replace("--reward_funcs r", "")
    assert [key for _, key in told(checked(tmp_path, line, release))] == keys


@pytest.mark.parametrize(
    ("yaml", "level", "key", "says"),
    [
        ("lmbda: [1]\nlamda: 1", "error", "lamda", "has no key lamda; did you mean"),
        ("eval_strategy: no", "error", "eval_strategy", 'write "no"'),
        ("learning_rate: fast", "error", "learning_rate", "expects a number"),
        ("max_new_tokens: 1.5", "warning", "max_new_tokens", "not an integer"),
        ("label_names: a", "error", "label_names", "read character by character"),
        ("evaluation_strategy: steps", "error", "evaluation_strategy", "4.46.3"),
    ],
)
def test_what_a_configuration_cannot_mean_is_told(
    yaml: str, level: str, key: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(yaml + "\n")
    found = checked(tmp_path, f"python {GKD} --config c.yaml")
    (fault,) = [f for f in found.findings if f.level != "note"]
    assert (fault.level, fault.key) == (level, key)
    assert says in fault.message


def test_keys_of_a_configuration_that_a_script_passes_over_are_a_warning(
    tmp_path: Path,
) -> None:
    (tmp_path / "c.yaml").write_text("num_processes: 2\nmodel_name_or_path: s\n")
    script = "accelerate launch trl/scripts/sft.py --dataset_name d --config c.yaml"
    assert told(checked(tmp_path, script)) == [("warning", "num_processes")]
    # trl sft gives it to its launcher.
    found = checked(tmp_path, "trl sft --dataset_name d --config c.yaml")
    assert (told(found), values(found)["trainer_gpus"]) == ([], 2)


SERVE = "trl vllm-serve --model s --tensor_parallel_size 2"
SERVED = "--use_vllm --vllm_mode server"


@pytest.mark.parametrize(
    ("serve", "train", "keys"),
    [
        (f"{SERVE} --port 8001", f"python {GOLD} {SERVED}", []),
        (SERVE, f"python {GOLD} {SERVED}", ["vllm_server_port"]),
        (SERVE, f"{GRPO} --num_processes 8 {SERVED}", []),
        (
            f"{SERVE} --port 9000",
            f"{GRPO} --num_processes 8 {SERVED} --vllm_server_base_url "
            "http://localhost:8000",
            ["vllm_server_base_url"],
        ),
        (SERVE, f"{GRPO} --num_processes 8 {SERVED} --vllm_server_host far "
         "--vllm_server_port 1", []),
        (
            f"CUDA_VISIBLE_DEVICES=0,1 {SERVE}",
            f"CUDA_VISIBLE_DEVICES=1,2 {GRPO} --num_processes 2 "
            f"--gradient_accumulation_steps 4 {SERVED}",
            ["vllm_mode"],
        ),
        (
            SERVE.replace("--model s", "--model other"),
            f"{GRPO} --num_processes 8 {SERVED}",
            ["model_name_or_path"],
        ),
        (SERVE.replace("--model s", "--model $X"),
         f"{GRPO} --num_processes 8 {SERVED}", []),
        (SERVE, f"{GRPO.replace('path s', 'path $X')} --num_processes 8 {SERVED}", []),
        # Weights go to the other host's GPUs.
        (
            f"CUDA_VISIBLE_DEVICES=0,1 {SERVE}",
            f"CUDA_VISIBLE_DEVICES=0,1 {GRPO} --num_processes 2 "
            f"--gradient_accumulation_steps 4 {SERVED} --vllm_server_host far",
            [],
        ),
        (f"{SERVE} --port $X", f"{GRPO} --num_processes 8 {SERVED}", []),
        *(
            (f"{SERVE} --port {port}", f"{GRPO} --num_processes 8 {SERVED} {asks}", key)
            for port, asks, key in (
                (443, "--vllm_server_port $X", []),
                (443, "--vllm_server_host $X --vllm_server_port 1", []),
                (443, "--vllm_server_base_url $X --vllm_server_port 1", []),
                (80, "--vllm_server_base_url http://localhost", []),
                (443, "--vllm_server_base_url https://localhost", []),
                (8001, "--vllm_server_base_url http://localhost:8001", []),
                (443, "--vllm_server_base_url http://localhost",
                 ["vllm_server_base_url"]),
            )
        ),
    ],
)  # fmt: skip
def test_the_trainer_and_its_server_fit(
    serve: str, train: str, keys: list[str], tmp_path: Path
) -> None:
    found = checked(tmp_path, f"{serve} &\n{train}")
    assert [key for _, key in told(found)] == keys
    assert values(found)["rollout_gpus"] == 2
    assert values(found)["placement"] == "split"


def test_gpus_are_summed_over_trainer_and_server(tmp_path: Path) -> None:
    found = values(checked(tmp_path, f"{SERVE} &\n{GRPO} --num_processes 8 {SERVED}"))
    names = ("trainer_gpus", "rollout_gpus", "total_gpus", "rollout_engine")
    assert [found[name] for name in names] == [8, 2, 10, "vllm"]


def test_what_no_launcher_tells_is_undetermined(tmp_path: Path) -> None:
    found = checked(tmp_path, f"python {GKD}").values
    assert found["trainer_gpus"].source == found["total_gpus"].source == "undetermined"
    assert found["train_batch_size"].value is None
    text = f"CUDA_VISIBLE_DEVICES=2,3 python {GKD}"
    assert checked(tmp_path, text).values["trainer_gpus"].value == 2
    found = checked(tmp_path, f"accelerate launch --num_processes $N {GKD}").values
    assert found["trainer_gpus"].alternatives == ["give it with --set N=VALUE"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {
                "distributed_type": "DEEPSPEED",
                "num_processes": 16,
                "num_machines": 2,
                "deepspeed_config": {
                    "zero_stage": 3,
                    "offload_param_device": "cpu",
                    "offload_optimizer_device": "none",
                },
            },
            {"zero_stage": 3, "offload_param": True, "offload_optimizer": False}
            | {"nodes": 2, "gpus_per_node": 8, "trainer_gpus": 16},
        ),
        (
            {
                "distributed_type": "FSDP",
                "num_processes": 4,
                "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True},
                "parallelism_config": {
                    "parallelism_config_cp_size": 2,
                    "parallelism_config_dp_shard_size": 2,
                },
            },
            {"fsdp_version": 2, "offload_param": True, "context_parallel_size": 2},
        ),
    ],
)
def test_accelerates_configuration_tells_the_sharding(
    config: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(json.dumps(config))
    found = checked(tmp_path, f"accelerate launch --config_file a.yaml {GKD}")
    assert not told(found)
    assert expected.items() <= values(found).items()
    alone = check.check(tmp_path / "a.yaml")
    assert (alone.framework, told(alone)) == ("trl", [])
    assert expected.items() <= values(alone).items()


@pytest.mark.parametrize(
    ("config", "level", "key"),
    [
        ({"distributed_type": "NO", "num_processes": 8}, "warning", "num_processes"),
        ({"distributed_type": "MULTI_GPU"}, "error", "config_file"),
        ({"distributed_type": "NO", "num_procs": 8}, "error", "num_procs"),
        ({"num_processes": 1}, "error", ""),
        (
            {
                "distributed_type": "FSDP",
                "num_processes": 4,
                "parallelism_config": {"parallelism_config_cp_size": 3},
            },
            "error",
            "num_processes",
        ),
    ],
)
def test_what_accelerate_refuses_is_told(
    config: dict[str, Any], level: str, key: str, tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(json.dumps(config))
    found = checked(tmp_path, f"accelerate launch --config_file a.yaml {GKD}")
    assert told(found) == [(level, key)]


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": True}}, []),
        ({"train_micro_batch_size_per_gpu": 4}, ["train_micro_batch_size_per_gpu"]),
        ({"bf16": {"enabled": False}}, ["bf16.enabled"]),
        ({"train_batch_size": 16, "gradient_clipping": 1.0}, []),
        ({"train_batch_size": 32}, ["train_batch_size"]),
        ({"optimizer": {"params": {"lr": 1e-5}}}, ["optimizer.params.lr"]),
        ({"gradient_clipping": [1.0]}, ["gradient_clipping"]),
        ({"gradient_clipping": "much"}, ["gradient_clipping"]),
        ({"more": "--learning_rate 1e-6", "optimizer": {"params": {"lr": 1e-6}}}, []),
        ({"more": "--learning_rate $X", "optimizer": {"params": {"lr": 1e-5}}}, []),
        # Without bf16 it is what fp16 is not.
        ({"more": "--fp16", "fp16": {"enabled": True}, "bf16": {"enabled": True}},
         ["bf16.enabled"]),
        ({"more": "--fp16", "fp16": {"enabled": True}, "bf16": {"enabled": False}}, []),
        ({"more": "--bf16 0", "bf16": {"enabled": False}}, []),
        ({"more": "--fp16 $X", "bf16": {"enabled": False}}, []),
    ],
)  # fmt: skip
def test_deepspeeds_own_file_says_the_same(
    config: dict[str, Any], keys: list[str], tmp_path: Path
) -> None:
    more = config.get("more", "")
    config = {key: value for key, value in config.items() if key != "more"}
    whole = {"zero_optimization": {"stage": 2}, **config}
    (tmp_path / "ds.json").write_text(json.dumps(whole, indent=1))
    found = checked(
        tmp_path, f"torchrun --nproc-per-node 2 {GKD} --deepspeed ds.json {more}"
    )
    assert [key for _, key in told(found)] == keys
    assert values(found)["zero_stage"] == 2


OWN = """
from dataclasses import dataclass
from trl import ModelConfig, TrlParser
from trl.experimental.gkd import GKDConfig

@dataclass
class Mine:
    prompts: str
    keep: int = 3

parser = TrlParser((Mine, GKDConfig, ModelConfig))
mine, training, model = parser.parse_args_and_config()
"""


def test_a_script_of_the_users_own_is_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN)
    line = "python download.py\npython train.py --prompts p --keep 4 --lmbda 1 --kep 2"
    found = checked(tmp_path, line)
    assert told(found) == [("error", "kep")]
    assert found.lines == [2]
    assert values(found)["loss_lambda"] == 1
    assert found.values["loss_beta"].source == "default"


@pytest.mark.parametrize(
    "source", [None, "(" * 9000, "x = \0", "from mine import C\nTrlParser(C)", "1"]
)
def test_of_a_script_that_cannot_be_read_nothing_is_guessed(
    source: str | None, tmp_path: Path
) -> None:
    if source is not None:
        (tmp_path / "train.py").write_text(source)
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": false}}')
    line = "torchrun --nproc_per_node 2 train.py --lmbda 1 --kep 2 --num_generations 3"
    line += " --generation_batch_size 4 --per_device_train_batch_size 1"
    line += " --gradient_accumulation_steps 1 --fp16 0 --deepspeed ds.json"
    found = checked(tmp_path, line)
    assert not told(found)
    assert [f.level for f in found.findings] == ["note"]
    assert found.values["student"].source == "undetermined"
    assert values(found)["trainer_gpus"] == 2


def test_a_script_is_taken_for_trls_only_if_the_user_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN)
    (tmp_path / "run.sh").write_text("python train.py --prompts p\n")
    with pytest.raises(CheckError, match="no command was found"):
        check.check(tmp_path / "run.sh")


def test_a_vocabulary_that_differs_is_refused(tmp_path: Path) -> None:
    for name, config in (
        ("s", {"vocab_size": 9}),
        ("t", {"text_config": {"vocab_size": 8}}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    fault = [("error", "teacher_model_name_or_path")]
    assert told(checked(tmp_path, f"python {GKD}")) == fault
    assert told(checked(tmp_path, f"python {GOLD} --use_uld_loss")) == []
    # 0.29.1 compares nothing.
    assert told(checked(tmp_path, f"python {GKD}", "0.29.1")) == []
    (tmp_path / "t" / "config.json").write_text('{"vocab_size": 9}')
    assert told(checked(tmp_path, f"python {GKD}")) == []
    (tmp_path / "t" / "config.json").write_text("[" * 9000)
    assert told(checked(tmp_path, f"python {GKD}")) == []


def test_a_configuration_alone_is_judged_by_the_scripts_that_fit(
    tmp_path: Path,
) -> None:
    text = "model_name_or_path: s\nreward_funcs: [r]\nnum_processes: 4\nfrob: 1\n"
    found = checked(tmp_path, text, name="c.yaml")
    assert told(found) == [("error", "frob")]
    assert values(found)["trainer_gpus"] == 4
    # grpo and rloo read such a file, and differ in it.
    assert found.values["samples_per_prompt"].source == "undetermined"


def test_branches_that_start_different_programs_are_told_together(
    tmp_path: Path,
) -> None:
    text = f'if [ "$A" ]; then {GRPO}; else trl sft --model_name_or_path s; fi'
    found = checked(tmp_path, text)
    assert values(found)["student"] == "s"
    assert found.values["samples_per_prompt"].source == "undetermined"
