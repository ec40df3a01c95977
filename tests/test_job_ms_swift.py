"""ms-swift's commands, as gkd check reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.job.check import Checked, check
from pytest_gkd.job.findings import Finding

GPUS = "CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 "
GKD = (
    "swift rlhf --rlhf_type gkd --model S --teacher_model T --dataset A B#500 "
    "--max_length 1024 --max_completion_length 512 "
)
GRPO = (
    "swift rlhf --rlhf_type grpo --model S --dataset A --per_device_train_batch_size 2 "
)
COLOCATED = "--use_vllm true --vllm_mode colocate "
SPLIT = "--use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 "
SERVED = GKD.replace(
    "--teacher_model T", "--teacher_model_server http://localhost:8000"
)
MEGATRON = (
    "megatron rlhf --rlhf_type grpo --model S --dataset A --use_vllm true --vllm_mode "
    "colocate --global_batch_size 16 --micro_batch_size 2 --num_generations 4 "
)
ROLLOUT = (
    "CUDA_VISIBLE_DEVICES=4,5 swift rollout --model S --vllm_data_parallel_size 2 "
)
DEPLOY = "CUDA_VISIBLE_DEVICES=6,7 swift deploy --model T --infer_backend vllm "


def checked(path: Path, text: str, *more: str, release: str = "4.6.0") -> Checked:
    path.write_text(text + "\n")
    return check(path, more, framework=f"ms-swift=={release}")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "run.sh"


def faults(found: Checked) -> list[Finding]:
    return [finding for finding in found.findings if finding.level != "note"]


def values(found: Checked) -> dict[str, Any]:
    return {name: value.value for name, value in found.values.items()}


GOOD = {
    "gkd": GPUS + GKD + COLOCATED + "--vllm_max_model_len 1536",
    "grpo": GPUS + GRPO,
    "megatron": GPUS + MEGATRON + "--tensor_model_parallel_size 2 --finetune",
    "a flag": GPUS + GKD + "--no_gradient_checkpointing --max-grad-norm 1",
    "abbreviated": GPUS + GKD + "--num_train_ep 3",
    "servers": f"{DEPLOY} --port 8001 --max_logprobs 64 &\n{ROLLOUT} &\n{GPUS}"
    + SERVED.replace("8000", "8001")
    + SPLIT
    + "--gkd_logits_topk 64",
    "vllm": "CUDA_VISIBLE_DEVICES=5 vllm serve T --port 8000 --max-logprobs 64 --x &\n"
    + GPUS
    + SERVED
    + "--gkd_logits_topk 64",
    "vllm's module": "CUDA_VISIBLE_DEVICES=5 python -m "
    "vllm.entrypoints.openai.api_server --model T --max-logprobs 64 &\n"
    + GPUS
    + SERVED
    + "--gkd_logits_topk 64",
    "two machines": f"{ROLLOUT.replace('4,5', '0,1')}\n{GPUS}{GRPO}"
    + SPLIT.replace("127.0.0.1", "10.0.0.7"),
    "json that is mended": GPUS + GKD + """--model_kwargs '{"a": 1}'""",
    "ignored": GPUS + GKD + "--ignore_args_error true",
    "ends of ranges": GPUS + GKD + "--lmbda 0 --beta 1 --gkd_logits_topk 1",
    "nearly all warmup": GPUS + GKD + "--warmup_ratio 0.9",
    "no warmup steps": GPUS + GKD + "--warmup_ratio 0.1 --warmup_steps 0",
    "sequence": GPUS + GRPO + "--sequence_parallel_size 2",
    "GKD without": GPUS + GKD + "--sequence_parallel_size 1",
    "vLLM's TP": GPUS + GKD + COLOCATED + "--vllm_tensor_parallel_size 4",
    "one response of a teacher": GPUS + GRPO + "--teacher_model T --num_generations 1",
    "steps": GPUS + GRPO + "--generation_batch_size 16 --steps_per_generation 2",
    "a generation's size": GPUS + GRPO + "--generation_batch_size 24",
    "evaluation": GPUS
    + GRPO
    + "--split_dataset_ratio 0.1 --per_device_eval_batch_size 3 "
    "--num_generations_eval 6",
    "no evaluation": GPUS
    + GRPO
    + "--split_dataset_ratio 0.1 --per_device_eval_batch_size 3 --eval_strategy no",
    "Megatron's steps": GPUS
    + MEGATRON
    + "--generation_batch_size 32 --steps_per_generation 2 --save_total_limit 2",
    "Megatron's prompts": GPUS
    + MEGATRON.replace("--num_generations 4", "--num_generations 2"),
    "a GPU for each": "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 "
    + GKD
    + "--deepspeed zero2",
    "split by layers": "CUDA_VISIBLE_DEVICES=0,1 " + GKD,
    "packing": GPUS + GKD + "--packing true --attn_impl flash_attn",
    "ranks": f"{ROLLOUT} --vllm_enable_lora true &\n{GPUS}{GRPO}{SPLIT} --lora_rank 16",
    "another model without vLLM": f"{ROLLOUT} &\n{GPUS}{GRPO}{SPLIT}",
    "warmup in steps": f"{GPUS}{GKD}--warmup_steps 5",
    "warmup as a share": f"{GPUS}{GKD}--warmup_ratio 0.1",
    "fsdp": f"{GPUS}{GKD}--fsdp fsdp2",
    "processes that are not known": f"CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=$N {GKD}",
    "GPUs that are not known": f"NPROC_PER_NODE=3 {GKD}",
    "lengths that are not known": GPUS
    + GRPO
    + COLOCATED
    + "--vllm_max_model_len 64 --max_length $N --max_completion_length 32",
}


@pytest.mark.parametrize("name", GOOD)
def test_what_ms_swift_takes_is_no_fault(name: str, script: Path) -> None:
    assert faults(checked(script, GOOD[name])) == []


FAULTS = {
    "renamed": (GPUS + GKD + "--train_type full", "4.0.4 had it: it is --tuner_type"),
    "removed": (GPUS + GKD + "--galore_config x", "3.12.6 had it, 4.0.4 has not"),
    "Megatron's old name": (
        GPUS + MEGATRON + "--save out",
        "has no option --save; 3.12.6 had it: it is --output_dir",
    ),
    "transformers' old one": (
        GPUS + GKD + "--overwrite_output_dir true",
        "with transformers 5.19.0; with 4.57.6 it is taken",
    ),
    "another command's": (
        GPUS + MEGATRON + "--per_device_train_batch_size 1 --global_batch_size 64",
        "it is one of swift rlhf, swift pt, swift sft; here it is --micro_batch_size",
    ),
    "misspelt": (GPUS + GKD + "--temprature 1", "did you mean '--temperature'"),
    "ambiguous": (GPUS + GKD + "--vllm_m x", "may mean --vllm_max"),
    "positional": (GPUS + GKD + "--beta 0.5 stray", "refuses stray"),
    "no number": (GPUS + GKD + "--beta high", "expects a number"),
    "a choice": (GPUS + GKD + "--vllm_mode colocated", "knows server, colocate"),
    "no dataset": (GPUS + GKD.replace("--dataset A B#500", ""), "no --dataset"),
    "packing": (GPUS + GKD + "--packing true", "needs --attn_impl flash_attn"),
    "a rank of nothing": (
        GPUS + GKD + "--tuner_type full --lora_rank 8",
        "--lora_rank is never read",
    ),
    "broken JSON": (GPUS + GKD + "--model_kwargs '{a: 1,'", "is not JSON"),
    "uneven": (
        "NPROC_PER_NODE=3 CUDA_VISIBLE_DEVICES=0,1,2,3 " + GKD,
        "NPROC_PER_NODE=3 and 4 GPUs",
    ),
    "split by layers": (
        "CUDA_VISIBLE_DEVICES=0,1 " + GKD + "--deepspeed zero2",
        "set NPROC_PER_NODE=2",
    ),
    "FSDP": (GPUS + GKD + "--fsdp fsdp2 --deepspeed zero2", "are mutually exclusive"),
    "sequence": (GPUS + GKD + "--sequence_parallel_size 2", "takes no --sequence"),
    "warmup": (GPUS + GKD + "--warmup_ratio 0.1 --warmup_steps 9", "are mutually"),
    "no mode": (GPUS + GKD + "--use_vllm true", "--vllm_mode is needed"),
    "no vLLM": (GPUS + GKD + "--vllm_mode colocate", "without --use_vllm true"),
    "no host": (
        GPUS + GKD + "--use_vllm true --vllm_mode server",
        "needs --vllm_server_host",
    ),
    "hosts": (GPUS + GKD + SPLIT + "--vllm_server_port 1 2", "1 --vllm_server_host"),
    "vLLM's TP": (
        GPUS + GKD + COLOCATED + "--vllm_tensor_parallel_size 3",
        "no divisor of 4 processes",
    ),
    "lengths": (
        GPUS + GKD + COLOCATED + "--vllm_max_model_len 1024",
        "less than --max_length 1024 and --max_completion_length 512",
    ),
    "generations": (GPUS + GRPO + "--num_generations 5", "does not divide the 8"),
    "steps": (
        GPUS + GRPO + "--generation_batch_size 24 --steps_per_generation 2",
        "24 is not 8 * 2 steps",
    ),
    "a generation's size": (
        GPUS + GRPO + "--generation_batch_size 12",
        "not a multiple",
    ),
    "no batch": (
        GPUS
        + GRPO.replace("batch_size 2", "batch_size 0")
        + "--generation_batch_size 16 --num_generations 5",
        "--per_device_train_batch_size 0 is refused",
    ),
    "no steps": (
        GPUS + GRPO + "--steps_per_generation 0",
        "--steps_per_generation 0 is refused",
    ),
    "evaluation": (
        GPUS + GRPO + "--split_dataset_ratio 0.1 --per_device_eval_batch_size 3",
        "not a multiple of 8 generations",
    ),
    "two teachers": (
        GPUS + SERVED + "--teacher_model T --gkd_logits_topk 8",
        "are mutually exclusive",
    ),
    "no top-k": (GPUS + SERVED, "needs --gkd_logits_topk"),
    "zero top-k": (GPUS + GKD + "--gkd_logits_topk 0", "it counts tokens"),
    "liger": (
        GPUS + GKD + "--gkd_logits_topk 8 --use_liger_kernel true",
        "cannot be combined with --use_liger_kernel",
    ),
    "nobody's liger": (
        GPUS + GKD.replace("--teacher_model T", "") + "--use_liger_kernel true",
        "self-distillation",
    ),
    "sequential": (GPUS + GKD + "--seq_kd true", "not implemented"),
    "lambda": (GPUS + GKD + "--lmbda 1.5", "not between 0 and 1"),
    "vLLM for nothing": (GPUS + GKD + COLOCATED + "--lmbda 0", "only takes memory"),
    "one response": (GPUS + GRPO + "--num_generations 1", "above 1"),
    "truncation": (GPUS + GRPO + "--truncation_strategy right", "left or delete"),
    "overlong": (GPUS + GRPO + "--reward_funcs soft_overlong", "--soft_cache_length"),
    "asynchronous": (
        GPUS + GRPO + COLOCATED + "--async_generate true",
        "--vllm_mode server",
    ),
    "Megatron's world": (
        GPUS + MEGATRON + "--tensor_model_parallel_size 3",
        "is 3: it does not divide 4 processes",
    ),
    "Megatron's batch": (
        GPUS + MEGATRON + "--global_batch_size 12",
        "--global_batch_size 12 is not a multiple of --micro_batch_size 2 on 4",
    ),
    "Megatron's prompts": (
        GPUS + MEGATRON + "--num_generations 16",
        "a generation has 1 prompts",
    ),
    "one checkpoint": (GPUS + MEGATRON + "--save_total_limit 1", "at least 2"),
    "Megatron without vLLM": (
        GPUS + MEGATRON.replace("--vllm_mode colocate", "") + "--use_vllm false",
        "needs --use_vllm true",
    ),
    "a teacher's liger": (
        GPUS + GRPO + "--teacher_model T --use_liger_kernel true",
        "GRPO with a teacher cannot be combined with --use_liger_kernel",
    ),
    "dynamic": (
        GPUS + GRPO + "--teacher_model T --dynamic_sample true",
        "--dynamic_sample needs --reward_funcs",
    ),
    "gdpo": (
        GPUS + GRPO + "--teacher_model T --scale_rewards gdpo",
        "--scale_rewards gdpo needs --reward_funcs",
    ),
    "GKD asynchronous": (GPUS + GKD + "--async_generate true", "is refused by GKD"),
    "Megatron asynchronous": (
        GPUS + MEGATRON + "--async_generate true",
        "is refused by Megatron's GRPO",
    ),
    "Megatron's steps": (
        GPUS + MEGATRON + "--generation_batch_size 64 --steps_per_generation 2",
        "64 is not 16 * 2 steps",
    ),
    "Megatron's generation": (
        GPUS + MEGATRON + "--generation_batch_size 24",
        "24 is not a multiple of 16",
    ),
    "Megatron's responses": (
        GPUS + MEGATRON + "--num_generations 5",
        "--num_generations 5 does not divide 16 responses",
    ),
    "a sequence's ways": (
        GPUS + GRPO + "--sequence_parallel_size 3",
        "--sequence_parallel_size 3 does not divide 4 processes",
    ),
    "warmup of all": (
        GPUS + GKD + "--warmup_ratio 1.5",
        "--warmup_ratio 1.5 is refused",
    ),
    "vLLM split by layers": (
        "CUDA_VISIBLE_DEVICES=0,1 " + GKD + COLOCATED,
        "vLLM cannot be combined with 2 GPUs for 1 process(es)",
    ),
    "PPO packed": (
        GPUS + "swift rlhf --rlhf_type ppo --model S --dataset A --packing true "
        "--attn_impl flash_attn",
        "--rlhf_type ppo takes no --packing",
    ),
    "another port": (
        f"{ROLLOUT} --port 8001 &\n{GPUS}{GRPO}{SPLIT}",
        "the rollout is queried on port 8000, and swift rollout on line 1",
    ),
    "the teacher's port": (
        f"{DEPLOY} --port 9000 --max_logprobs 64 &\n{GPUS}{SERVED}--gkd_logits_topk 9",
        "queried on port 8000, and swift deploy on line 1 listens on 9000",
    ),
    "the port of vLLM's module": (
        "python -m vllm.entrypoints.openai.api_server --model T --port 9000 "
        f"--max-logprobs 64 &\n{GPUS}{SERVED}--gkd_logits_topk 9",
        "queried on port 8000, and vllm serve on line 1 listens on 9000",
    ),
    "one port for two": (
        f"{DEPLOY} --max_logprobs 64 &\n{ROLLOUT} &\n{GPUS}{SERVED}{SPLIT}"
        "--gkd_logits_topk 9",
        "port 8000 is that of swift deploy on line 1, too",
    ),
    "shared GPUs": (
        f"{ROLLOUT.replace('4,5', '3,4')} &\n{GPUS}{GRPO}{SPLIT}",
        "GPU 3 is given to swift rollout, and to swift rlhf on line 2",
    ),
    "a server in front": (
        f"{ROLLOUT}\n{GPUS}{GRPO}{SPLIT}",
        "swift rollout blocks the lines below it: add &",
    ),
    "too few GPUs": (
        f"{ROLLOUT.replace('4,5', '4')} &\n{GPUS}{GRPO}{SPLIT}",
        "needs 2 GPUs and sees 1",
    ),
    "idle GPUs": (
        f"{ROLLOUT.replace('4,5', '4,5,6')} &\n{GPUS}{GRPO}{SPLIT}",
        "sees 3 GPUs and uses 2",
    ),
    "another model": (
        f"{ROLLOUT} --model Q &\n{GPUS}{GRPO}{SPLIT}",
        "serves Q, and S is trained",
    ),
    "ranks": (
        f"{ROLLOUT} --vllm_enable_lora true &\n{GPUS}{GRPO}{SPLIT} --lora_rank 32",
        "--vllm_max_lora_rank 16 is less than --lora_rank 32",
    ),
    "too few probabilities": (
        f"{DEPLOY} &\n{GPUS}{SERVED}--gkd_logits_topk 64",
        "tells 20 tokens' probabilities at most, and --gkd_logits_topk asks for 64",
    ),
    "a server's option": (
        f"{ROLLOUT} --tensor_parallel_size 1 &\n{GPUS}{GRPO}{SPLIT}",
        "3.9.3 had it: it is --vllm_tensor_parallel_size",
    ),
}


# What ms-swift does in another way than written; all else it refuses.
DOUBTFUL = {
    *("no such file", "a rank of nothing", "broken JSON", "vLLM for nothing"),
    *("lengths", "idle GPUs", "another model"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_ms_swift_refuses_is_told(name: str, script: Path) -> None:
    text, says = FAULTS[name]
    found = faults(checked(script, text))
    levels = [finding.level for finding in found if says in finding.message]
    assert levels == ["warning" if name in DOUBTFUL else "error"], found


def test_values_are_those_that_ms_swift_makes_of_them(script: Path) -> None:
    text = "NNODES=2 " + GPUS + GKD + COLOCATED + "--deepspeed zero3_offload"
    found = values(checked(script, text))
    some = {
        "train_files": ["A", "B#500"],
        "gradient_accumulation_steps": 2,  # 16 / 1 / 8 processes
        "train_batch_size": 16,
        "learning_rate": 1e-4,
        "lora_rank": 8,
        "loss_beta": 0.5,
        "zero_stage": 3,
        "offload_param": True,
        "trainer_gpus": 8,
        "rollout_gpus": 8,
        "teacher_gpus": 0,
        "total_gpus": 8,
    }
    assert {name: found[name] for name in some} == some


def test_servers_of_the_script_are_counted(script: Path) -> None:
    text = GOOD["servers"] + " --vllm_tensor_parallel_size 1"
    found = values(checked(script, text))
    some = {"rollout_gpus": 2, "teacher_gpus": 1, "total_gpus": 7, "teacher": "T"}
    assert {name: found[name] for name in some} == some
    assert (found["teacher_server_port"], found["placement"]) == (8001, "split")


def test_what_the_script_does_not_say_is_undetermined(script: Path) -> None:
    text = "NPROC_PER_NODE=$GPUS " + GKD + SPLIT + "--model $STUDENT"
    found = checked(script, text).values
    unsure = ["trainer_gpus", "rollout_gpus", "total_gpus", "train_batch_size"]
    unsure += ["student", "max_model_len", "gradient_accumulation_steps"]
    assert {found[name].source for name in unsure} == {"undetermined"}
    assert found["student"].alternatives == ["give it with --set STUDENT=VALUE"]


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun --nproc_per_node=8 --nnodes 2",
        "python -m torch.distributed.run --nproc-per-node 8 --nnodes=2",
        "accelerate launch --multi_gpu --num_processes 16 --num_machines 2",
    ],
)
def test_a_launcher_says_how_many_processes_there_are(
    launcher: str, script: Path
) -> None:
    text = f"NPROC_PER_NODE=4 {launcher} swift/cli/rlhf.py "
    found = values(checked(script, text + GRPO.removeprefix("swift rlhf")))
    some = ["nodes", "gpus_per_node", "trainer_gpus", "train_batch_size"]
    assert [found[name] for name in some] == [2, 8, 16, 32]


YAML = """
ENV:
  NPROC_PER_NODE: 2
