"""The memory plan of ms-swift's Megatron: parts counted by hand, and its losses."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from checked_job import Checked
from memory_ranks import Counted
from test_estimate import HALF_B, QWEN_7B

from pytest_gkd.job.frameworks.ms_swift import megatron_plan as plan

START = (
    "NNODES=1 NPROC_PER_NODE=8 megatron {} --model {{s}} --dataset d --max_length 1000 "
    "--tensor_model_parallel_size 2 --global_batch_size 16 --micro_batch_size 2"
)
GKD = (
    START.format("rlhf --rlhf_type gkd") + " --max_completion_length 500 --lmbda 1 "
    "--vllm_mode colocate --vllm_gpu_memory_utilization 0.3"
)
GRPO = GKD.replace("gkd", "grpo").replace("--lmbda 1", "--num_generations 4")
SFT = START.format("sft")
T = "--teacher_model {t}"
SERVED = "--teacher_model_server http://localhost:8000 --gkd_logits_topk 20"
AWAY = "--sleep_level 1 --offload_model true --offload_optimizer true"
# Two tensor ranks; four replicas, so a step is two micro-batches of two rows.
TOKENS = 2 * 1500
VOCAB = HALF_B.vocab // 2


@pytest.fixture(params=["4.5.3", "4.6.0"])
def checked(tmp_path: Path, capsys: Any, request: Any) -> Checked:
    return Checked(tmp_path, capsys, f"ms-swift=={request.param}")


def test_the_distributed_optimizer_divides_what_the_tensor_ranks_have(
    checked: Checked,
) -> None:
    half = checked.elements()[0] // 2
    found = checked.parts(SFT)
    assert found["weights bfloat16"] == 2 * half
    # main_grads_dtype fp32 makes ms-swift accumulate them in float32.
    assert found["gradients float32"] == 4 * half
    assert found["optimizer states"] == pytest.approx(8 * half / 4, rel=1e-6)
    assert found["master copies"] == pytest.approx(4 * half / 4, rel=1e-6)
    narrow = checked.parts(f"{SFT} --main_grads_dtype bf16")
    assert narrow["gradients bfloat16"] == 2 * half
    whole = checked.parts(f"{SFT} --use_distributed_optimizer false")
    assert whole["optimizer states"] == 8 * half
    half_precision = checked.parts(f"{SFT} --torch_dtype float16")
    assert half_precision["weights float16"] == 2 * half
    assert half_precision["gradients bfloat16"] == 2 * half  # as wide as float16


def test_states_in_host_memory_are_not_those_that_leave_for_rollouts(
    checked: Checked,
) -> None:
    half = checked.elements()[0] // 2
    always = "--use_precision_aware_optimizer true --optimizer_cpu_offload true"
    found = checked.parts(f"{SFT} {always}", "optimizer step")
    assert not [name for name in found if "states" in name or "master" in name]
    part = checked.parts(f"{SFT} {always} --optimizer_offload_fraction 0.5")
    assert part["optimizer states"] == pytest.approx(half, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "each"),
    [
        # All of a row's tokens have logits, 501 of 1500 are answers.
        (T, 4 + (38 * 501 / 1500 + 10 * 512 / TOKENS) * QWEN_7B.vocab / HALF_B.vocab),
        (
            f"{T} --beta 0",
            4 + (18 * 501 / 1500 + 14 * 512 / TOKENS) * QWEN_7B.vocab / HALF_B.vocab,
        ),
        ("--beta 1", 4 + 24 * 501 / 1500 + 10 * 512 / TOKENS),  # its own teacher
        (f"{T} --gkd_logits_topk 20", 8 + 4 * 501 / 1500),
        (SERVED, 8 + 4 * 501 / 1500),
    ],
)
def test_what_its_loss_holds(checked: Checked, options: str, each: float) -> None:
    found = checked.parts(f"{GKD} {options}")
    assert found["logits and loss"] == pytest.approx(TOKENS * VOCAB * each, rel=1e-6)


def test_rows_of_the_dataset_may_be_answers_as_a_whole(checked: Checked) -> None:
    found = checked.parts(f"{GKD} {SERVED} --lmbda 0.5")
    assert found["logits and loss"] == pytest.approx(
        TOKENS * VOCAB * (8 + 4 * 1001 / 1500), rel=1e-6
    )
    # Without vLLM all rows are the dataset's.
    found = checked.parts(f"{GKD} {SERVED} --use_vllm false")
    assert found["logits and loss"] == pytest.approx(2000 * VOCAB * 12, rel=1e-6)
    told = checked(f"{GKD} {SERVED} --lmbda 0")["memory"]
    assert {row["role"] for row in told} == {"trainer"}


def test_the_teachers_logits_of_all_micro_batches_are_there_at_once(
    checked: Checked,
) -> None:
    half = checked.elements()[1] // 2
    each = TOKENS * QWEN_7B.vocab // 2 * 2
    for more, micro_batches in (
        ("", 2),
        ("--steps_per_generation 3", 6),
        ("--generation_batch_size 32", 4),
    ):
        for phase, name in (
            ("forward and backward", "teacher's logits"),
            ("forward", "teacher's logits"),
        ):
            found = checked.parts(f"{GKD} {T} {more}", phase)
            assert found[name] == micro_batches * each
            assert found["teacher's weights bfloat16"] == 2 * half
    topk = checked.parts(f"{GKD} {T} --gkd_logits_topk 20")
    assert not topk.get("teacher's logits")
    # It scores a micro-batch after the other: 16 bits of one.
    found = checked.parts(f"{GKD} {T} --gkd_logits_topk 20", "forward")
    assert found["teacher's logits"] == each


def test_a_teacher_leaves_but_for_its_own_forward_passes(checked: Checked) -> None:
    name = "teacher's weights bfloat16"
    half = checked.elements()[1] // 2
    for phase in ("rollout", "forward", "forward and backward", "weight sync"):
        found = checked.parts(f"{GKD} {T}", phase)
        assert found[name] == 2 * half
        found = checked.parts(f"{GKD} {T} --offload_teacher_model true", phase)
        assert found.get(name, 0) == (2 * half if phase == "forward" else 0)


def test_grpo_holds_its_reference_whatever_beta_is(checked: Checked) -> None:
    name = "reference's weights bfloat16"
    half = checked.elements()[0] // 2
    for phase in (
        *("rollout", "log-probabilities", "forward", "forward and backward"),
        *("weight sync", "checkpoint"),
    ):
        assert checked.parts(f"{GRPO} --beta 0", phase)[name] == 2 * half
        away = checked.parts(f"{GRPO} {AWAY}", phase)
        assert away.get(name, 0) == (0 if phase == "rollout" else 2 * half)
    found = checked.parts(GRPO)
    assert found["logits and loss"] == TOKENS * VOCAB * 8
    # At 1 they are no more than what the matrix's backward pass has of them.
    found = checked.parts(f"{GRPO} --temperature 1")
    assert found["logits' gradient"] == TOKENS * VOCAB * 6
    assert checked.parts(GRPO, "log-probabilities")["logits and loss"] == (
        TOKENS * VOCAB * 6
    )


def test_offload_lowers_rollouts_alone(checked: Checked) -> None:
    half = checked.elements()[0] // 2
    own = ("weights b", "gradients", "master", "optimizer")

    def of(phase: str, more: str) -> Any:
        found = checked.parts(f"{GRPO} {more}", phase)
        return sum(size for name, size in found.items() if name.startswith(own)) / half

    assert of("rollout", "") == pytest.approx(2 + 4 + 12 / 4, rel=1e-5)
    assert of("rollout", AWAY) == 0
    assert of("rollout", "--offload_model true") == pytest.approx(12 / 4, rel=1e-5)
    assert of("rollout", "--offload_optimizer true") == 6
    # All of it is there when weights are sent, and when the reference is asked.
    for phase in ("weight sync", "forward", "log-probabilities"):
        assert of(phase, AWAY) == of("rollout", "")


def test_vllm_is_asked_for_as_many_rows_as_a_gpu_generates(checked: Checked) -> None:
    # The sampler's logits of all sequences are its most, in float32 three times.
    command = GRPO.replace("global_batch_size 16", "global_batch_size 2048")
    for more, sequences in (
        ("", 256),
        ("--steps_per_generation 2", 512),
        ("--vllm_tensor_parallel_size 2", 512),
        ("--vllm_max_num_seqs 300", 300),
    ):
        found = checked.parts(f"{command} {more}", "rollout")
        assert found["engine's activations"] == sequences * HALF_B.vocab * 12
    apart = GRPO.replace("colocate", "server") + " --vllm_server_host h"
    assert {row["role"] for row in checked(apart)["memory"]} == {"trainer", "reference"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--tuner_type lora", "what LoRA's layers keep in Megatron"),
        ("--bridge_backend megatron-bridge", "Megatron-Bridge asks"),
        ("--use_megatron_fsdp true", "Megatron's FSDP"),
        ("--fp8_format hybrid", "training in fp8"),
        ("--optimizer muon", "state of that optimizer"),
        ("--attention_backend unfused", "memory of that attention"),
        ("--padding_free false", "padded rows"),
        ("--sft_alpha 0.1", "two losses at once"),
        ("--mtp_num_layers 1", "predict several tokens"),
        ("--virtual_pipeline_model_parallel_size 2", "are refused there"),
        ("--recompute_granularity $G", "recompute_granularity cannot be determined"),
        ("$MORE", "which options the command has"),
        ("--micro_batch_size 3", "no multiple of micro-batches"),
        ("--fp16 false --bf16 false", "training in float32"),
        ("--steps_per_generation -1", "steps_per_generation is -1"),
        ("--beta 7", "beta is 7"),
    ],
)
def test_what_is_not_known_has_no_plan(checked: Checked, more: str, said: str) -> None:
    found = checked(f"{GKD} {T} {more}")
    assert found["memory"] == []
    assert said in found["no_memory_plan"]


def test_other_losses_and_no_length_have_no_plan(checked: Checked) -> None:
    dpo = GKD.replace("gkd", "dpo")
    assert "the memory of dpo in Megatron" in checked(dpo)["no_memory_plan"]
    long = SFT.replace("--max_length 1000 ", "")
    assert "nothing but the model bounds" in checked(long)["no_memory_plan"]
    assert checked(SFT.replace(" sft", " pt"))["memory"]


def test_recomputation_is_as_ms_swift_has_it(checked: Checked) -> None:
    full = (
        "--recompute_granularity full --recompute_method uniform "
        "--recompute_num_layers 1"
    )
    selective, none, whole = (
        checked.parts(f"{SFT} {more}")["activations bfloat16"]
        for more in ("", "--recompute_granularity none", full)
    )
    assert selective == none  # flash attention keeps no scores
    assert whole < selective / 3


def test_the_advice_is_in_ms_swifts_own_keys(checked: Checked) -> None:
    rows = checked(f"{GKD} {T} {AWAY}")["memory"]
    need = max(row["total"] for row in rows if row["phase"] == "forward and backward")
    bad = checked(f"{GKD} {T} {AWAY}", f"{need - (2 << 30)}B")
    (told,) = {
        one["message"].partition(". With ")[2]
        for one in bad["findings"]
        if one["cause"] == "cuda.oom"
    }
    assert "all fits" in told
    command = told.partition(" (now")[0].replace("=", " ")
    good = checked(f"{GKD} {T} {AWAY} --{command}", f"{need - (2 << 30)}B")
    assert good["memory"]
    assert not [one for one in good["findings"] if one["cause"] == "cuda.oom"]


# -- its losses --------------------------------------------------------------------

SWIFT = Path(os.environ.get("GKD_UPSTREAM", ""), "modelscope+ms-swift/swift")
SOURCES = (
    "rlhf_trainers/gkd_loss.py",
    "megatron/trainers/vocab_parallel_utils.py",
    "megatron/trainers/gkd_utils.py",
)
ENTRIES = 2048


@pytest.fixture
def swift(monkeypatch: Any, tmp_path: Path) -> Iterator[Any]:
    """ms-swift's own functions by name, in a group of one rank."""
    if not all((SWIFT / path).is_file() for path in SOURCES):
        pytest.skip("GKD_UPSTREAM has no ms-swift")
    state = pytest.importorskip("megatron.core.parallel_state")
    import torch
    from torch import distributed

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    space: dict[str, Any] = {"split_cp_inputs": None}
    for path in SOURCES:
        tree = ast.parse((SWIFT / path).read_text("utf-8"))
        tree.body = [
            node
            for node in tree.body
            if not isinstance(node, ast.ImportFrom)
            or str(node.module).partition(".")[0] not in ("swift", "mcore_bridge")
        ]
        module = ModuleType("ms_swift_loss")
        monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
        module.__dict__.update(space)
        exec(compile(tree, path, "exec"), module.__dict__)  # noqa: S102 - its own
        space |= module.__dict__
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    state.initialize_model_parallel()
    yield SimpleNamespace(**space, state=state)
    state.destroy_model_parallel()
    distributed.destroy_process_group()


