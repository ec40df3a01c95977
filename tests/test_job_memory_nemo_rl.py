"""The memory plan of NeMo-RL: parts counted by hand, reasons, and advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checked_job import Checked
from test_estimate import HALF_B
from test_job_memory import shape

from pytest_gkd.job import beside_memory, loss_memory, models, training_memory
from pytest_gkd.job.beside_memory import Scorer
from pytest_gkd.job.training_memory import Trainer

# 8 GPUs; the student over TP 2 and CP 2, the teacher over TP 4 and CP 2; micro-batches
# of up to 8192 tokens; recomputation, top-k loss, vLLM beside the trainer.
DISTILLATION = (
    "python examples/run_distillation.py policy.model_name={s} teacher.model_name={t}"
)
# One GPU, micro-batches of 4 rows of 512 tokens, without recomputation.
GRPO = "python examples/run_grpo.py policy.model_name={s} "
GRPO += "policy.sequence_packing.enabled=false"
FOUR = f"{GRPO} cluster.gpus_per_node=4"
SPLIT = "policy.generation.colocated.enabled=false "
SPLIT += "policy.generation.colocated.resources.gpus_per_node=4"
MEGATRON = "policy.dtensor_cfg.enabled=false policy.megatron_cfg.enabled=true "
UPDATE = "forward and backward"
BOTH = "trainer+rollout"
ROW = 8192


@pytest.fixture
def checked(tmp_path: Path, capsys: Any) -> Checked:
    return Checked(tmp_path, capsys, "nemo-rl==0.7.0")


def rows(checked: Checked, command: str) -> dict[tuple[str, str], dict[str, int]]:
    found = checked(command)
    assert found["memory"], found["no_memory_plan"]
    return {(row["role"], row["phase"]): row["bytes"] for row in found["memory"]}


def test_a_distillation_has_one_model_at_a_time(checked: Checked) -> None:
    own, others = checked.elements()
    found = rows(checked, DISTILLATION)
    update = found[BOTH, UPDATE]
    # Float32 over all 8 ranks: TP 2 times FSDP over 4, CP among them.
    assert update["weights float32"] == pytest.approx(4 * own / 8, abs=4)
    assert update["optimizer states float32"] == pytest.approx(own, abs=4)
    # Half the tokens by CP, half the vocabulary by TP; float32 with their gradient.
    tokens = ROW // 2
    assert update["logits and loss"] == tokens * HALF_B.vocab // 2 * 8
    teacher = found["teacher", "forward"]
    assert teacher["teacher's weights float32"] == pytest.approx(4 * others / 8, abs=4)
    assert teacher["teacher's logits"] == tokens * HALF_B.vocab // 4 * 6
    for phase in ("rollout", "weight sync"):
        assert not [part for part in found[BOTH, phase] if "teacher" in part]
    assert not [part for part in teacher if part.startswith(("weights", "optimizer"))]
    assert "weights float32" not in found[BOTH, "rollout"]
    sync = found[BOTH, "weight sync"]
    assert "weights float32" in sync
    assert "optimizer states float32" not in sync
    # Three processes share each GPU.
    assert update["CUDA context"] == 3 << 29
    assert (BOTH, "log-probabilities") not in found


@pytest.mark.parametrize(("release", "has_states"), [("0.6.0", True), ("0.7.0", False)])
def test_states_leave_for_a_teacher_since_0_7(
    tmp_path: Path, capsys: Any, release: str, has_states: bool
) -> None:
    checked = Checked(tmp_path, capsys, f"nemo-rl=={release}")
    sizes = "policy.dtensor_cfg.context_parallel_size=1 "
    sizes += sizes.replace("policy", "teacher")
    found = rows(checked, f"{DISTILLATION} {SPLIT} {sizes}")
    teacher = found["teacher", "forward"]
    assert "weights float32" in teacher
    assert ("optimizer states float32" in teacher) == has_states
    assert "optimizer states float32" in found["trainer", "weight sync"]
    assert found["rollout", "rollout"]["KV cache bfloat16"] > 40 << 30


def test_grpo_asks_policy_and_reference_with_the_same_weights(checked: Checked) -> None:
    own, _ = checked.elements()
    found = rows(checked, FOUR)
    asked = found[BOTH, "log-probabilities"]
    # 4 rows of 512 tokens: float32, log-softmax and a copy of them.
    assert asked["student's logits"] == 4 * 512 * HALF_B.vocab * 12
    assert asked["weights float32"] == own
    assert "optimizer states float32" not in asked
    assert "reference" not in {role for role, _ in found}
    assert found[BOTH, UPDATE]["logits and loss"] == 2048 * HALF_B.vocab * 12
    few = rows(checked, f"{FOUR} policy.logprob_batch_size=1")
    one = few[BOTH, "log-probabilities"]
    assert one["student's logits"] == 512 * HALF_B.vocab * 8
    cut = rows(checked, f"{FOUR} policy.logprob_chunk_size=64")
    chunked = cut[BOTH, "log-probabilities"]
    assert chunked["student's logits"] == 2048 * HALF_B.vocab * 6
    apart = f"{GRPO} cluster.gpus_per_node=8 {SPLIT}"
    for more, stays in (
        ("", True),
        ("policy.offload_optimizer_for_logprob=true", False),
    ):
        parts = rows(checked, f"{apart} {more}")["trainer", "log-probabilities"]
        assert ("optimizer states float32" in parts) == stays


def test_one_gpu_is_not_wrapped_by_the_second_worker(checked: Checked) -> None:
    own, _ = checked.elements()
    small = models.read(checked.student)
    update = rows(checked, GRPO)[BOTH, UPDATE]
    assert update["weights float32"] == 4 * own
    copies = own - (small.embedding if small.head else 0)
    assert update["autocast's copies bfloat16"] == 2 * copies
    first = rows(checked, f"{GRPO} policy.dtensor_cfg._v2=false")[BOTH, UPDATE]
    assert "autocast's copies bfloat16" not in first
    assert first["gathered weights bfloat16"]


def test_what_recomputation_leaves_gathered(tmp_path: Path, capsys: Any) -> None:
    # Few logits and small embeddings, so that the first layer's backward pass is the
    # fullest moment.
    short = "policy.train_micro_batch_size=1 policy.max_total_sequence_length=16"
    again = "policy.dtensor_cfg.activation_checkpointing=true"
    gathered = {}
    for release, more in (("0.6.0", ""), ("0.7.0", ""), ("0.7.0", "_v2=false")):
        place = tmp_path / f"{release}{bool(more)}"
        place.mkdir()
        own = Checked(place, capsys, f"nemo-rl=={release}")
        own.student = shape(place / "small", replace(HALF_B, vocab=1000))
        more = more and f"policy.dtensor_cfg.{more}"
        update = rows(own, f"{FOUR} {short} {again} {more}")[BOTH, UPDATE]
        gathered[release, bool(more)] = update["gathered weights bfloat16"]
        small = models.read(own.student)
    rest = small.elements - sum(layer.elements for layer in small.layers)
    two = 2 * (rest + 2 * small.layers[0].elements)
    assert gathered["0.7.0", False] == 2 * small.elements
    assert gathered["0.6.0", False] == gathered["0.7.0", True] == two


def test_the_first_worker_unshards_all_to_ask(checked: Checked) -> None:
    own, _ = checked.elements()
    first = f"{FOUR} policy.dtensor_cfg._v2=false policy.logprob_batch_size=1"
    short = "policy.max_total_sequence_length=64"
    asked = rows(checked, f"{first} {short}")[BOTH, "log-probabilities"]
    assert asked["gathered weights bfloat16"] == 2 * own
    long = rows(checked, f"{first} policy.max_total_sequence_length=4096")
    asked = long[BOTH, "log-probabilities"]
    assert asked["gathered weights bfloat16"] < 2 * own
    assert asked["student's logits"] == 4096 * HALF_B.vocab * 8


@pytest.mark.parametrize(
    ("more", "tokens", "each"),
    [
        ("policy.train_micro_batch_size=2", 2 * 512, 12),
        (
            "policy.dynamic_batching.enabled=true "
            "policy.dynamic_batching.train_mb_tokens=3000",
            3000,
            12,
        ),
        (
            "policy.dynamic_batching.enabled=true "
            "policy.dynamic_batching.train_mb_tokens=100",
            512,
            12,
        ),
        (
            "policy.sequence_packing.enabled=true "
            "policy.sequence_packing.train_mb_tokens=4000",
            4000,
            12,
        ),
        (
            "policy.train_micro_batch_size=512 policy.train_global_batch_size=32",
            8 * 512,
            12,
        ),
    ],
)
def test_tokens_of_a_micro_batch(
    checked: Checked, more: str, tokens: int, each: int
) -> None:
    update = rows(checked, f"{FOUR} {more}")[BOTH, UPDATE]
    assert update["logits and loss"] == tokens * HALF_B.vocab * each


def test_packed_rows_are_as_long_as_in_training_when_asked(checked: Checked) -> None:
    packed = (
        f"{FOUR} policy.sequence_packing.enabled=true "
        "policy.sequence_packing.train_mb_tokens=4000 "
        "policy.sequence_packing.logprob_mb_tokens=1000"
    )
    asked = rows(checked, packed)[BOTH, "log-probabilities"]
    assert asked["student's logits"] == 4000 * HALF_B.vocab * 8


def test_cpu_offload_leaves_for_the_time_of_sending(checked: Checked) -> None:
    found = rows(checked, f"{FOUR} policy.dtensor_cfg.cpu_offload=true")
    for phase in (UPDATE, "optimizer step", "log-probabilities"):
        assert not [p for p in found[BOTH, phase] if p.startswith(("weights", "opt"))]
    assert "weights float32" in found[BOTH, "weight sync"]


def test_sft_and_dpo_have_a_trainer_alone(checked: Checked) -> None:
    sft = rows(checked, "python examples/run_sft.py policy.model_name={s}")
    assert {role for role, _ in sft} == {"trainer"}
    dpo = rows(
        checked,
        "python examples/run_dpo.py policy.model_name={s} "
        "policy.train_micro_batch_size=2 policy.max_total_sequence_length=1024 "
        "cluster.gpus_per_node=2 policy.dtensor_cfg.tensor_parallel_size=1",
    )
    # Chosen and rejected rows, of the reference's log-probabilities, too; dpo.yaml has
    # the first worker.
    update = dpo["trainer", UPDATE]
    assert update["logits and loss"] == 4 * 1024 * HALF_B.vocab * 12
    asked = dpo["trainer", "log-probabilities"]
    assert asked["student's logits"] == 4 * 1024 * HALF_B.vocab * 8
    assert "optimizer states float32" in asked


def test_megatron_moves_what_it_may(checked: Checked) -> None:
    own, _ = checked.elements()
    megatron = f"{GRPO} cluster.gpus_per_node=4 {MEGATRON}"
    found = rows(checked, megatron)
    update = found[BOTH, UPDATE]
    assert update["weights bfloat16"] == update["gradients bfloat16"] == 2 * own
    # Of the precision-aware optimizer: the half that bfloat16 has not, and moments.
    assert update["master copies"] == pytest.approx(2 * own / 4, abs=8)
    assert update["optimizer states"] == pytest.approx(8 * own / 4, abs=8)
    assert update["logits and loss"] == 4 * 512 * HALF_B.vocab * 12
    asked = found[BOTH, "log-probabilities"]
    assert asked["weights bfloat16"] == 2 * own
    for part in ("gradients bfloat16", "master copies", "optimizer states"):
        assert part not in asked
        assert part not in found[BOTH, "weight sync"]
    assert not [part for part in found[BOTH, "rollout"] if part.startswith("weights")]
    plain = "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=false"
    stays = rows(checked, f"{megatron} {plain}")[BOTH, "rollout"]
    assert stays["master copies"] == pytest.approx(4 * own / 4, abs=8)
    assert "optimizer states" not in stays
    kept = rows(checked, f"{megatron} ++policy.offload_optimizer_for_refit=false")
    assert "optimizer states" in kept[BOTH, "rollout"]


@pytest.mark.parametrize(
    ("more", "each"),
    [
        ("", 12),
        ("policy.megatron_cfg.defer_fp32_logits=true", 14),
        (
            "policy.megatron_cfg.defer_fp32_logits=true policy.logprob_chunk_size=512",
            10,
        ),
        ("policy.sequence_packing.enabled=true", 16),
        (
            "policy.sequence_packing.enabled=true "
            "++policy.sequence_packing.fuse_loss=true",
            12,
        ),
        (
            "policy.sequence_packing.enabled=true "
            "policy.megatron_cfg.defer_fp32_logits=true",
            9,
        ),
    ],
)
def test_losses_in_megatron(checked: Checked, more: str, each: int) -> None:
    command = f"{GRPO} cluster.gpus_per_node=4 {MEGATRON} {more}"
    update = rows(checked, command)[BOTH, UPDATE]
    assert update["logits and loss"] == 4 * 512 * HALF_B.vocab * each


def test_a_teacher_in_megatron_is_weights_alone(checked: Checked) -> None:
    _, others = checked.elements()
    own = MEGATRON + MEGATRON.replace("policy", "teacher")
    packed = "policy.dynamic_batching.enabled=false "
    packed += "policy.sequence_packing.enabled=true "
    packed += packed.replace("policy", "teacher")
    sizes = " ".join(
        f"{one}.megatron_cfg.{size}_parallel_size=1"
        for one in ("policy", "teacher")
        for size in ("tensor_model", "pipeline_model", "context")
    )
    found = rows(checked, f"{DISTILLATION} {own} {packed} {sizes}")
    teacher = found["teacher", "forward"]
    assert teacher["teacher's weights bfloat16"] == 2 * others
    assert teacher["teacher's logits and loss"] == ROW * HALF_B.vocab * 6
    assert not [part for part in teacher if part.startswith(("weights", "gradients"))]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("policy.generation.backend=sglang", "generation by sglang"),
        ("policy.generation.vllm_cfg.precision=fp8", "precision is fp8"),
        ("policy.generation.top_p=0.9", "filters of the sampling"),
        ("policy.optimizer.name=torch.optim.SGD", "optimizer torch.optim.SGD"),
        ("++policy.dtensor_cfg.expert_parallel_size=2", "experts in Automodel"),
        ("policy.dtensor_cfg.custom_parallel_plan=my.plan", "plan of one's own"),
        ("++policy.hf_config_overrides.num_hidden_layers=2", "num_hidden_layers"),
        ("policy.dtensor_cfg.lora_cfg.enabled=true", "LoRA"),
        ("policy.precision=$KIND", "KIND is not certain"),
        ("policy.dtensor_cfg.tensor_parallel_size=4", "no multiple of 4"),
        (f"{MEGATRON} policy.megatron_cfg.peft.enabled=true", "LoRA"),
        (f"{MEGATRON} policy.megatron_cfg.optimizer.optimizer=sgd", "optimizer"),
        (f"{MEGATRON} policy.megatron_cfg.fp8_cfg.enabled=true", "fp8"),
        (
            "policy.dtensor_cfg.context_parallel_size=2 "
            "policy.sequence_packing.enabled=true",
            "packed rows",
        ),
    ],
)
def test_what_is_not_known_has_no_plan(checked: Checked, more: str, said: str) -> None:
    found = checked(f"{FOUR} {more}")
    assert found["memory"] == []
    assert said in found["no_memory_plan"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"{DISTILLATION} loss_fn.zero_outside_topk=true", "zero_outside_topk"),
        ("python examples/run_rm.py policy.model_name={s}", "rm is not known"),
        ("python examples/run_grpo.py --config $FILE policy.model_name={s}", "FILE"),
    ],
)
def test_what_has_another_kind_of_job(
    checked: Checked, command: str, said: str
) -> None:
    found = checked(command)
    assert found["memory"] == []
    assert said in found["no_memory_plan"]


def test_the_advice_makes_it_fit(checked: Checked) -> None:
    command = FOUR.replace("{s}", "{t}") + " policy.train_global_batch_size=512"
    bad = checked(command, "40GiB")
    told = [one["message"] for one in bad["findings"] if one["cause"] == "cuda.oom"]
    advice = told[0].split("With ")[1].removesuffix(" all fits")
    options = [part.split(" (now")[0] for part in advice.split(" and ")]
    assert all(option.startswith(("policy.", "cluster.")) for option in options)
    good = checked(f"{command} {' '.join(options)}", "40GiB")
    assert {row["verdict"] for row in good["memory"]} <= {"fits", "tight"}


def test_tensor_parallelism_divides_what_is_between_matrices(checked: Checked) -> None:
    small = models.read(checked.student)
    whole = Trainer(small, gpus=4, sharding="fsdp2", tokens=1000)
    layer, width = small.layers[0], small.width
    shape = layer.shape
    inner = 2 * (shape.queries + shape.keys) + 4 * shape.dense
    heads = 4 * shape.heads
    every = training_memory.layer_bytes(whole, layer)
    assert every == 1000 * (2 * layer.items + 4 * layer.floats)
    divided = replace(whole, tensor=2, sequence=False)
    less = 1000 * (2 * inner + heads) // 2
    assert training_memory.layer_bytes(divided, layer) == every - less
    # Only the matrices' inputs stay whole.
    with_it = replace(divided, sequence=True)
    inputs = 1000 * 2 * width * 2
    assert training_memory.layer_bytes(with_it, layer) == inputs + (every - inputs) // 2
    parts = replace(divided, inputs=4)
    assert training_memory.checkpoint_bytes(parts) == 1000 * 4 * width * 2
    assert training_memory.checkpoint_bytes(replace(parts, sequence=True)) == (
        1000 * 4 * width
    )


def test_a_scorer_that_is_divided_and_one_that_unshards(checked: Checked) -> None:
    small = models.read(checked.student)
    scorer = Scorer("teacher", small, 10, 2, tensor=2, dtype="float32", logits=6)
    parts = dict(beside_memory.scored(scorer, shares=True).phases)["forward"]
    assert parts["teacher's weights float32"] == small.elements
    assert parts["teacher's logits"] == 10 * small.vocab * 3
    whole = replace(scorer, unshards=True)
    parts = dict(beside_memory.scored(whole, shares=True).phases)["forward"]
    assert parts["teacher's gathered weights"] == small.elements
    assert "teacher's logits" not in parts


def test_packed_losses_hold_more() -> None:
    held = {
        kind: loss_memory.needed(f"nemo-{kind}", 10, 100, 2)
        for kind in ("topk", "packed-topk", "logprob", "packed-logprob")
    }
    assert {kind: most // 1000 for kind, (most, _) in held.items()} == {
        "topk": 8,
        "packed-topk": 13,
        "logprob": 12,
        "packed-logprob": 12,
    }
    assert {left for _, left in held.values()} == {2000}


def test_attention_in_float32_has_no_fused_kernel(checked: Checked) -> None:
    plain, low = f"{GRPO} policy.precision=float32", GRPO
    name = "plain attention float32"
    # The softmaxes of 24 layers, and two more; rows of 512 tokens, four at once.
    softmax = 4 * 4 * 512 * HALF_B.heads * 512
    assert rows(checked, plain)[BOTH, UPDATE][name] > 26 * softmax
    assert name not in rows(checked, low)[BOTH, UPDATE]
    packed = plain.replace("enabled=false", "enabled=true")
    assert name not in rows(checked, packed)[BOTH, UPDATE]


def test_a_float32_teacher_has_attention_without_a_fused_kernel(
    checked: Checked,
) -> None:
    apart = "policy.sequence_packing.enabled=false policy.precision=float32 "
    apart += "teacher.sequence_packing.enabled=false teacher.precision=float32 "
    found = {}
    for context in (1, 2):
        sizes = f"teacher.dtensor_cfg.context_parallel_size={context} "
        sizes += "policy.dtensor_cfg.context_parallel_size=1"
        teacher = rows(checked, f"{DISTILLATION} {apart}{sizes}")["teacher", "forward"]
        found[context] = teacher.get("teacher's activations", 0)
    # Two matrices of a row by a row for each of its heads of this rank.
    assert found[1] + teacher["teacher's logits"] > 2 * 4 * ROW * ROW
    assert found[1] > 10 * found[2]
