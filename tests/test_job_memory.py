"""The memory plan of a job: others' published figures, and real allocations."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import memory_page
import pytest
from memory_ranks import Counted
from test_estimate import HALF_B, QWEN_7B, QWEN_14B, Shape, sparse

from pytest_gkd.__main__ import main
from pytest_gkd.job import engine_memory, fitting, memory, models, training_memory
from pytest_gkd.job.engine_memory import GIB, Engine
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.memory import Job
from pytest_gkd.job.models import Layer, Model
from pytest_gkd.job.training_memory import Trainer

LLAMA_8B = Shape(4096, 32, 32, 8, 14_336, 128_256)
LAYER = Layer(1, 1, 1, 1)
OF_7_5B = Model(
    path="",
    elements=7_500_000_000,
    stored_bytes=0,
    is_quantized=False,
    vocab=1,
    width=1,
    embedding=1,
    head=0,
    largest=1,
    layers=(LAYER,),
    end=LAYER,
    cached=((1, 0),),
    matrices=1,
    is_rough=False,
)
SCRIPT = """\
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
  actor_rollout_ref.model.path={student} \\
  distillation.teacher_models.teacher_model.model_path={teacher} \\
  distillation.enabled=True distillation.nnodes=1 distillation.n_gpus_per_node=2 \\
  distillation.distillation_loss.loss_mode=forward_kl_topk \\
  data.max_prompt_length=1024 data.max_response_length=8192 data.train_batch_size=64 \\
  actor_rollout_ref.actor.use_dynamic_bsz=True \\
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=36864 \\
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \\
  actor_rollout_ref.rollout.name=vllm \\
  trainer.nnodes=1 trainer.n_gpus_per_node=4 "$@"