rlhf_type: gkd
model: S
teacher_model: T
dataset: [A, B]
learning_rate: 1e-6
model_kwargs: {a: {b: 1}}
beta: null
"""


def test_a_configuration_is_read_as_the_words_that_ms_swift_makes_of_it(
    tmp_path: Path, script: Path
) -> None:
    path = tmp_path / "gkd.yaml"
    found = checked(path, YAML, "lmbda=1")
    (fault,) = faults(found)  # null is the text None to ms-swift
    assert (fault.line, "expects a number" in fault.message) == (10, True)
    some = {"train_files": ["A", "B"], "learning_rate": 1e-6, "loss_lambda": 1.0}
    assert {name: values(found)[name] for name in some} == some
    assert values(found)["trainer_gpus"] == 2
    found = checked(script, f"swift rlhf {path} --beta 0.2 --learning_rate 3e-6")
    assert (values(found)["learning_rate"], values(found)["student"]) == (3e-6, "S")
    assert found.values["student"].line == 5


RAY = """
rlhf_type: gkd
model: S
dataset: A
global_batch_size: 16
colocate_groups: [[train, rollout]]
use_vllm: true
train: {gpus: 4, tuner_type: lora, tensor_model_parallel_size: 2}
rollout: {gpus: 4, vllm_gpu_memory_utilization: 0.4}
teacher: {gpus: 2, model: T}
"""


def test_the_sections_of_a_ray_configuration_are_gpus_of_roles(
    tmp_path: Path, script: Path
) -> None:
    path = tmp_path / "ray.yaml"
    path.write_text(RAY)
    text = f"megatron rlhf --use_ray true --config {path} --lr 1e-5"
    found = checked(script, text)
    (fault,) = faults(found)
    assert (fault.level, fault.key) == ("warning", "--lr")
    some = {"trainer_gpus": 4, "teacher_gpus": 2, "total_gpus": 6, "teacher": "T"}
    some |= {"placement": "colocated", "gpu_memory_utilization": 0.4, "lora_rank": 8}
    assert {name: values(found)[name] for name in some} == some
    path.write_text(RAY.replace("tensor_model_parallel_size: 2", "lora_rnk: 2"))
    (fault, _) = faults(checked(script, text))
    assert fault.key == "--lr"
    server = "teacher_model_server: http://10.0.0.7:8000\ngkd_logits_topk: 4"
    path.write_text(RAY.replace("teacher: {gpus: 2, model: T}", server))
    (_, fault) = faults(checked(script, text))
    assert (fault.level, fault.key) == ("error", "teacher_model_server")
    assert "cannot be combined with Ray" in fault.message


def test_a_configuration_that_is_not_there_is_named(script: Path) -> None:
    found = checked(script, "swift rlhf nowhere.yaml --beta 0.1")
    assert [f.level for f in found.findings] == ["note"]
    assert "nowhere.yaml" in found.findings[0].message
    sure = {n: v.value for n, v in found.values.items() if v.source != "undetermined"}
    assert sure == {"loss_beta": 0.1}


def test_an_older_release_has_its_own_options(script: Path) -> None:
    text = GPUS + MEGATRON + "--tensor_model_parallel_size 2 --engram_tokenizer_map x"
    assert faults(checked(script, text)) == []
    (fault,) = faults(checked(script, text, release="4.5.3"))
    assert (
        "ms-swift 4.5.3's megatron rlhf has no option --engram_tokenizer_map"
        in fault.message
    )


@pytest.mark.parametrize(
    ("kind", "option", "truncation"),
    [
        ("gkd", "", "drop"),
        ("grpo", "", "left"),
        ("grpo", "--truncation_strategy delete", "drop"),
        ("gkd", "--truncation_strategy right", "right"),
        ("gkd", "--truncation_strategy $S", None),
    ],
)
@pytest.mark.parametrize("program", ["swift", "megatron"])
def test_rows_that_are_too_long(
    program: str, kind: str, option: str, truncation: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{program} rlhf --rlhf_type {kind} --model m {option}\n")
    assert check(path).values["truncation"].value == truncation
