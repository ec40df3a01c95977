"""The trainer's half of a job: weights to push, and a GKD step."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from collections.abc import Sequence as Listing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gkd.workload.engine.greedy import GreedyCheck, compare
from pytest_gkd.workload.gkd.batch import Sequence, micro_batches, pad
from pytest_gkd.workload.gkd.forward import (
    check_ids,
    coarsest_dtype,
    embedding_rows,
    load_model,
    pad_token_id,
    participants,
    response_logits,
)
from pytest_gkd.workload.gkd.loss import generalized_jsd, topk_forward_kl
from pytest_gkd.workload.gkd.memory_use import allocated_bytes
from pytest_gkd.workload.gkd.optimizer import Optimizer, must_move
from pytest_gkd.workload.gkd.step import StepReport
from pytest_gkd.workload.gkd.teacher_targets import Signal, TeacherTopK, count_nonfinite
from pytest_gkd.workload.sync import digest, weights

if TYPE_CHECKING:
    from torch import Tensor


class Trainer:
    """The student with its optimizer.

    ``vocab_size`` is the rows of its embedding, ``pad_id`` the token it pads with.
    """

    def __init__(
        self,
        student: Path | str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        learning_rate: float = 1e-3,
        trust_remote_code: bool = False,
    ) -> None:
        """Load ``student`` in ``dtype``; see ``load_model`` for what it raises."""
        self.model = load_model(
            str(student),
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
        self.device = device
        self.learning_rate = learning_rate
        self.vocab_size = embedding_rows(self.model)
        self.pad_id = pad_token_id(self.model)
        self.optimizer: Optimizer | None = None
        self._saved: dict[str, Tensor] | None = None

    # -- weights, as a checkpoint names them ------------------------------------------

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under their checkpoint's names, detached, always in the same order.

        Of tensors that share their storage (a tied ``lm_head``) only the first is
        given, as in a checkpoint. Persistent buffers are weights too.
        """
        yield from weights.named_weights(self.model).items()

    def parameter_info(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype (``bfloat16``) and shape of each of ``named_tensors``."""
        return [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in self.named_tensors()
        ]

    def optimizer_note(self) -> str:
        """How the optimizer falls short of a real trainer's; empty if it does not."""
        return self.optimizer.note if self.optimizer is not None else ""

    def load_facts(self) -> dict[str, float]:
        """How long loading took: building and reading, moving, and how much of it."""
        facts = self.model.gkd_load_facts
        return {f"trainer_{name}": value for name, value in facts.items()}

    def nonfinite(self) -> list[str]:
        """Names of the weights that hold NaN or Inf."""
        return [name for name, tensor in self.named_tensors() if weights.spoilt(tensor)]

    def snapshot(self) -> None:
        """Keep the current weights, in host memory, for ``restore``."""
        self._saved = {
            name: tensor.to("cpu", copy=True)
            for name, tensor in weights.own_tensors(self.model).items()
        }

    def restore(self) -> None:
        """Restore the snapshot's weights, bit for bit; the optimizer is reset.

        The snapshot stays. Raises RuntimeError if there is none.
        """
        if self._saved is None:
            raise RuntimeError("there is no snapshot to restore; call snapshot() first")
        for name, tensor in weights.own_tensors(self.model).items():
            tensor.copy_(self._saved[name])
        self.optimizer = None

    def perturb(self, seed: int = 0, scale: float = 0.1) -> None:
        """Perturb every weight by noise; see ``weights.perturb``."""
        weights.perturb(self.model, seed, scale)

    # -- the reference ----------------------------------------------------------------

    def check_greedy(
        self,
        prompt_ids: Listing[int],
        response_ids: Listing[int],
        response_logprobs: Listing[float] | None = None,
    ) -> GreedyCheck:
        """Judge one of the engine's greedy completions by these weights.

        One forward pass over prompt and response, so that one differing token does not
        change what is expected after it. See ``greedy.compare``.
        """
        import torch

        sequence = Sequence(tuple(prompt_ids), tuple(response_ids))
        check_ids([sequence], self.vocab_size, "student")
        with torch.inference_mode():
            logits = response_logits(self.model, pad([sequence], self.pad_id))[0]
        return compare(
            logits,
            response_ids,
            response_logprobs,
            model_dtype=coarsest_dtype(self.model),
        )

    # -- training ---------------------------------------------------------------------

    def gkd_step(
        self,
        sequences: Listing[Sequence],
        signal: Signal,
        *,
        beta: float = 0.5,
        temperature: float = 1.0,
        collect: bool = False,
    ) -> StepReport:
        """One AdamW step (no weight decay) towards the teacher's ``signal``.

        The loss is the forward KL with a tail bucket over ``Teacher.topk``'s tokens, or
        the generalized JSD with ``beta`` over ``Teacher.full``'s. NaN and Inf are
        reported, not raised. ``collect`` collects garbage before memory is measured.
        See ``check_ids`` for what is raised.
        """
        import torch

        check_ids(sequences, self.vocab_size, "student")
        spoilt = [n for n, p in self.model.named_parameters() if weights.spoilt(p)]
        self.model.zero_grad(set_to_none=True)
        total = int(signal.mask.sum())
        mean_loss = 0.0
        with participants(self.model) as took_part:
            for rows in micro_batches(sequences, self.vocab_size):
                part = pad(sequences[rows], self.pad_id)
                share = int(part.mask.sum()) / total
                logits = response_logits(self.model, part)
                value = share * self._loss(logits, signal, rows, beta, temperature)
                mean_loss += float(value.detach())
                if value.requires_grad:
                    value.backward()
        named = list(self.model.named_parameters())
        norms = {
            name: float(torch.linalg.vector_norm(p.grad, dtype=torch.float32))
            for name, p in named
            if p.grad is not None
        }
        bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
        without = [name for name, p in named if p.requires_grad and not norms.get(name)]
        idle = [name for name in without if name not in took_part]
        self.optimizer = self.optimizer or Optimizer(self.model, self.learning_rate)
        moved, unmoved = (0, []) if bad else self._update(self.optimizer, named)
        self.model.zero_grad(set_to_none=True)
        del logits, value, part
        if collect:
            gc.collect()
        return StepReport(
            loss=mean_loss,
            grad_norm=math.sqrt(sum(norm * norm for norm in norms.values())),
            tokens=total,
            learning_rate=self.learning_rate,
            parameters=len(named),
            frozen=sum(not p.requires_grad for _, p in named),
            parameters_with_grad=sum(
                norm > 0.0 and math.isfinite(norm) for norm in norms.values()
            ),
            parameters_moved=moved,
            unmoved=unmoved,
            unused=len(idle),
            nonfinite_grads=bad,
            zero_grads=[name for name in without if name in took_part],
            nonfinite_parameters=spoilt,
            nonfinite_teacher=count_nonfinite(signal),
            allocated_bytes=allocated_bytes(self.device),
        )

    def _update(
        self, optimizer: Optimizer, named: Listing[tuple[str, Tensor]]
    ) -> tuple[int, list[str]]:
        """One step of the optimizer: how many parameters moved, and which did not.

        The latter omits those whose update is too small for their dtype.
        """
        before = [digest.fingerprint(parameter) for _, parameter in named]
        optimizer.step()
        still = [
            (name, parameter)
            for (name, parameter), old in zip(named, before, strict=True)
            if digest.fingerprint(parameter) == old
        ]
        wrong = [n for n, p in still if must_move(p, self.learning_rate)]
        return len(named) - len(still), wrong

    def _loss(
        self,
        logits: Tensor,
        signal: Signal,
        rows: slice,
        beta: float,
        temperature: float,
    ) -> Tensor:
        """The mean loss of ``rows``, whose logits are [rows, response, vocab]."""
        import torch

        def here(array: Any) -> Tensor:
            # A copy: arrays from Ray's object store are read-only.
            return torch.tensor(array[rows, : logits.shape[1]], device=logits.device)

        if isinstance(signal, TeacherTopK):
            return topk_forward_kl(
                logits,
                here(signal.logprobs),
                here(signal.ids),
                here(signal.mask),
                temperature=temperature,
            )
        # Models of one family pad their vocabularies differently (Qwen2.5 to 151936 and
        # 152064 rows); no tokenizer can produce the ids that only one of them has.
        vocab = min(logits.shape[-1], signal.logprobs.shape[-1])
        return generalized_jsd(
            logits[..., :vocab],
            here(signal.logprobs)[..., :vocab],
            here(signal.mask),
            beta=beta,
            temperature=temperature,
        )