"""


def shape(path: Path, of: Shape, **config: Any) -> Path:
    return sparse(path, of, intermediate_size=of.intermediate, **config)


@pytest.mark.parametrize(
    ("sharding", "gigabytes"), [("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)]
)
def test_the_figures_of_zeros_paper(sharding: str, gigabytes: float) -> None:
    # arXiv 1910.02054, figure 1: 7.5 billion weights, 64 ranks.
    parts = training_memory.resident(
        Trainer(OF_7_5B, gpus=64, sharding=sharding), "update"
    )
    assert sum(parts.values()) / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_a_llama_8b_keeps_128_kib_of_a_token(tmp_path: Path) -> None:
    model = models.read(shape(tmp_path / "m", LLAMA_8B))
    assert model.cache_bytes(16, "bfloat16") == 16 * 131_072


def test_a_head_that_is_a_copy_counts_once(tmp_path: Path) -> None:
    own = models.read(shape(tmp_path / "own", HALF_B))
    tied = models.read(shape(tmp_path / "tied", HALF_B, tie_word_embeddings=True))
    assert own.elements - tied.elements == HALF_B.vocab * HALF_B.hidden
    assert (tied.head, own.head) == (0, own.embedding)


def test_a_window_bounds_what_a_layer_keeps(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 12
    windows = {"layer_types": kinds, "sliding_window": 1024}
    model = models.read(shape(tmp_path / "m", HALF_B, **windows))
    plain = models.read(shape(tmp_path / "plain", HALF_B))
    whole = plain.cache_bytes(8192, "bfloat16")
    assert model.cache_bytes(8192, "bfloat16") == whole * (8192 + 1024) // (2 * 8192)


def test_quantised_weights_are_taken_as_they_are(tmp_path: Path) -> None:
    stored = {"quantization_config": {"quant_method": "fp8"}}
    model = models.read(sparse(tmp_path / "m", HALF_B, "F32", **stored))
    assert model.loaded_bytes("bfloat16") == 4 * model.elements


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"config\.json"):
        models.read(tmp_path)
    path = shape(tmp_path / "m", HALF_B)
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckError, match="bytes after its tensors"):
        models.read(path)


def totals(job: Job) -> dict[str, int]:
    return {row.phase: row.total for row in memory.plan(job)}


def test_verls_offload_lowers_the_rollout_and_not_the_update(tmp_path: Path) -> None:
    model = models.read(shape(tmp_path / "m", QWEN_7B))
    trainer = Trainer(model, gpus=8, tokens=8192)
    engine = Engine(model, gpus=8, tensor=2, length=8192, sleeps=True)
    job = Job(trainer, engine, memory=80 * GIB)
    away: Any = {"offload_weights": "between", "offload_states": "between"}
    moved = dataclasses.replace(job, trainer=dataclasses.replace(trainer, **away))
    before, after = totals(job), totals(moved)
    assert after["rollout"] < before["rollout"]
    for phase in ("forward and backward", "optimizer step"):
        assert after[phase] == before[phase]


def test_deferred_reduction_keeps_whole_gradients(tmp_path: Path) -> None:
    model = models.read(shape(tmp_path / "m", QWEN_7B))
    found = []
    for sharding in ("fsdp", "fsdp2"):
        trainer = Trainer(model, 8, sharding, tokens=4096, micro_batches=2, keeps=True)
        synced = dataclasses.replace(trainer, keeps=False)
        phase = "forward and backward"
        found.append(totals(Job(trainer))[phase] - totals(Job(synced))[phase])
    # Shards of them, 4 bytes on 8 ranks, come as the whole ones go.
    shard = 4 * model.elements // 8
    assert found == [2 * model.elements - shard, 4 * model.elements - shard]


@pytest.mark.parametrize(
    "text", ["memory=7x", "memory", "gpus=0", "cards=2", "nodes=1,nodes=2", "memory=0"]
)
def test_a_machine_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(CheckError, match="expected for example"):
        fitting.machine(text)


def test_a_machine_is_read() -> None:
    found = fitting.machine("nodes=2, gpus=8,memory=79.5GiB")
    assert found == fitting.Machine(2, 8, 159 * GIB // 2)


def check(capsys: Any, script: Path, *given: str) -> tuple[int, dict[str, Any]]:
    status = main(["check", str(script), *given, "--format=json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_job_that_does_not_fit_is_told_the_change_with_which_it_does(
    tmp_path: Path, capsys: Any
) -> None:
    paths = {
        "student": shape(tmp_path / "student", QWEN_7B),
        "teacher": shape(tmp_path / "teacher", QWEN_14B),
    }
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(**paths))
    machine = "--machine=memory=79.1GiB"
    status, found = check(capsys, script, machine)
    bad = [row for row in found["memory"] if row["verdict"] == "does-not-fit"]
    assert status == 1
    assert [row["phase"] for row in bad] == ["forward and backward"]
    for row in found["memory"]:
        assert sum(row["bytes"].values()) == row["total"]
    (told,) = [one for one in found["findings"] if one["level"] == "error"]
    assert told["cause"] == "cuda.oom"
    change = told["message"].split("With ")[1].split(" ")[0]
    assert change == "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432"
    status, found = check(capsys, script, change, machine)
    assert status == 0
    assert "does-not-fit" not in {row["verdict"] for row in found["memory"]}


def test_no_advice_asks_for_more_gpus_than_there_are(
    tmp_path: Path, capsys: Any
) -> None:
    model = shape(tmp_path / "model", QWEN_7B)
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(student=model, teacher=model))
    told = {}
    for place in ("", ",nodes=1,gpus=6"):
        _, found = check(capsys, script, f"--machine=memory=40GiB{place}")
        bad = [one for one in found["findings"] if one["cause"] == "cuda.oom"]
        told[place] = bad[0]["message"]
    assert "trainer.nnodes" in told[""]
    assert "trainer.nnodes" not in told[",nodes=1,gpus=6"]


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ((), [""]),
        (
            (
                "+distillation.teacher_models.math.model_path={teacher}",
                "+distillation.teacher_models.code.model_path={teacher}",
            ),
            ["code", "math"],
        ),
    ],
)
def test_advice_names_each_teacher(
    tmp_path: Path, capsys: Any, given: tuple[str, ...], keys: list[str]
) -> None:
    student = shape(tmp_path / "student", HALF_B)
    teacher = shape(tmp_path / "teacher", QWEN_14B)
    script = tmp_path / "run.sh"
    text = SCRIPT.format(student=student, teacher=teacher).replace("36864", "9216")
    if given:
        text = re.sub(r"  distillation\.teacher_models.*\n", "", text)
    script.write_text(text)
    more = [one.format(teacher=teacher) for one in given]
    _, found = check(capsys, script, "--machine=memory=24GiB", *more)
    every = [one["message"] for one in found["findings"]]
    told = [one for one in every if one.startswith("teacher does not fit")]
    assert told
    key = "distillation.teacher_models.{}.inference."
    wanted = [f"++{key.format(k)}" if k else key.format("teacher_model") for k in keys]
    for one in told:
        advice = one.split("With ")[1]
        assert all(f" {key}" in f" {advice}" for key in wanted)
        assert "NAME" not in advice
        assert "*" not in advice


def test_what_a_tower_keeps_is_said_not_to_be_counted(
    tmp_path: Path, capsys: Any
) -> None:
    script = tmp_path / "run.sh"
    for number, (tower, count) in enumerate(
        (({}, 0), ({"vision_config": {"a": 1}}, 1))
    ):
        made = shape(tmp_path / f"m{number}", HALF_B, **tower)
        script.write_text(SCRIPT.format(student=made, teacher=made))
        _, found = check(capsys, script)
        said = [one["message"] for one in found["findings"]]
        assert len([one for one in said if "vision or audio tower" in one]) == count
        assert found["memory"]


def test_more_gpus_than_the_machine_has_are_told(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(student="a/b", teacher="a/b"))
    for gpus, causes in ((4, ["ray.no-resources"]), (6, [])):
        status, found = check(capsys, script, f"--machine=gpus={gpus}")
        assert [one["cause"] for one in found["findings"]] == causes
        assert status == (gpus == 4)


def test_gpus_alone_may_be_those_of_each_node(tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "run.sh"
    more = "trainer.nnodes=2"
    script.write_text(SCRIPT.format(student="a/b", teacher="a/b"))
    for machine, causes in (("gpus=8", []), ("nodes=1,gpus=8", ["ray.no-resources"])):
        _, found = check(capsys, script, f"--machine={machine}", more)
        told = {one["cause"] for one in found["findings"]}
        assert told & {"ray.no-resources"} == set(causes)


def test_without_a_model_or_a_machine_it_is_said_once(
    tmp_path: Path, capsys: Any
) -> None:
    script = tmp_path / "run.sh"
    made = shape(tmp_path / "m", HALF_B)
    script.write_text(SCRIPT.format(student=made, teacher="Qwen/Qwen3-8B"))
    status, found = check(capsys, script)
    assert (status, found["findings"], found["memory"]) == (0, [], [])
    assert found["no_memory_plan"].startswith("the teacher is Qwen/Qwen3-8B")
    script.write_text(SCRIPT.format(student=made, teacher=made))
    status, found = check(capsys, script)
    assert (status, found["findings"]) == (0, [])
    assert {row["verdict"] for row in found["memory"]} == {None}


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize("recompute", [False, True])
def test_attention_without_a_fused_kernel_takes_what_is_planned(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    monkeypatch.setitem(memory_page.SIZES, "vocab_size", 300)
    monkeypatch.setitem(memory_page.SIZES, "num_hidden_layers", 3)
    with sdpa_kernel([SDPBackend.MATH]):
        lines = memory_page.judged(
            *("llama", "float32", "own-topk"), recompute=recompute, plain=True
        )
    (update,) = [line for line in lines if line.what == "update"]
    # A CPU's softmax has no product of two matrices in its backward pass.
    planned = update.planned - 4 * 8 * 512 * 512
    assert planned == pytest.approx(update.measured, rel=0.05), update


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize("shared", [1, 2])
def test_a_forward_pass_without_a_fused_kernel_takes_what_is_planned(
    shared: int,
) -> None:
    import memory_ranks
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    more = {"vocab_size": 300, "num_hidden_layers": 2, "num_key_value_heads": shared}
    model, sizes = memory_ranks.made("llama", memory_ranks.SIZES | more, "float32")
    ids = torch.randint(0, 300, (2, 512))
    counted = memory_ranks.Counted([*model.eval().parameters()])
    held = sum(one.nbytes for one in model.parameters())
    with torch.no_grad(), sdpa_kernel([SDPBackend.MATH]), counted.mode():
        model(input_ids=ids, use_cache=False)
    planned = training_memory.forward_bytes(sizes, 1024, "float32", row=512)
    assert planned == pytest.approx(counted.most - held, rel=0.03)
    fused = training_memory.forward_bytes(sizes, 1024, "float32")
    assert training_memory.forward_bytes(sizes, 1024, "bfloat16", row=512) < fused


@pytest.mark.parametrize(
    ("changed", "is_plain"),
    [
        ({}, True),
        ({"compute": "bfloat16"}, False),
        ({"row": 0}, False),  # fused whatever the dtype
        ({"model": dataclasses.replace(OF_7_5B, layers=(LAYER,))}, False),
    ],
)
def test_attention_is_plain_only_in_float32_with_shared_heads(
    changed: dict[str, Any], is_plain: bool
) -> None:
    shape = models.Shape(heads=8, queries=256, keys=64)
    shared = dataclasses.replace(
        OF_7_5B, layers=(dataclasses.replace(LAYER, shape=shape),)
    )
    usual = Trainer(shared, compute="float32", tokens=64, row=32, recompute=False)
    trainer = dataclasses.replace(usual, **changed)
    name = "plain attention float32"
    most = max(one.get(name, 0) for one in training_memory.updates(trainer))
    # The softmax of 8 heads, keys and values of 256 for 64, without its sums.
    kept = 4 * 64 * (8 * 32 + 2 * (256 - 64) - 8)
    assert most == (kept + 3 * 4 * 64 * 8 * 32 if is_plain else 0)


@pytest.mark.parametrize(("row", "masks"), [(32, 1), (31, 0), (0, 0)])
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_a_row_as_long_as_the_window_has_a_mask(
    row: int, masks: int, compute: str
) -> None:
    near = models.Shape(heads=8, queries=256, keys=64, window=32)
    shapes = (near, dataclasses.replace(near, window=0))
    layers = tuple(dataclasses.replace(LAYER, shape=shape) for shape in shapes)
    model = dataclasses.replace(OF_7_5B, layers=layers)
    trainer = Trainer(model, compute=compute, tokens=64, row=row, recompute=False)
    found = training_memory.kept(trainer)
    without = training_memory.kept(dataclasses.replace(trainer, row=0))
    width = models.WIDTHS[compute]
    # The mask, and keys and values of 256 for 64.
    more = found[f"activations {compute}"] - without[f"activations {compute}"]
    assert more == masks * 64 * (32 + 2 * (256 - 64)) * width
    softmax = 4 * 64 * (8 * row + 2 * (256 - 64) - 8)
    plain = 0 if compute == "bfloat16" or not row else 2 - masks
    assert found["plain attention float32"] == plain * softmax


@pytest.mark.parametrize(
    ("release", "tokens", "width"),
    [("", 4096, 8), ("0.25.1", 4096, 8), ("0.26.0", 2048, 2), ("0.32.0", 2048, 2)],
)
def test_a_newer_vllm_scores_prompts_in_chunks(
    release: str, tokens: int, width: int
) -> None:
    engine = Engine(OF_7_5B, length=4096, scores=True, release=release)
    planned = engine_memory.scoring(engine)
    assert planned == tokens * OF_7_5B.vocab * width


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:c10d.._reduce_scatter_base_:UserWarning")
def test_the_copy_that_gloo_reduces_is_not_counted(tmp_path: Path) -> None:
    import torch
    from torch import distributed

    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        counted = Counted([])
        with counted.mode():
            whole, shard = torch.ones(1000), torch.empty(1000)
            distributed.reduce_scatter_single(shard, whole)
            parts = torch.ones(500).split(100)
        assert len(parts) == 5
        assert counted.most == whole.nbytes + shard.nbytes + 5 * parts[0].nbytes
    finally:
        distributed.destroy_process_group()


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize("recompute", [False, True])
def test_a_real_step_takes_what_is_planned(recompute: bool) -> None:
    lines = memory_page.judged("qwen2", "float32", "own-topk", recompute=recompute)
    for line in lines:
        assert abs(line.error) < 0.05, line


def made(name: str, path: Path, **sizes: Any) -> tuple[Any, Model]:
    """A small model in float32, and what the plan reads of it."""
    from transformers import AutoModelForCausalLM

    config = memory_page.made_config(name, memory_page.SIZES | sizes)
    model = AutoModelForCausalLM.from_config(config).train()
    model.save_pretrained(path)
    return model, models.read(path)


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_each_matrix_has_a_copy_of_its_input_under_autocast(
    tmp_path: Path, name: str
) -> None:
    import torch

    model, sizes = made(name, tmp_path, vocab_size=1000)
    shapes = {tuple(weight.shape) for weight in model.parameters()}
    own = {weight.data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        is_weight = (
            {tuple(tensor.shape), tuple(tensor.t().shape)} & shapes
            if (tensor.dim() == 2)
            else set()
        )
        if storage.data_ptr() not in own and not is_weight:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 1000, (3, 500))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        logits = model(input_ids=ids, use_cache=False).logits
    assert logits.shape == (3, 500, 1000)
    trainer = Trainer(
        sizes, sharding="ddp", recompute=False, tokens=1500, loss="own-topk"
    )
    planned = sum(training_memory.kept(trainer).values())
    assert planned == pytest.approx(sum(kept.values()), rel=0.02)


@pytest.mark.needs("torch", "transformers")
def test_a_tied_embedding_has_three_gradients_at_the_end(tmp_path: Path) -> None:
    import torch

    model, sizes = made("qwen2", tmp_path, vocab_size=40_000, num_hidden_layers=2)
    ids = torch.randint(0, 40_000, (1, 16))
    counted = Counted(list(model.parameters()))
    most = counted.peak(
        lambda: model(input_ids=ids, use_cache=False).logits.mean().backward()
    )
    trainer = Trainer(
        sizes, sharding="ddp", compute="float32", tokens=16, recompute=False
    )
    states = training_memory.resident(trainer, "idle")["optimizer states float32"]
    planned = max(sum(parts.values()) for parts in training_memory.updates(trainer))
    assert planned - states == pytest.approx(most, rel=0.02)


@pytest.mark.parametrize(
    ("sharding", "apart", "tied", "expected"),
    [
        # In bytes of an embedding's element: gradients of both matrices, the
        # embedding's weights, the copy that is reduced and new shards of half of it.
        ("fsdp2", ("embedding",), False, 2 + 2 + 2 + 4 + 2),
        ("fsdp2", (), False, 2 * (2 + 4 + 2)),
        ("fsdp", (), False, 2 * (2 + 4 + 2)),
        # The output matrix is done by then.
        ("fsdp2", ("embedding", "head"), False, 2 + 4 + 2),
        # Both gradients, their sum and the weights.
        ("fsdp2", ("embedding",), True, 2 + 3 * 2),
    ],
)
def test_the_end_of_an_update_reduces_what_is_in_no_layer(
    tmp_path: Path, sharding: str, apart: tuple[str, ...], tied: bool, expected: int
) -> None:
    tiny = Shape(64, 1, 2, 2, 64, vocab=100_000)
    model = models.read(shape(tmp_path / "m", tiny, tie_word_embeddings=tied))
    trainer = Trainer(
        model, gpus=2, sharding=sharding, apart=apart, micro_batches=2, loss="fused"
    )
    held = sum(training_memory.resident(trainer, "update").values())
    *_, end, last = training_memory.updates(trainer)
    if tied:  # what is reduced then is as much
        *_, end, _, last = training_memory.updates(trainer)
    most = max(sum(end.values()), sum(last.values())) - held
    assert most == pytest.approx(expected * model.embedding, rel=0.02)


def test_logits_that_are_held_are_there_at_the_end(tmp_path: Path) -> None:
    model = models.read(shape(tmp_path / "m", HALF_B))
    trainer = Trainer(model, gpus=2, sharding="fsdp2", tokens=512)
    ends = []
    for loss in ("skyrl", "fused"):
        own = dataclasses.replace(trainer, loss=loss)
        ends.append(sum(list(training_memory.updates(own))[-1].values()))
    assert ends[0] - ends[1] == 512 * HALF_B.vocab * 2


@pytest.mark.parametrize(
    ("release", "temperature", "copies"),
    [
        ("0.8.0", "0.9", 1),  # divided in place
        ("0.9.0", "1.0", 2),
        ("0.9.1", "1.0", 1),
        ("0.9.1", "0.9", 2),
    ],
)
def test_verls_logits_are_there_twice_where_the_temperature_copies_them(
    release: str, temperature: str, copies: int, tmp_path: Path, capsys: Any
) -> None:
    made = shape(tmp_path / "m", QWEN_7B)
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT.format(student=made, teacher=made))
    _, found = check(
        *(capsys, script, f"actor_rollout_ref.rollout.temperature={temperature}"),
        f"--framework=verl=={release}",
    )
    (update,) = (
        row["bytes"]
        for row in found["memory"]
        if row["phase"] == "forward and backward"
    )
    # Beside 16-bit logits, two in float32, of all tokens.
    assert update["logits and loss"] == 36_864 * QWEN_7B.vocab * (2 * copies + 8)
