"""Gets the teacher's log-probabilities for the student's tokens.

Arrays go in and out, so that a teacher may as well live in another process.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from typing import Any

from pytest_gkd.workload.engine.greedy import tolerance_of
from pytest_gkd.workload.gkd.batch import Sequence, micro_batches, pad
from pytest_gkd.workload.gkd.forward import (
    check_ids,
    coarsest_dtype,
    embedding_rows,
    last_logits,
    load_model,
    response_logits,
)
from pytest_gkd.workload.gkd.teacher_targets import (
    PlainLogprobs,
    TeacherFull,
    TeacherTopK,
)


class Teacher:
    """A frozen model that scores sequences; ``vocab_size`` is its embedding's rows."""

    def __init__(
        self,
        path: str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        """Load ``path`` in ``dtype``; see ``load_model`` for what it raises."""
        self.model = load_model(
            path, device=device, dtype=dtype, trust_remote_code=trust_remote_code
        )
        self.model.requires_grad_(requires_grad=False)
        self.vocab_size = embedding_rows(self.model)

    def topk(
        self,
        sequences: Listing[Sequence],
        k: int,
        *,
        temperature: float = 1.0,
        vocab_size: int | None = None,
    ) -> TeacherTopK:
        """The ``k`` most likely tokens at each response position.

        ``vocab_size`` cuts off the teacher's rows from there on: models of one family
        pad their embeddings differently, and the student cannot index what only the
        teacher has. ``k`` is limited to the remaining vocabulary.
        """
        import numpy as np
        import torch

        tops = [
            torch.topk(chunk, min(k, chunk.shape[-1]), dim=-1)
            for chunk in self._logprobs(sequences, temperature, vocab_size)
        ]
        logprobs = np.concatenate([top.values.cpu().numpy() for top in tops])
        ids = np.concatenate([top.indices.cpu().numpy() for top in tops])
        return TeacherTopK(logprobs, ids, pad(sequences).mask, temperature)

    def full(
        self, sequences: Listing[Sequence], *, vocab_size: int | None = None
    ) -> TeacherFull:
        """The log-probabilities of all tokens at each response position.

        ``vocab_size`` as in ``topk``.
        """
        import numpy as np

        chunks = [c.cpu().numpy() for c in self._logprobs(sequences, 1.0, vocab_size)]
        return TeacherFull(np.concatenate(chunks), pad(sequences).mask)

    def plain_logprobs(
        self,
        sequence: Sequence,
        count: int,
        *,
        temperature: float,
        vocab_size: int | None,
    ) -> PlainLogprobs:
        """Log-probabilities for ``count`` response tokens from ``sequence`` alone.

        No batch, padding, mask or positions: it counts from the end of its input, so
        that it can serve to verify ``topk`` and ``full``.
        """
        import torch

        # The last of the tokens is only predicted, never an input.
        seen = sequence.prompt_ids + sequence.response_ids[: count - 1]
        ids = torch.tensor([seen], device=next(self.model.parameters()).device)
        with torch.inference_mode():
            logits = last_logits(self.model, count, input_ids=ids)[0]
        picked = logits[-count:, :vocab_size]
        scaled = picked.double() / temperature
        logprobs = scaled - scaled.logsumexp(-1, keepdim=True)
        rounding = tolerance_of(picked, coarsest_dtype(self.model))
        tolerance = rounding / min(1.0, temperature)
        return PlainLogprobs(logprobs.float().cpu().numpy(), tolerance)

    def _logprobs(
        self, sequences: Listing[Sequence], temperature: float, vocab_size: int | None
    ) -> list[Any]:
        """Float32 per micro-batch, each padded to the whole batch's response length."""
        import torch
        from torch.nn.functional import log_softmax
        from torch.nn.functional import pad as pad_tensor

        check_ids(sequences, self.vocab_size, "teacher")
        longest = pad(sequences).mask.shape[1]
        chunks = []
        with torch.inference_mode():
            for rows in micro_batches(sequences, self.vocab_size):
                logits = response_logits(self.model, pad(sequences[rows])).float()
                missing = longest - logits.shape[1]
                whole = pad_tensor(logits, (0, 0, 0, missing))[..., :vocab_size]
                chunks.append(log_softmax(whole / temperature, -1))
        return chunks
