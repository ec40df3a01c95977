"""The bytes of NeMo-RL's losses, counted on its own functions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import memory_nemo_rl
import pytest
from memory_page import peak_bytes

from pytest_gkd.job import loss_memory
from pytest_gkd.job.frameworks.nemo_rl import megatron_plan, plan

TOKENS, VOCAB = 512, 4096
CHUNK = 64


@pytest.fixture
def group(monkeypatch: Any, tmp_path: Path) -> Iterator[Any]:
    """A group of one rank, with NeMo-RL importable."""
    place = Path(os.environ.get("GKD_UPSTREAM", ""))
    if not all((place / root).is_dir() for root in memory_nemo_rl.ROOTS):
        pytest.skip("GKD_UPSTREAM has no NeMo-RL and Automodel")
    import torch
    from torch import distributed

    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(sys.modules)
    memory_nemo_rl.upstream()
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()
    for name in [name for name in sys.modules if name.startswith("nemo_")]:
        del sys.modules[name]
    sys.modules.update(before)


def data(rows: int) -> Any:
    """So many rows of one micro-batch."""
    import torch
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    size, top = (rows, TOKENS // rows), memory_nemo_rl.TOP
    return BatchedDataDict(
        {
            "input_ids": torch.randint(0, VOCAB, size),
            "input_lengths": torch.full(size[:1], size[1]),
            "token_mask": torch.ones(size),
            "sample_mask": torch.ones(rows),
            "teacher_topk_logits": torch.randn(*size, top),
            "teacher_topk_indices": torch.randint(0, VOCAB, (*size, top)),
        }
    )


def loss_of(kind: str) -> Any:
    """NeMo-RL's own of distillation, or of log-probabilities."""
    from nemo_rl.algorithms.loss import loss_functions

    if kind == "logprob":
        return loss_functions.NLLLossFn()
    said = SimpleNamespace(
        kl_type="mixed", mixed_kl_weight=0.5, zero_outside_topk=False
    )
    return loss_functions.DistillationLossFn(said)


def most(
    work: Callable[[Any], Any], *, trains: bool, stays: bool, is_float: bool = True
) -> float:
    """The bytes for each token and entry of the vocabulary at the worst moment, where
    the logits stay until the end or not."""
    import torch

    hidden, head = (
        torch.randn(size, dtype=torch.bfloat16, requires_grad=trains)
        for size in ((1, TOKENS, 8), (8, VOCAB))
    )

    def whole() -> None:
        with torch.set_grad_enabled(trains):
            logits = hidden @ head
            logits = logits.float() if is_float else logits
            found = work(logits)
            if not stays:
                del logits
            if trains:
                found.backward()

    return peak_bytes(whole)[0] / (TOKENS * VOCAB)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", ["topk", "logprob"])
