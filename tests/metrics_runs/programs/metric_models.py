"""The models of the small runs, and the language that they learn first."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, scaled_dot_product_attention

VOCAB, PROMPT, WIDTH, HEADS, EXPERTS = 32, 4, 48, 4, 8
LENGTH = 20  # of a text
END = 0  # the end of a text


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a feed-forward layer, or eight experts of which two are asked."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False) if experts else None
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))
            for _ in range(EXPERTS if experts else 1)
        )
        self.load, self.balance = torch.zeros(EXPERTS), torch.zeros(())
        self.bias = torch.zeros(EXPERTS)  # for the choice alone, not for the weights

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            one.view(b, t, HEADS, -1).transpose(1, 2)
            for one in self.mix(self.norms[0](x)).chunk(3, -1)
        )
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, WIDTH))
        inner = self.norms[1](x)
        if self.router is None:
            return x + self.parts[0](inner)
        scores = self.router(inner).softmax(-1)
        weight, chosen = scores.topk(2, -1)
        if self.bias.any():
            chosen = (scores + self.bias).topk(2, -1).indices
            weight = scores.gather(-1, chosen)
        asked = one_hot(chosen, EXPERTS).float()
        self.load = asked.mean((0, 1, 2)).detach()
        probability = self.router(inner).softmax(-1).mean((0, 1))
        self.balance = EXPERTS * (self.load * probability).sum()
        gates = (asked * weight[..., None]).sum(-2)
        each = torch.stack([part(inner) for part in self.parts], -1)
        return x + (each * gates[:, :, None, :]).sum(-1)


class Model(nn.Module):  # type: ignore[misc]
    """A causal language model of one layer, about 30,000 parameters."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(96, WIDTH)
        self.blocks = nn.ModuleList([Block(experts)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Language:
    """A Markov chain over tokens that ends more likely the longer a text is."""

    def __init__(self, seed: int, length: float) -> None:
        g = torch.Generator().manual_seed(seed)
        self.next = (2.5 * torch.randn(VOCAB, VOCAB, generator=g)).softmax(-1)
        self.length = length

    def texts(self, rows: int, length: int, g: torch.Generator) -> Tensor:
        """``rows`` texts of ``length`` tokens; after the end there is only END."""
        ids = torch.randint(1, VOCAB, (rows, 1), generator=g)
        for at in range(1, length):
            table = self.next[ids[:, -1]].clone()
            after = max(0.0, at - PROMPT)
            table[:, END] = 0.0 if at < PROMPT else (after / self.length) ** 3
            new = torch.multinomial(table, 1, generator=g)
            ids = torch.cat([ids, new.where(ids[:, -1:] != END, END)], 1)
        return ids


def mask_of(ids: Tensor) -> Tensor:
    """Which tokens of a response count: all up to the first END."""
    ended = (ids == END).cumsum(1)
    return (ended == 0) | ((ended == 1) & (ids == END))


def texts_loss(model: Model, ids: Tensor) -> Tensor:
    """The usual loss of the next token; nothing counts after the first END."""
    logits, aims = model(ids[:, :-1]), ids[:, 1:].clone()
    aims[(aims == END).cumsum(1) > 1] = -100
    return cross_entropy(logits.flatten(0, 1), aims.flatten())


@functools.cache
def _weights(seed: int, experts: bool, steps: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model, language = Model(experts), Language(seed, 8)
    g = torch.Generator().manual_seed(seed)
    adam = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = texts_loss(model, language.texts(32, LENGTH, g))
        if experts:
            loss = loss + 0.05 * sum(block.balance for block in model.blocks)
        adam.zero_grad()
        loss.backward()
        adam.step()
    weights: dict[str, Tensor] = model.state_dict()
    return weights


def pretrained(seed: int, experts: bool, steps: int) -> Model:
    """A model that has learned the language of ``seed`` for so many steps."""
    model = Model(experts)
    model.load_state_dict(_weights(seed, experts, steps))
    return model
