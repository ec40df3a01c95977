"""The trainer and the teacher on tiny models made here: weights, reference, steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.gkd import batch, optimizer
from pytest_gkd.workload.gkd.batch import Sequence
from pytest_gkd.workload.gkd.optimizer import Optimizer, must_move
from pytest_gkd.workload.gkd.step import judge_steps
from pytest_gkd.workload.gkd.teacher import Teacher
from pytest_gkd.workload.gkd.teacher_targets import (
    TeacherFull,
    TeacherTopK,
    check_answer,
)
from pytest_gkd.workload.gkd.trainer import Trainer
from pytest_gkd.workload.sync import digest

VOCAB = 512
SEQUENCES = [
    Sequence((7, 8, 9), (10, 11, 12, 13, 14)),
    Sequence((20, 21, 22, 23, 24, 25), (30, 31)),
    Sequence((5,), (6, 300, 511, 0)),
]


def make(directory: Path, *, seed: int, tied: bool, hidden: int = 64) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    base = tmp_path_factory.mktemp("models")
    # Models this small gain nothing from threads, and on a busy machine OpenMP's
    # waiting for each other makes them ten times slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {
        "tied": make(base / "tied", seed=1, tied=True),
        "untied": make(base / "untied", seed=2, tied=False),
        "teacher": make(base / "teacher", seed=3, tied=False, hidden=96),
    }
    torch.set_num_threads(threads)


@pytest.fixture
def trainer(models: dict[str, Path]) -> Trainer:
    return Trainer(models["tied"])


@pytest.fixture(scope="module")
def teacher(models: dict[str, Path]) -> Teacher:
    return Teacher(str(models["teacher"]))


def digests(trainer: Trainer) -> dict[str, str]:
    return digest.digests(dict(trainer.named_tensors()))


def in_checkpoint(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(directory / "model.safetensors")
    return found


# -- weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_tensors_have_the_names_and_values_of_the_checkpoint(
    models: dict[str, Path], which: str
) -> None:
    stored = in_checkpoint(models[which])
    tensors = dict(Trainer(models[which]).named_tensors())
    assert set(tensors) == set(stored)
    assert ("lm_head.weight" in tensors) == (which == "untied")
    assert all(tensors[name].equal(stored[name]) for name in stored)


def test_experts_that_transformers_fuses_keep_their_checkpoint_names(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    stored = in_checkpoint(tmp_path)
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in stored
    tensors = dict(Trainer(tmp_path).named_tensors())
    assert set(tensors) == set(stored)
    assert all(tensors[name].equal(stored[name]) for name in stored)


def test_parameter_info_describes_the_tensors_in_their_order(trainer: Trainer) -> None:
    described = trainer.parameter_info()
    named = list(trainer.named_tensors())
    assert [entry[0] for entry in described] == [name for name, _ in named]
    assert [entry[2] for entry in described] == [list(t.shape) for _, t in named]
    assert {entry[1] for entry in described} == {"float32"}
    assert json.loads(json.dumps(described)) == [list(entry) for entry in described]


def test_perturbing_changes_every_digest_and_restoring_brings_them_back(
    trainer: Trainer,
) -> None:
    before = digests(trainer)
    trainer.snapshot()
    trainer.perturb(seed=1)
    after = digests(trainer)
    assert not [name for name in before if before[name] == after[name]]
    assert trainer.nonfinite() == []
    trainer.restore()
    assert digests(trainer) == before


def test_a_seed_stands_for_one_perturbation(models: dict[str, Path]) -> None:
    changed = []
    for seed in (1, 1, 2):
        trainer = Trainer(models["tied"])
        trainer.perturb(seed=seed)
        changed.append(digests(trainer))
    assert changed[0] == changed[1]
    assert not [name for name in changed[0] if changed[0][name] == changed[2][name]]


def test_every_tensor_moves_in_bfloat16_too(models: dict[str, Path]) -> None:
    trainer = Trainer(models["tied"], dtype="bfloat16")
    assert {dtype for _, dtype, _ in trainer.parameter_info()} == {"bfloat16"}
    before = digests(trainer)
    trainer.perturb(seed=1)
    after = digests(trainer)
    assert not [name for name in before if before[name] == after[name]]


def test_restoring_without_a_snapshot_says_so(trainer: Trainer) -> None:
    with pytest.raises(RuntimeError, match="no snapshot"):
        trainer.restore()


def test_weights_that_are_not_finite_are_named(trainer: Trainer) -> None:
    poison(trainer)
    assert trainer.nonfinite() == ["model.layers.1.mlp.up_proj.weight"]


def test_a_checkpoint_that_lacks_weights_is_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    stored = in_checkpoint(models["tied"])
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = (models["tied"] / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(StageFault, match=r"layers\.1\.mlp\.up_proj") as caught:
        Trainer(tmp_path)
    assert caught.value.cause == "checkpoint.mismatch"


# -- the reference ---------------------------------------------------------------------


def test_greedy_output_of_the_same_weights_agrees_and_of_others_does_not(
    trainer: Trainer,
) -> None:
    prompt = [5, 6, 7, 8]
    response = generate(trainer, prompt)
    check = trainer.check_greedy(prompt, response)
    assert check.agree
    assert (check.positions, check.max_logprob_gap) == (12, 0.0)
    trainer.perturb(seed=1)
    assert not trainer.check_greedy(prompt, response).agree
    assert generate(trainer, prompt) != response


def test_one_altered_token_disagrees_at_its_position(trainer: Trainer) -> None:
    prompt = [5, 6, 7, 8]
    response = generate(trainer, prompt)
    altered = [*response[:4], (response[4] + 1) % VOCAB, *response[5:]]
    check = trainer.check_greedy(prompt, altered)
    assert check.disagreements[0] == 4
    assert (check.expected, check.found) == (response[4], altered[4])


def generate(trainer: Trainer, prompt: list[int]) -> list[int]:
    import torch

    ids = trainer.model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    out: list[int] = ids[0, len(prompt) :].tolist()
    return out


# -- the teacher -----------------------------------------------------------------------


def test_topk_are_the_best_of_the_full_distribution(teacher: Teacher) -> None:
    import numpy as np

    top, full = teacher.topk(SEQUENCES, 8), teacher.full(SEQUENCES)
    assert top.logprobs.shape == top.ids.shape == (3, 5, 8)
    assert (top.logprobs.dtype, top.ids.dtype) == (np.float32, np.int64)
    assert full.logprobs.shape == (3, 5, VOCAB)
    assert top.mask.sum(1).tolist() == [5, 2, 4]
    best = np.sort(full.logprobs, -1)[..., ::-1][..., :8]
    assert np.allclose(top.logprobs[top.mask], best[top.mask])
    total = np.exp(full.logprobs[full.mask]).sum(-1)
    assert np.allclose(total, 1.0, atol=1e-5)


def test_padding_does_not_change_what_the_teacher_says(teacher: Teacher) -> None:
    import numpy as np

    together = teacher.full(SEQUENCES).logprobs
    for row, sequence in enumerate(SEQUENCES):
        alone = teacher.full([sequence]).logprobs[0]
        assert np.allclose(together[row, : len(alone)], alone, atol=1e-4)


def test_logits_are_those_that_predict_the_response(teacher: Teacher) -> None:
    import numpy as np
    import torch

    sequence = SEQUENCES[1]
    ids = torch.tensor([sequence.prompt_ids + sequence.response_ids])
    with torch.no_grad():
        plain = teacher.model(ids).logits[0].log_softmax(-1).numpy()
    start = len(sequence.prompt_ids) - 1
    found = teacher.full([sequence]).logprobs[0]
    assert np.allclose(found, plain[start:-1], atol=1e-4)


def test_rows_that_only_the_teacher_has_can_be_left_out(teacher: Teacher) -> None:
    import numpy as np

    assert teacher.topk(SEQUENCES, 9999).ids.shape[-1] == VOCAB
    cut = teacher.topk(SEQUENCES, 9999, vocab_size=300)
    assert cut.ids.shape[-1] == 300
    assert cut.ids.max() == 299
    assert np.allclose(np.exp(cut.logprobs[cut.mask]).sum(-1), 1.0, atol=1e-5)


def test_a_token_id_outside_the_embedding_is_named(
    teacher: Teacher, trainer: Trainer
) -> None:
    for fails in (
        lambda: teacher.topk([Sequence((1,), (VOCAB,))], 4),
        lambda: trainer.check_greedy([VOCAB], [1]),
    ):
        with pytest.raises(StageFault, match="token id 512") as caught:
            fails()
        assert caught.value.cause == "tokenizer.vocab-mismatch"


# -- steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["tied", "untied"])
@pytest.mark.parametrize("loss", ["topk", "full"])
def test_steps_on_one_batch_lower_the_loss(
    models: dict[str, Path], teacher: Teacher, which: str, loss: str
) -> None:
    trainer = Trainer(models[which])
    signal = teacher.topk(SEQUENCES, 64) if loss == "topk" else teacher.full(SEQUENCES)
    reports = [trainer.gkd_step(SEQUENCES, signal) for _ in range(3)]
    judge_steps(reports)
    first = reports[0]
    assert first.tokens == 11
    assert first.parameters == len(trainer.parameter_info())
    assert first.parameters_with_grad == first.parameters_moved == first.parameters
    assert not first.zero_grads


def test_micro_batches_give_the_loss_and_gradient_of_the_whole_batch(
    models: dict[str, Path], teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal = teacher.topk(SEQUENCES, 16)
    whole = Trainer(models["tied"]).gkd_step(SEQUENCES, signal)
    monkeypatch.setattr(batch, "MAX_LOGITS", 1)
    parts = Trainer(models["tied"]).gkd_step(SEQUENCES, signal)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    split = teacher.topk(SEQUENCES, 16)
    assert (split.mask == signal.mask).all()
    monkeypatch.undo()
    again = Trainer(models["tied"]).gkd_step(SEQUENCES, split)
    assert again.loss == pytest.approx(whole.loss, rel=1e-4)


def test_topk_over_the_whole_vocabulary_equals_the_full_forward_kl(
    models: dict[str, Path], teacher: Teacher
) -> None:
    sparse = Trainer(models["tied"]).gkd_step(
        SEQUENCES, teacher.topk(SEQUENCES, VOCAB, temperature=2.0), temperature=2.0
    )
    full = Trainer(models["tied"]).gkd_step(
        SEQUENCES, teacher.full(SEQUENCES), beta=0.0, temperature=2.0
    )
    assert sparse.loss == pytest.approx(full.loss, rel=1e-4)
    assert sparse.grad_norm == pytest.approx(full.grad_norm, rel=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_work_in_half_precision(
    models: dict[str, Path], teacher: Teacher, dtype: str
) -> None:
    trainer = Trainer(models["tied"], dtype=dtype)
    signal = teacher.topk(SEQUENCES, 64)
    reports = [trainer.gkd_step(SEQUENCES, signal) for _ in range(3)]
    judge_steps(reports)


def test_a_frozen_model_has_no_gradient(trainer: Trainer, teacher: Teacher) -> None:
    trainer.model.requires_grad_(requires_grad=False)
    signal = teacher.topk(SEQUENCES, 8)
    report = trainer.gkd_step(SEQUENCES, signal)
    assert report.frozen == report.parameters
    assert report.parameters_with_grad == report.parameters_moved == 0
    assert cause_of(report, report) == "train.no-grad"


@pytest.mark.parametrize("gradient", ["none", "zero"])
def test_a_layer_that_learns_nothing_is_named_and_does_not_move(
    trainer: Trainer, teacher: Teacher, gradient: str
) -> None:
    layer = trainer.model.model.layers[1].mlp
    layer.register_forward_hook(
        lambda module, given, made: made.detach() if gradient == "none" else made * 0
    )
    report = trainer.gkd_step(SEQUENCES, teacher.topk(SEQUENCES, 8))
    assert sorted(report.zero_grads) == [
        f"model.layers.1.{name}.weight"
        for name in (
            "mlp.down_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "post_attention_layernorm",
        )
    ]
    assert report.parameters_moved == report.parameters - 4
    assert cause_of(report, report) == "train.no-grad"


def test_modules_that_take_no_part_and_frozen_ones_are_no_fault(
    trainer: Trainer, teacher: Teacher
) -> None:
    import torch

    trainer.model.vision_tower = torch.nn.Linear(4, 4)
    trainer.model.model.norm.requires_grad_(requires_grad=False)
    signal = teacher.topk(SEQUENCES, 64)
    reports = [trainer.gkd_step(SEQUENCES, signal) for _ in range(3)]
    judge_steps(reports)
    assert (reports[0].unused, reports[0].frozen) == (2, 1)


def test_one_nan_weight_is_named_and_the_others_are_not_spoilt(
    trainer: Trainer, teacher: Teacher
) -> None:
    poison(trainer)
    before = digests(trainer)
    report = trainer.gkd_step(SEQUENCES, teacher.topk(SEQUENCES, 8))
    assert report.nonfinite_parameters == ["model.layers.1.mlp.up_proj.weight"]
    assert report.nonfinite_grads
    assert digests(trainer) == before
    assert cause_of(report, report) == "train.nan"


def test_a_teacher_of_nan_is_blamed(trainer: Trainer, teacher: Teacher) -> None:
    signal = teacher.topk(SEQUENCES, 8)
    signal.logprobs[0, 0, 3] = float("nan")
    report = trainer.gkd_step(SEQUENCES, signal)
    assert report.nonfinite_teacher == 1
    assert report.nonfinite_parameters == []
    assert cause_of(report, report) == "train.nan"


def test_a_learning_rate_of_zero_moves_nothing(
    models: dict[str, Path], teacher: Teacher
) -> None:
    trainer = Trainer(models["tied"], learning_rate=0.0)
    report = trainer.gkd_step(SEQUENCES, teacher.topk(SEQUENCES, 8))
    assert report.parameters_with_grad == report.parameters
    assert report.parameters_moved == 0
    assert cause_of(report, report) == "train.no-grad"


def test_a_learning_rate_that_is_far_too_high_diverges(
    models: dict[str, Path], teacher: Teacher
) -> None:
    trainer = Trainer(models["tied"], learning_rate=10.0)
    signal = teacher.topk(SEQUENCES, 64)
    reports = [trainer.gkd_step(SEQUENCES, signal) for _ in range(3)]
    assert cause_of(reports[0], reports[-1]) == "train.diverged"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameters_that_an_optimizer_lacks_are_named(
    models: dict[str, Path], teacher: Teacher, dtype: str
) -> None:
    trainer = Trainer(models["tied"], dtype=dtype)
    signal = teacher.topk(SEQUENCES, 64)
    assert trainer.gkd_step(SEQUENCES, signal).unmoved == []
    assert trainer.optimizer is not None
    held = trainer.optimizer.adamw.param_groups[0]["params"]
    matrices = [n for n, p in enumerate(held) if p.dim() == 2]
    names = [name for name, _ in trainer.model.named_parameters()]
    for number in reversed(matrices[1::2]):
        del held[number]
    report = trainer.gkd_step(SEQUENCES, signal)
    assert report.unmoved == [names[number] for number in matrices[1::2]]
    assert cause_of(report, report) == "train.no-grad"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_updates_below_a_16_bit_parameters_spacing_add_up(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(4, 1, bias=False, dtype=getattr(torch, dtype))
    torch.nn.init.ones_(layer.weight)
    optimizer = Optimizer(layer, 1e-4)
    for _ in range(100):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    assert layer.weight.detach().float().tolist() == [
        pytest.approx([0.99] * 4, abs=4e-3)
    ]


def test_a_gpu_without_room_for_float32_copies_goes_without_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    on_gpu = SimpleNamespace(
        dtype=torch.bfloat16, is_cuda=True, device="cuda:0", numel=lambda: 1 << 20
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 20)
    for free, told in ((14 << 20, ""), (13 << 20, "16 MiB and 15 MiB are free")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, f=free: (f, 99))
        assert told in optimizer.no_room([on_gpu])
        assert bool(optimizer.no_room([on_gpu])) == bool(told)
    assert optimizer.no_room([torch.ones(4, dtype=torch.bfloat16)]) == ""


def test_an_update_that_rounds_to_nothing_is_no_fault() -> None:
    torch = pytest.importorskip("torch")
    for dtype, expected in ((torch.bfloat16, False), (torch.float32, True)):
        norm = torch.ones(64, dtype=dtype, requires_grad=True)
        norm.grad = torch.full_like(norm, 0.5)
        assert must_move(norm, 1e-3) is expected
    near_zero = torch.full((64,), 1e-4, dtype=torch.bfloat16, requires_grad=True)
    near_zero.grad = torch.full_like(near_zero, 0.5)
    assert must_move(near_zero, 1e-3)
    near_zero.grad.zero_()
    assert not must_move(near_zero, 1e-3)


def test_restoring_forgets_the_optimizers_momentum(
    trainer: Trainer, teacher: Teacher
) -> None:
    signal = teacher.topk(SEQUENCES, 64)
    trainer.snapshot()
    once = [trainer.gkd_step(SEQUENCES, signal).loss for _ in range(3)]
    trainer.restore()
    again = [trainer.gkd_step(SEQUENCES, signal).loss for _ in range(3)]
    assert again == pytest.approx(once, rel=1e-6)


def test_arrays_from_shared_memory_may_be_read_only(
    trainer: Trainer, teacher: Teacher
) -> None:
    signal = teacher.topk(SEQUENCES, 8)
    for array in (signal.logprobs, signal.ids, signal.mask):
        array.flags.writeable = False
    trainer.gkd_step(SEQUENCES, TeacherTopK(signal.logprobs, signal.ids, signal.mask))


def poison(trainer: Trainer) -> None:
    weight = trainer.model.model.layers[1].mlp.up_proj.weight
    weight.data[3, 5] = float("nan")


def cause_of(first: Any, last: Any) -> str | None:
    with pytest.raises(StageFault) as caught:
        judge_steps([first, last])
    return caught.value.cause


# -- the teacher's answer --------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_a_teachers_own_answer_is_accepted(
    models: dict[str, Path], dtype: str, temperature: float
) -> None:
    asked = Teacher(str(models["teacher"]), dtype=dtype)
    few = asked.topk(SEQUENCES, 8, temperature=temperature)
    all_of_it = asked.full(SEQUENCES, vocab_size=VOCAB - 12)
    for signal in (few, all_of_it):
        assert answered(asked, signal, temperature) is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_teachers_answer_in_the_wrong_place_is_found(
    models: dict[str, Path], dtype: str
) -> None:
    import numpy as np

    asked = Teacher(str(models["teacher"]), dtype=dtype)
    few, all_of_it = asked.topk(SEQUENCES, 8), asked.full(SEQUENCES)
    for shift, word in ((1, "late"), (-1, "early")):
        logprobs, ids = (np.roll(a, shift, axis=1) for a in (few.logprobs, few.ids))
        moved = np.roll(all_of_it.logprobs, shift, axis=1)
        for signal in (
            TeacherTopK(logprobs, ids, few.mask),
            TeacherFull(moved, few.mask),
        ):
            with pytest.raises(StageFault, match=f"stand one token {word}") as caught:
                answered(asked, signal)
            assert caught.value.cause == "teacher.wrong-output"


def test_a_teachers_answer_of_another_temperature_or_of_poor_tokens_is_found(
    teacher: Teacher,
) -> None:
    hot = teacher.topk(SEQUENCES, 8, temperature=3.0)
    with pytest.raises(StageFault, match="of temperature 3, not 1"):
        answered(teacher, TeacherTopK(hot.logprobs, hot.ids, hot.mask))
    whole = teacher.topk(SEQUENCES, VOCAB)
    poor = (whole.logprobs[..., 5:10], whole.ids[..., 5:10])
    with pytest.raises(StageFault, match="those of a forward pass"):
        answered(teacher, TeacherTopK(*poor, whole.mask))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_model_that_ends_in_float32_is_judged_by_the_dtype_it_computes_in(
    models: dict[str, Path], temperature: float
) -> None:
    # As the classes of Nemotron-H, Mamba and Mllama do.
    asked = in_float32_at_the_end(Teacher(str(models["teacher"]), dtype="bfloat16"))
    signal = asked.topk(SEQUENCES, 8, temperature=temperature)
    rounded = TeacherTopK(signal.logprobs + 0.05, signal.ids, signal.mask, temperature)
    assert answered(asked, rounded, temperature) == pytest.approx(0.05, abs=0.02)
    student = in_float32_at_the_end(Trainer(models["tied"], dtype="bfloat16"))
    assert student.check_greedy([7, 8, 9], [10, 11]).tolerance >= 0.15


def in_float32_at_the_end(owner: Any) -> Any:
    def widen(module: Any, given: Any, made: Any) -> Any:
        made.logits = made.logits.float()
        return made

    owner.model.register_forward_hook(widen)
    return owner


def test_a_teacher_is_judged_by_its_shortest_prompt_and_few_logits(
    teacher: Teacher,
) -> None:
    rows = [
        Sequence(tuple(range(1, 61)), tuple(range(100, 130))),
        Sequence((3, 4, 5), tuple(range(200, 220))),
        Sequence((9,), (10, 11)),
    ]
    signal = teacher.topk(rows, 8)
    shapes = []
    handle = teacher.model.register_forward_hook(
        lambda module, given, named, made: shapes.append(
            (tuple(named["input_ids"].shape), tuple(made.logits.shape))
        ),
        with_kwargs=True,
    )
    try:
        found = check_answer(teacher, rows, signal, temperature=1.0, vocab_size=VOCAB)
    finally:
        handle.remove()
    assert found is not None
    # Three tokens of the prompt, and the fifteen that the sixteenth follows.
    assert shapes == [((1, 18), (1, 16, VOCAB))]


def test_a_teachers_answer_of_nan_is_left_to_the_step(teacher: Teacher) -> None:
    signal = teacher.topk(SEQUENCES, 8)
    signal.logprobs[0, 0, 3] = float("nan")
    assert answered(teacher, signal) is None


def answered(teacher: Teacher, signal: Any, temperature: float = 1.0) -> float | None:
    rows = signal.logprobs.shape[-1] if isinstance(signal, TeacherFull) else VOCAB
    return check_answer(
        teacher, SEQUENCES, signal, temperature=temperature, vocab_size=rows
    )