def most(work: Callable[[Any], Any], tokens: int) -> float:
    """The bytes for an entry of the vocabulary at the worst moment of an update."""
    import torch

    hidden, head = (
        torch.randn(size, dtype=torch.bfloat16, requires_grad=True)
        for size in ((tokens, 1, 8), (8, ENTRIES))
    )

    def logits() -> Any:  # as GPTModel and Float16Module return them
        return (hidden @ head).transpose(0, 1).contiguous()

    counted = Counted([])
    with counted.mode():
        loss = work(logits)
        if loss is not None:
            loss.backward()
    return counted.most / ENTRIES


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:c10d..allreduce_:UserWarning")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("beta", [0, 0.5, 1])
@pytest.mark.parametrize("kind", ["whole", "padded", "topk"])
def test_the_loss_of_distillation_holds_what_is_planned(
    swift: Any, monkeypatch: Any, kind: str, beta: float, ranks: int
) -> None:
    import torch

    # Only the form of what it computes depends on how many there are.
    size = "get_tensor_model_parallel_world_size"
    monkeypatch.setattr(swift.state, size, lambda: ranks)

    def found(tokens: int, answers: int) -> float:
        labels = torch.full((1, tokens), -100)
        labels[:, tokens - answers :] = 1
        theirs = ENTRIES - 2 * (kind == "padded")
        whole = torch.randn(1, tokens, theirs, dtype=torch.bfloat16)
        told = swift.TeacherOutput(full_logits=whole, labels=labels)
        if kind == "topk":
            values, indices = whole.topk(4, -1)
            told = swift.TeacherOutput(None, values, indices, labels)

        def work(logits: Callable[[], Any]) -> Any:
            return swift.gkd_loss(
                logits().float(),
                told,
                labels,
                beta,
                0.9,
                gather_fn=swift.tp_gather_topk,
                log_softmax_fn=swift.vocab_parallel_log_softmax,
                kl_div_fn=swift.vocab_parallel_kl_div,
            )[0]

        return most(work, tokens)

    table = {"whole": plan.GKD, "padded": plan.GKD_PADDED}
    whole, answered, chunk = table[kind][beta] if kind in table else plan.TOPK
    if ranks > 1 and kind != "topk":
        chunk += plan.DIVIDED
    for tokens, answers in ((2048, 2048), (2048, 1024)):
        planned = whole * tokens + answered * answers + chunk * plan.CHUNK
        assert planned == pytest.approx(found(tokens, answers), rel=0.05)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("temperature", [1.0, 0.9])
