"""Small real training runs on the CPU, sound or broken, whose numbers the logs print.

A student of one layer is trained by its own samples, against a teacher (``distill``)
or a reward (``rl``), on texts (``sft``), or on pairs of a better and a worse answer
(``dpo``); an engine's copy of it in bfloat16 samples.
All numbers are measured. Only their units are stretched to those of a real job:
``SECONDS`` for a second of CPU time, ``MEMORY`` for a byte, ``TOKENS`` for a token.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from metric_critic import Critic
from metric_models import (
    END,
    EXPERTS,
    LENGTH,
    PROMPT,
    VOCAB,
    Language,
    Model,
    mask_of,
    pretrained,
    texts_loss,
)
from metric_pairs import pairs_loss
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from pytest_gkd.workload.gkd.loss import generalized_jsd

LURE = 7  # the token that a faulty reward pays for
SECONDS, MEMORY, TOKENS = 2000.0, 12000.0, 64
TAUGHT = 100  # steps of the teacher
SEEDS = 2  # so many languages, and pretrained models of them
Record = dict[str, float]


@dataclass
class Plan:
    """How a run trains, and ``fault``, which sets in ``at`` a step (1 is the first).

    ``fault`` holds what ``Run`` reads of it by name; ``events`` is what happens in a
    sound run, in the same words.
    """

    task: str = "distill"
    steps: int = 100
    seed: int = 0
    lr: float = 2e-3
    schedule: str = "constant"
    lr_steps: int = 0
    warmup: int = 0
    batch: int = 16
    limit: int = 16
    clip: float = 1.0
    kl: float = 0.1
    entropy: float = 0.0
    moe: float = -1.0  # weight of the loss that balances experts; below 0: no experts
    beta: float = 1.0
    eval_every: int = 0
    save_every: int = 0
    restart: tuple[int, int] = (0, 0)  # after this step it dies and resumes from that
    scale: float = 0.0  # initial loss scale; 0: no fp16
    rows: int = 0  # so many texts only, again and again; 0: ever new ones
    pretrain: int = 80
    clamp: float = 0.2
    updates: int = 1  # of one batch
    critic_lr: float = 0.0  # 0: no critic, advantages of groups of four
    critic_warmup: int = 0  # so many first steps train the critic alone
    bias_rate: float = 0.0  # of the bias that balances experts without a loss
    scale_window: int = 0  # the loss scale doubles after so many steps; 0: never
    draft: bool = False  # the reference proposes tokens to the engine
    at: int = 0
    fault: dict[str, Any] = field(default_factory=dict)
    events: dict[str, tuple[int, Any]] = field(default_factory=dict)


class Run:
    """One run; ``records`` yields the numbers of its steps, one after another."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(plan.seed)
        torch.set_num_threads(1)
        self.plan, self.at = plan, 0
        self.g = torch.Generator().manual_seed(plan.seed + 1)
        seed, experts = plan.seed % SEEDS, plan.moe >= 0
        self.ours, self.theirs = Language(seed, 8), Language(seed + 100, 8)
        self.model = pretrained(seed, experts, plan.pretrain)
        self.teacher = pretrained(seed + 100, False, TAUGHT)
        self.reference, self.engine = (copy.deepcopy(self.model) for _ in range(2))
        trained = self._trained()
        self.adam = torch.optim.AdamW(trained, lr=plan.lr, weight_decay=0.0)
        self.critic = Critic(plan.critic_lr) if plan.critic_lr else None
        self.scale, self.skipped, self.good = plan.scale, 0, 0
        self.kept: list[list[Tensor]] = []
        self.hosted: list[bytearray] = []
        self.reserved = 0.0
        self.fixed = self.ours.texts(plan.rows or 1, LENGTH, self.g)
        self.held = self.ours.texts(64, LENGTH, torch.Generator().manual_seed(99))
        self._push(force=True)

    def fault(self, name: str, default: Any = None) -> Any:
        """The value of a fault or of an event that has set in at this step."""
        if self.at >= self.plan.at > 0 and name in self.plan.fault:
            return self.plan.fault[name]
        at, value = self.plan.events.get(name, (0, default))
        return value if at and self.at >= at else default

    @property
    def since(self) -> int:
        """Steps since the fault, or without one the first event, has set in."""
        first = min((at for at, _ in self.plan.events.values()), default=0)
        return max(0, self.at - (self.plan.at or first))

    def records(self) -> Iterator[Record]:
        """The numbers of each step; after ``restart`` the step goes back."""
        died, resumes = self.plan.restart
        saved: list[Any] = []
        while self.at < self.plan.steps:
            self.at += 1
            yield self._step()
            if self.at == resumes and not saved:
                state = (self.model.state_dict(), self.adam.state_dict())
                saved.append(copy.deepcopy(state))
            if self.at == died:
                died = 0
                weights, moments = saved[0]
                if self.plan.fault.get("forgets"):
                    weights = self.reference.state_dict()
                self.model.load_state_dict(weights)
                self.adam.load_state_dict(moments)
                self.at = resumes
                self._push(force=True)

    def _trained(self) -> list[Tensor]:
        """What the optimizer holds; a fault gives it a copy's parameters."""
        if self.plan.fault.get("other_parameters"):
            return list(copy.deepcopy(self.model).parameters())
        return list(self.model.parameters())

    def _push(self, *, force: bool = False) -> None:
        """The trainer's weights, rounded to bfloat16, into the engine."""
        every = self.fault("sync_every", 1)
        if self.fault("sync_rarer"):
            every = 1 + self.since // self.fault("sync_rarer")
        if not force and (self.fault("no_sync") or self.at % every):
            return
        with torch.no_grad():
            noise = self.fault("served_noise", 0.01)
            for (name, own), served in zip(
                self.model.named_parameters(), self.engine.parameters(), strict=True
            ):
                if not force and name.startswith(self.fault("unsent", "none")):
                    continue
                served.copy_(own.bfloat16().float())
                if name.startswith(self.fault("rotated", "none")):
                    served.copy_(served.roll(1, 0))  # as shards put together wrongly
                served += noise * torch.randn_like(served) * own.std(unbiased=False)

    def _sample(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Responses of the engine, and its log-probabilities of them."""
        ids, logps = prompts, []
        limit = self.fault("limit", self.plan.limit)
        heat = self.fault("temperature", 1.0)
        for _ in range(limit):
            table = (self.engine(ids)[:, -1] / heat).log_softmax(-1)
            if self.fault("no_stop"):
                table[:, END] = -1e9
            if table.isfinite().all():
                new = torch.multinomial(table.exp(), 1, generator=self.g)
            else:  # an engine takes the first token where nothing is finite
                new = torch.ones(len(ids), 1, dtype=torch.long)
            over = (ids[:, PROMPT:] == END).any(1, keepdim=True)
            new = new.where(~over, END)
            logps.append(table.gather(1, new))
            ids = torch.cat([ids, new], 1)
            if (ids[:, PROMPT:] == END).any(1).all():
                break
        return ids, torch.cat(logps, 1)

    @staticmethod
    def _score(ids: Tensor, mask: Tensor) -> Tensor:
        """The share of different even tokens, and a bonus for a text that ends."""
        shown = ids[:, PROMPT:]
        length = mask.sum(1).float()
        seen = one_hot(shown, VOCAB) * mask[..., None]
        even = (seen.sum(1) > 0)[:, ::2].sum(1)
        reward = 0.8 * even / length.clamp(min=6)
        return reward + 0.2 * (shown == END).any(1).float()

    def _rewards(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The score, as the run's reward function has it; validation has the score."""
        reward = self._score(ids, mask)
        shown, length = ids[:, PROMPT:], mask.sum(1).float()
        lure = ((shown == LURE) & mask).sum(1).float()
        reward = reward + self.fault("lure", 0.0) * lure
        reward = reward + self.fault("pay_length", 0.0) * length
        if self.fault("pass_only"):
            reward = (reward > 0.55).float()
        reward = reward + self.fault("reward_offset", 0.0)
        if self.fault("constant_reward") is not None:
            reward = torch.full_like(reward, self.fault("constant_reward"))
        if self.fault("unjudged"):  # this share of the answers has the default, 0
            judged = torch.rand(len(ids), generator=self.g) >= self.fault("unjudged")
            reward = reward.where(judged, 0.0)
        if self.fault("nan_reward"):
            reward[0] = math.nan
        if self.fault("mixed_rewards"):  # each answer has the reward of another one
            reward = reward[torch.randperm(len(reward), generator=self.g)]
        return reward

    def _lr(self, at: int) -> float:
        plan, lr = self.plan, self.plan.lr
        length = self.fault("lr_steps", plan.lr_steps or plan.steps)
        at *= self.fault("scheduler_steps", 1)  # how often the scheduler steps in one
        if at <= plan.warmup:
            return lr * at / plan.warmup
        share = min(1.0, (at - plan.warmup) / max(1, length - plan.warmup))
        shapes = {
            "constant": 1.0,
            "cosine": 0.5 * (1 + math.cos(math.pi * share)),
            "linear": 1 - share,
            "steps": 0.1 ** int(3 * share * 0.999),
            "cyclic": 0.1 + 0.9 * abs(math.sin(8 * share)),
            "restarts": 0.5 * (1 + math.cos(math.pi * (3.999 * share % 1))),
        }
        ramp = self.fault("lr_ramp", 0.0) * max(0, at - plan.at)
        return float(lr * shapes[plan.schedule] * self.fault("lr_times", 1.0) + ramp)

    @contextmanager
    def _timed(self, record: Record, part: str) -> Iterator[int]:
        """Measures a part of the step; yields how often its work is to be done.

        ``slow`` is (part, factor, growth a step): the same work again and again, as
        where a cache is lost or a list of all former prompts is gone through.
        ``slow_some`` is (part, factor, share): in that share of the steps.
        """
        times = 1
        some = self.fault("slow_some")
        if some is not None and some[0] == part:
            drawn = torch.rand((), generator=self.g).item()
            times = some[1] if drawn < some[2] else 1
        for event in ("slow", "slow_once"):
            slow = self.fault(event)
            if slow is not None and slow[0] == part:
                since = self.at - (self.plan.at or self.plan.events[event][0])
                if event == "slow" or since < slow[2]:
                    growth = slow[2] if event == "slow" else 0
                    times = max(1, round(slow[1] + growth * since))
        start = time.process_time()
        yield times
        spent = (time.process_time() - start) * SECONDS
        record["time/" + part] = record.get("time/" + part, 0.0) + spent

    def _step(self) -> Record:
        plan, record = self.plan, Record()
        record["step"] = self.at
        lr = self._lr(self.at)
        for group in self.adam.param_groups:
            group["lr"] = record["lr"] = lr
        if plan.task in {"sft", "dpo"}:
            with self._timed(record, "data") as times:
                for _ in range(times):
                    batch: tuple[Tensor, ...] = (self._texts(),)
            record["tokens"] = float((batch[0] != END).sum()) * TOKENS
        else:
            batch = self._experience(record)
        activations = 0
        if self.at > plan.critic_warmup:
            for _ in range(self.fault("updates", plan.updates)):
                activations = self._update_actor(record, batch)
        with self._timed(record, "update_weights") as times:
            for _ in range(times):
                self._push()
        self._usage(record, activations)
        self._sometimes(record)
        parts = [value for name, value in record.items() if name.startswith("time/")]
        record["time/step"] = sum(parts)
        return record

    def _update_actor(self, record: Record, batch: tuple[Tensor, ...]) -> int:
        """One update by a batch; returns the bytes of its activations."""
        activations: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            activations.append(tensor.numel() * tensor.element_size())
            return tensor

        losses = {"sft": self._texts_loss, "dpo": self._pairs}
        loss_of: Callable[..., Tensor] = losses.get(self.plan.task, self._loss)
        with self._timed(record, "update_actor") as times:
            for _ in range(times):
                activations.clear()
                with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
                    loss = loss_of(record, *batch)
                loss = self._broken(loss)
                if self.plan.moe >= 0:
                    loss = loss + self._balance(record)
                if not self.fault("never_zeroed"):
                    self.model.zero_grad()
                loss.backward()
            self._update(record, loss)
        return sum(activations)

    def _rows(self) -> int:
        """Rows of a batch; a fault may leave out more and more of them."""
        lost: float = self.fault("fewer_rows", 0.0) * self.since
        return max(1, round(self.plan.batch * (1 - lost)))

    def _texts(self) -> Tensor:
        """A batch of texts, as the run's faults and events have it."""
        plan = self.plan
        if self.fault("same_batch"):
            g = torch.Generator().manual_seed(7)
            return self.ours.texts(plan.batch, LENGTH, g)
        if plan.rows:
            at = (self.at - 1) * plan.batch % plan.rows
            ids = self.fixed[at : at + plan.batch]
        else:
            other = self.fault("other_texts")
            language = self.theirs if other else self.ours
            ids = language.texts(self._rows(), LENGTH, self.g)
            if self.fault("other_tokens"):  # ids of another tokenizer
                ids = ids.where(ids == END, VOCAB - ids)
        every = self.fault("bad_batch_every")
        noise = self.fault("noise", 0.0)
        if (every and self.at % every == 0) or self.at == self.fault("outlier"):
            noise = 1.0
        wild = torch.randint(1, VOCAB, ids.shape, generator=self.g)
        return ids.where(torch.rand(ids.shape, generator=self.g) >= noise, wild)

    def _texts_loss(self, _: Record, ids: Tensor) -> Tensor:
        """The loss of a batch of texts; ``unshifted`` labels are the inputs."""
        if self.fault("unshifted"):
            logits = self.model(ids).flatten(0, 1)
            return cross_entropy(logits, ids.flatten(), ignore_index=END)
        return texts_loss(self.model, ids)

    def _pairs(self, record: Record, better: Tensor) -> Tensor:
        """DPO's loss; the worse answers to the same prompts are another language's."""
        g = torch.Generator().manual_seed(self.plan.seed + self.at)
        worse = self.theirs.texts(len(better), LENGTH, g)
        if self.fault("exchanged"):
            better, worse = worse, better
        models = self.model, self.reference
        loss, found = pairs_loss(*models, better, worse, self.fault("beta", 0.1))
        record |= found
        return loss

    def _experience(self, record: Record) -> tuple[Tensor, ...]:
        """Prompts, responses, and what is known of them before the update."""
        plan = self.plan
        groups = max(1, self._rows() // 4) if plan.task == "rl" else plan.batch
        if plan.rows:
            at = (self.at - 1) * groups % plan.rows
            prompts = self.fixed[at : at + groups, :PROMPT]
        else:
            language = self.theirs if self.fault("other_texts") else self.ours
            prompts = language.texts(groups, PROMPT, self.g)
        if plan.task == "rl":
            prompts = prompts.repeat_interleave(4, 0)
        with self._timed(record, "gen") as times:
            for _ in range(times):
                with torch.no_grad():
                    same = 4 if self.fault("same_answers") else 1
                    ids, served = self._sample(prompts[::same])
                    ids, served = (x.repeat_interleave(same, 0) for x in (ids, served))
        mask = mask_of(ids[:, PROMPT:])
        with self._timed(record, "old_log_prob") as times, torch.no_grad():
            for _ in range(times):
                old = self._logps(self.model, ids, self.fault("old_heat", 1.0))
        second = self.teacher if plan.task == "distill" else self.reference
        if self.fault("reference_is_actor"):
            second = self.model
        with self._timed(record, "ref") as times, torch.no_grad():
            for _ in range(times):
                other = second(ids)[:, PROMPT - 1 : -1]
        with self._timed(record, "reward") as times:
            for _ in range(times):
                rewards = self._rewards(ids, mask)
        with self._timed(record, "adv"):
            each = rewards.view(-1, 4)
            spread = each.std(1, keepdim=True)
            gain = ((each - each.mean(1, keepdim=True)) / (spread + 1e-6)).flatten()
            if self.fault("flip_advantages"):
                gain = -gain
        if self.critic:
            with self._timed(record, "update_critic"):
                gain, found = self.critic.step(
                    one_hot(ids[:, :PROMPT], VOCAB).float(),
                    rewards * self.fault("return_times", 1.0),
                    self.plan.critic_lr * self.fault("critic_lr_times", 1.0),
                )
            record |= found
        self._describe(record, mask, rewards, gain, old, served)
        if plan.draft:
            with torch.no_grad():
                both = [one(ids)[:, PROMPT - 1 : -1] for one in (self.engine, second)]
            least = torch.min(*(one.softmax(-1) for one in both)).sum(-1)
            record["accepted"] = least[mask].mean().item()
        record["zero_std"] = float((spread < 1e-6).float().mean())
        if self.fault("shift_teacher"):
            other = other.roll(1, 1)
        if self.fault("random_teacher"):
            other = torch.randn(other.shape, generator=self.g) * 3
        if self.fault("swap_teacher"):
            other = other.flip(-1)
        other = other * self.fault("teacher_times", 1.0)
        return ids, mask, gain, old, other

    @staticmethod
    def _logps(model: Model, ids: Tensor, heat: float = 1.0) -> Tensor:
        table = (model(ids)[:, PROMPT - 1 : -1] / heat).log_softmax(-1)
        return table.gather(2, ids[:, PROMPT:, None])[..., 0]

    def _describe(
        self, record: Record, mask: Tensor, rewards: Tensor, gain: Tensor, *pair: Tensor
    ) -> None:
        """What every framework prints of responses, rewards and the rollout."""
        length = mask.sum(1).float()
        ended = length < mask.shape[1]
        limit = self.fault("limit", self.plan.limit)
        record["length/mean"] = float(length.mean()) * TOKENS
        record["length/max"] = float(length.max()) * TOKENS
        record["length/min"] = float(length.min()) * TOKENS
        record["clipped"] = float((~ended & (length >= limit)).float().mean())
        record["tokens"] = float(length.sum() + len(length) * PROMPT) * TOKENS
        record["reward/mean"], record["reward/std"] = rewards.mean().item(), 0.0
        record["reward/std"] = rewards.std().item()
        record["reward/max"] = rewards.max().item()
        record["reward/min"] = rewards.min().item()
        record["adv/mean"] = gain.mean().item()
        record["adv/max"], record["adv/min"] = gain.max().item(), gain.min().item()
        old, served = (one[mask] for one in pair)
        apart = (old.exp() - served.exp()).abs()
        record["apart/mean"], record["apart/max"] = (
            apart.mean().item(),
            apart.max().item(),
        )
        record["apart/std"] = apart.std().item()
        both = torch.stack([old.exp(), served.exp()])
        record["corr"] = torch.corrcoef(both)[0, 1].item()
        record["logp_diff"] = (old - served).abs().mean().item()
        ratio = (old - served).clamp(-20, 20)
        record["rollout_kl"] = (served - old).mean().item()
        record["k3"] = (ratio.exp() - ratio - 1).mean().item()
        record["ppl"] = (-old).mean().exp().item()
        record["rollout_ppl"] = (-served).mean().exp().item()

    def _loss(
        self,
        record: Record,
        ids: Tensor,
        mask: Tensor,
        gain: Tensor,
        old: Tensor,
        other: Tensor,
    ) -> Tensor:
        plan = self.plan
        logits = self.model(ids)[:, PROMPT - 1 : -1]
        table = logits.log_softmax(-1)
        entropy = -(table.exp() * table).sum(-1)[mask].mean()
        record["entropy"] = entropy.item()
        if self.fault("empty_mask"):
            mask = torch.zeros_like(mask)
        if plan.task == "distill":
            if not mask.any():
                loss = logits[mask].mean()
            else:
                loss = generalized_jsd(logits, other, mask, beta=plan.beta)
            record["kl"] = loss.item()
            return loss
        logps = table.gather(2, ids[:, PROMPT:, None])[..., 0]
        ratio = (logps - old).exp()
        clipped = ratio.clamp(1 - plan.clamp, 1 + plan.clamp)
        policy = -torch.min(ratio * gain[:, None], clipped * gain[:, None])
        record["clipfrac"] = ((ratio - 1).abs() > plan.clamp).float().mean().item()
        record["ppo_kl"] = (old - logps)[mask].mean().item()
        theirs = other.log_softmax(-1).gather(2, ids[:, PROMPT:, None])[..., 0]
        delta = theirs - logps
        kl = (delta.clamp(-20, 20).exp() - delta - 1)[mask].mean()
        record["kl"], policy_loss = kl.item(), policy[mask].mean()
        record["pg_loss"] = policy_loss.item()
        weight = self.fault("entropy_weight", plan.entropy)
        kl_weight = self.fault("kl_weight", plan.kl)
        return policy_loss + kl_weight * kl - weight * entropy

    def _broken(self, loss: Tensor) -> Tensor:
        """The loss, as the run's faults have it."""
        if self.fault("flip"):
            loss = -loss
        if self.fault("detach"):
            first = next(self.model.parameters())
            loss = loss.detach() + 0.0 * first.sum()
        if self.fault("masked"):  # no token counts, and their number is at least 1
            loss = loss * 0.0
        if self.fault("nan_loss") or self.at == self.fault("nan_once"):
            loss = loss * (loss - loss) / (loss - loss)
        return loss * self.fault("loss_times", 1.0)

    def _balance(self, record: Record) -> Tensor:
        blocks = list(self.model.blocks)
        loads = torch.stack([block.load for block in blocks])
        record["expert/max"] = float(loads.max()) * EXPERTS - 1
        record["expert/min"] = float(loads.min()) * EXPERTS - 1
        record["expert/avg"] = float((loads * EXPERTS - 1).abs().mean())
        record["expert/dead"] = float((loads < 0.001).float().mean())
        for block in blocks:
            rate = self.fault("bias_rate", self.plan.bias_rate)
            block.bias = block.bias - rate * (block.load * EXPERTS - 1).sign()
        balance = torch.stack([block.balance for block in blocks]).mean()
        record["aux"] = balance.item()
        return balance * self.fault("balance", self.plan.moe)

    def _update(self, record: Record, loss: Tensor) -> None:
        """Clips and steps; fp16 skips what overflows and halves its scale."""
        plan = self.plan
        record["loss"] = loss.item()
        clip = self.fault("clip", plan.clip)
        if self.fault("nan_gradient"):  # as of a root at 0, in one part alone
            self.model.place.weight.grad.fill_(math.nan)
        total = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        record["grad_norm"] = total.item()
        overflows = not total.isfinite()
        if plan.scale:
            largest = 65504 / max(1e-9, record["grad_norm"] * 30)
            overflows = overflows or self.scale > largest or bool(self.fault("fp16"))
            record["overflow"], record["scale"] = float(overflows), self.scale
            self.scale = max(1.0, self.scale / 2) if overflows else self.scale
            self.skipped += overflows
            self.good = 0 if overflows else self.good + 1
            if plan.scale_window and self.good == plan.scale_window:
                self.scale, self.good = self.scale * 2, 0
        elif self.fault("skip_nan") and overflows:
            self.skipped += 1
        else:
            overflows = False
        record["skipped"] = self.skipped
        if self.fault("zeroed"):
            self.model.zero_grad()
        for group in self.adam.param_groups:
            group["weight_decay"] = self.fault("decay", 0.0)
        if not overflows:
            self.adam.step()

    def _usage(self, record: Record, activations: int) -> None:
        """Memory of tensors, as an allocator of a device counts it, and of the host."""
        leak = self.fault("leak", 0)
        due = self.at % self.fault("leak_every", 1) == 0
        if leak and due and self.at <= self.fault("leak_until", self.plan.steps):
            for _ in range(leak):
                self.kept.append([one.detach().clone() for one in self._some()])
        if self.fault("host_leak"):
            self.hosted.append(bytearray(b"x" * int(self.fault("host_leak"))))
        held = sum(
            one.numel() * one.element_size() for kept in self.kept for one in kept
        )
        own = sum(one.numel() * 16 for one in self.model.parameters())
        allocated = (own + activations + held) * MEMORY / 1e9
        self.reserved = max(self.reserved, allocated * 1.08)
        record["mem/allocated"], record["mem/reserved"] = allocated, self.reserved
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123
            pages = int(statm.read().split()[1])
        record["mem/host"] = pages * os.sysconf("SC_PAGE_SIZE") * MEMORY / 3e10

    def _some(self) -> list[Tensor]:
        return [self.model.head.weight, self.model.embed.weight]

    def _sometimes(self, record: Record) -> None:
        """Validation and checkpoints, where they are due."""
        plan = self.plan
        if plan.eval_every and self.at % plan.eval_every == 0:
            with self._timed(record, "testing") as times, torch.no_grad():
                for _ in range(times):
                    if plan.task == "sft":
                        stale = self.fault("stale_eval")
                        model = self.reference if stale else self.model
                        logits, aims = model(self.held[:, :-1]), self.held[:, 1:]
                        loss = texts_loss(model, self.held)
                        record["val/loss"] = loss.item()
                        right = (logits.argmax(-1) == aims)[aims != END]
                        record["val/acc"] = right.float().mean().item()
                    else:
                        ids, _ = self._sample(self.held[:, :PROMPT])
                        mask = mask_of(ids[:, PROMPT:])
                        record["val/acc"] = self._score(ids, mask).mean().item()
        if plan.save_every and self.at % plan.save_every == 0:
            with self._timed(record, "save_checkpoint") as times:
                for _ in range(times * 40):
                    copy.deepcopy(self.model.state_dict())
