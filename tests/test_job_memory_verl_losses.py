"""The bytes of verl's losses in Megatron, counted on its own functions."""

from __future__ import annotations

import ast
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
from memory_ranks import Counted

from pytest_gkd.job.frameworks.verl.megatron_plan import LOSSES, REFERENCED, SCORED

VERL = Path(os.environ.get("GKD_UPSTREAM", ""), "verl-project+verl/verl")
FUNCTIONS = {
    "utils/megatron/tensor_parallel.py": (
        *("_VocabParallelEntropy", "vocab_parallel_entropy"),
        "vocab_parallel_log_probs_from_logits",
    ),
    "trainer/distillation/megatron/losses.py": (
        *("vocab_parallel_log_softmax", "_VocabParallelKLDivergence"),
    ),
    "workers/engine/megatron/transformer_impl.py": ("_lm_head_logits_processor",),
}
TOKENS, VOCAB, TOP = 256, 4096, 8


@pytest.fixture
def verl(monkeypatch: Any, tmp_path: Path) -> Iterator[Any]:
    """verl's functions by name, in a group of one rank."""
    if not all((VERL / path).is_file() for path in FUNCTIONS):
        pytest.skip("GKD_UPSTREAM has no verl")
    state = pytest.importorskip("megatron.core.parallel_state")
    import torch
    from torch import distributed

    def whole(**_: Any) -> Any:
        # The compiled kernel of CUDA makes no product of its two tensors.
        return lambda _: lambda a, b: torch.einsum("...v,...v->...", a, b)[..., None]

    monkeypatch.setattr(torch, "compile", whole)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    space: dict[str, Any] = {
        "torch": torch,
        "dist": distributed,
        "mpu": state,
        "Optional": Optional,
        "Callable": Any,
        "TensorDict": Any,
    }
    for path, names in FUNCTIONS.items():
        for node in ast.walk(ast.parse((VERL / path).read_text("utf-8"))):
            if getattr(node, "name", "") in names:
                text = textwrap.dedent(ast.unparse(node))
                exec(compile(text, path, "exec"), space)  # noqa: S102 - verl's own
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    state.initialize_model_parallel()
    yield SimpleNamespace(**space)
    state.destroy_model_parallel()
    distributed.destroy_process_group()


def most(verl: Any, *, topk: bool, entropy: bool, trains: bool) -> float:
    """The bytes for each token and entry of the vocabulary at the worst moment."""
    import torch

    hidden, head = (
        torch.randn(size, dtype=torch.bfloat16, requires_grad=trains)
        for size in ((1, TOKENS, 8), (8, VOCAB))
    )
    chosen = torch.randint(0, VOCAB, (1, TOKENS, TOP))
    probabilities = torch.randn(1, TOKENS, TOP).log_softmax(-1)
    engine = SimpleNamespace(entropy_from_logits_with_chunking=False)

    def distilled(student_logits: Any, **_: Any) -> dict[str, Any]:
        loss = verl._VocabParallelKLDivergence.apply
        return {"kl": loss(student_logits, probabilities, chosen, None)[0]}

    counted = Counted([])
    with counted.mode(), torch.set_grad_enabled(trains):
        found = verl._lm_head_logits_processor(
            SimpleNamespace(engine_config=engine),
            (hidden @ head).float(),  # transformer/module.py, Float16Module
            chosen[..., 0],
            torch.ones(1, TOKENS),
            calculate_sum_pi_squared=False,
            calculate_entropy=entropy,
            distillation_use_topk=topk,
            distillation_only=False,
            logits_processor_func=distilled,
            batch={},
            data_format="thd",
        )
        loss = sum(one.sum() for one in found.values())
        del found
        if trains:
            loss.backward()
    return counted.most / (TOKENS * VOCAB)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("kind", ["logprob", "topk"])
@pytest.mark.parametrize("entropy", [False, True])
def test_an_update_holds_what_is_planned(verl: Any, kind: str, entropy: bool) -> None:
    found = most(verl, topk=kind == "topk", entropy=entropy, trains=True)
    assert LOSSES[kind][entropy] == pytest.approx(found, rel=0.03)


@pytest.mark.needs("torch")
@pytest.mark.parametrize(("entropy", "planned"), [(False, REFERENCED), (True, SCORED)])
def test_a_forward_pass_holds_what_is_planned(
    verl: Any, entropy: bool, planned: int
) -> None:
    found = most(verl, topk=False, entropy=entropy, trains=False)
    assert planned == pytest.approx(found, rel=0.03)