@pytest.mark.parametrize("trains", [True, False])
def test_the_loss_of_grpo_holds_what_is_planned(
    swift: Any, temperature: float, trains: bool
) -> None:
    import torch

    def work(logits: Callable[[], Any]) -> Any:
        with torch.set_grad_enabled(trains):
            found = logits().float() if trains else logits()
            if temperature != 1:
                found.div_(temperature)
            labels = torch.ones(found.shape[:2], dtype=torch.long)
            told = swift.compute_logps_and_entropy_from_logits(found, labels)[0].sum()
        return told if trains else None

    planned = plan.GRPO[temperature == 1][0] if trains else plan.SCORED
    assert planned == pytest.approx(most(work, 1024) / 1024, rel=0.03)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("fused", [True, False])
def test_the_loss_of_sft_holds_what_is_planned(swift: Any, fused: bool) -> None:
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.fusions import fused_cross_entropy

    def work(logits: Callable[[], Any]) -> Any:
        found = logits()
        labels = torch.ones(found.shape[:2], dtype=torch.long)
        if not fused:
            loss = tensor_parallel.vocab_parallel_cross_entropy(found, labels)
        else:
            group = swift.state.get_tensor_model_parallel_group()
            whole = fused_cross_entropy.fused_vocab_parallel_cross_entropy
            loss = whole(found, labels, group)
        return loss.float().sum()

    assert plan.SFT[0] == pytest.approx(most(work, 1024) / 1024, rel=0.03)