def test_a_dtensor_policy_holds_what_is_planned(
    group: Any, kind: str, rows: int
) -> None:
    import torch
    from nemo_rl.models.automodel import train

    post = train.LossPostProcessor(
        *(loss_of(kind), {}, None, None, None, 1, 1, rows > 1)
    )
    ends = torch.arange(0, TOKENS + 1, TOKENS // rows, dtype=torch.int32)
    inputs = SimpleNamespace(flash_attn_kwargs=SimpleNamespace(cu_seqlens_q=ends))
    batch, one = data(rows), torch.tensor(1.0)
    found = most(
        lambda logits: post(logits, batch, inputs, one, one)[0],
        trains=True,
        stays=False,
    )
    packed = "packed-" * (rows > 1)
    planned = loss_memory.LOSSES[f"nemo-{packed}{kind}"][1]
    # Packed log-probabilities hold a little less, the more rows there are.
    assert planned == pytest.approx(found, rel=0.1 if packed else 0.03)


@pytest.mark.needs("torch")
def test_a_dtensor_policy_that_is_asked_holds_what_is_planned(group: Any) -> None:
    from nemo_rl.models.automodel import train

    batch = data(1)
    for chunk in (None, CHUNK):
        post = train.LogprobsPostProcessor(
            {"logprob_chunk_size": chunk}, None, None, None, 1
        )
        inputs = SimpleNamespace(input_ids=batch["input_ids"], seq_len=TOKENS)
        found = most(partial(_second, post, batch, inputs), trains=False, stays=True)
        own = {"chunk": chunk, "tensor": 1, "context": 1, "worker": 2}
        assert plan.logprob_bytes(own, TOKENS, 1) == pytest.approx(found, rel=0.03)
    post = train.TopkLogitsPostProcessor({}, None, None, None, 1, memory_nemo_rl.TOP)
    found = most(partial(_second, post, batch, None), trains=False, stays=True)
    assert pytest.approx(found, rel=0.03) == plan.TOPK


def _second(post: Any, batch: Any, inputs: Any, logits: Any) -> Any:
    return post(logits, batch, inputs, 1, TOKENS)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("way", ["", "sequence_packing", "fused"])
@pytest.mark.parametrize(
    ("kind", "chunk"), [("topk", None), ("logprob", None), ("logprob", CHUNK)]
)
def test_a_megatron_policy_holds_what_is_planned(
    group: Any, kind: str, chunk: int | None, way: str, defers: bool
) -> None:
    import torch
    from nemo_rl.algorithms.loss import utils, wrapper

    if (chunk and not defers) or (kind == "topk" and way == "fused"):
        pytest.skip("NeMo-RL refuses it")
    rows = 4 if way else 1
    ends = torch.arange(0, TOKENS + 1, TOKENS // rows, dtype=torch.int32)
    batch, one, loss = data(rows), torch.tensor(1.0), loss_of(kind)
    parallel = {"vocab_parallel_rank": 0, "vocab_parallel_group": group}

    def work(logits: Any) -> Any:
        if not way:
            inputs, same = utils.prepare_loss_input(
                logits, batch, loss, chunk_size=chunk, **parallel
            )
            return loss(
                data=same, global_valid_seqs=one, global_valid_toks=one, **inputs
            )[0]
        kinds = {
            "fused": (
                *(wrapper.SequencePackingFusionLossWrapper,),
                utils.prepare_packed_loss_input,
            ),
            "sequence_packing": (
                *(wrapper.SequencePackingLossWrapper,),
                utils.prepare_loss_input,
            ),
        }
        made, prepare = kinds[way]
        whole = made(
            loss_fn=loss,
            prepare_fn=partial(prepare, chunk_size=chunk),
            cu_seqlens_q=ends,
            cu_seqlens_q_padded=ends,
            **parallel,
        )
        return whole(logits, batch, one, one)[0]

    found = most(work, trains=True, stays=True, is_float=not defers)
    own = {
        "way": "sequence_packing" if way else "",
        "fuses_loss": way == "fused",
        "defers": defers,
        "chunk": chunk,
        "context": 1,
    }
    algorithm = "distillation" if kind == "topk" else "grpo"
    values = {"algorithm": algorithm, "release": "0.7.0"}
    planned = megatron_plan.trained_loss(values, own, rows, TOKENS)
    # It is rounded up.
    assert found <= planned * 1.01
    assert planned == pytest.approx(found, rel=0.18)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("chunk", [None, CHUNK])
def test_megatron_that_is_asked_holds_what_is_planned(
    group: Any, chunk: int | None, defers: bool
) -> None:
    from nemo_rl.distributed import model_utils

    ids = data(1)["input_ids"]
    span = {"vocab_start_index": 0, "vocab_end_index": VOCAB, "chunk_size": chunk}

    def logprobs(logits: Any) -> Any:
        return model_utils.from_parallel_logits_to_logprobs(
            logits, target=ids, tp_group=group, inference_only=True, **span
        )

    def topk(logits: Any) -> Any:
        top = memory_nemo_rl.TOP
        return model_utils.distributed_vocab_topk(logits, top, group, **span)

    own = {"defers": defers, "chunk": chunk, "context": 1}
    for work, is_topk in ((logprobs, False), (topk, True)):
        found = most(work, trains=False, stays=True, is_float=not defers)
        planned = megatron_plan.asked_loss(own, TOKENS, topk=is_topk)
        assert found <= planned * 1.03
        assert planned == pytest.approx(found, rel=0.18)
