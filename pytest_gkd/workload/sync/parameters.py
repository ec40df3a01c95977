"""Maps the engine's parameters to the trainer's tensors, and reads them.

vLLM fuses projections (``qkv_proj``, ``gate_up_proj``), pads vocabularies and renames
some modules; checkpoints do none of that. Everything here takes the checkpoint's view.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pytest_gkd.workload.sync import digest

if TYPE_CHECKING:
    from torch import Tensor

OTHERS = "*"
"""Stands, among digests, for all tensors that have no partner by name."""

DERIVED = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep", "W_K", "W_V", "W_K_scale", "W_V_scale")
"""What vLLM's latent attention computes from ``kv_b_proj`` after loading, and keeps as
parameters (vLLM 0.32, layers/attention/mla_attention.py); no checkpoint has them."""

# Elements per step of a checksum: its int64 temporaries are 8 bytes each.
CHUNK = 1 << 24


def unfused(model: Any) -> dict[str, Tensor]:
    """The parameters of a vLLM ``model`` by their checkpoint names, as views.

    Fused ones are split by ``packed_modules_mapping`` and the module's own output
    sizes; padding rows of embeddings are left out. Parameters that cannot be split this
    way keep vLLM's name, and with tensor parallelism each is this rank's shard.
    """
    packed: Mapping[str, list[str]] = (
        getattr(model, "packed_modules_mapping", None) or {}
    )
    modules = dict(model.named_modules())
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if leaf in DERIVED:
            continue
        parent, _, last = owner.rpartition(".")
        data = _without_padding(modules[owner], parameter.detach())
        parts = packed.get(last, [])
        sizes = _output_sizes(modules[owner], data)
        if len(parts) < 2 or len(parts) != len(sizes):
            views[name] = data
            continue
        prefix = f"{parent}." if parent else ""
        for part, view in zip(parts, data.split(sizes), strict=True):
            views[f"{prefix}{part}.{leaf}"] = view
    return views


def _output_sizes(module: Any, data: Tensor) -> list[int]:
    """Rows of each fused part on this rank; empty if they do not add up."""
    sizes = list(getattr(module, "output_sizes", None) or [])
    if not sizes or not data.dim() or not data.shape[0]:
        return []
    shards, rest = divmod(sum(sizes), int(data.shape[0]))
    if rest or any(size % shards for size in sizes):
        return []
    return [size // shards for size in sizes]


def _without_padding(module: Any, data: Tensor) -> Tensor:
    rows = getattr(module, "org_vocab_size", None)
    whole = getattr(module, "tp_size", 1) == 1
    if rows is None or not whole or not data.dim() or data.shape[0] < rows:
        return data
    return data[:rows]


def as_engine_holds(place: str, tensor: Tensor) -> Tensor:
    """``tensor`` as vLLM's loader turns it into the parameter ``place``.

    Mamba's ``A_log`` is stored as ``A``, which is minus its exponential (vLLM 0.32,
    layers/mamba/mamba_mixer2.py).
    """
    if place.endswith(".A"):
        return -tensor.float().exp()
    return tensor


def engine_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Where the vLLM ``model`` keeps each trainer tensor: trainer name -> engine name.

    Both unfused. Names for which vLLM has no parameter are left out.
    """
    known = set(unfused(model))
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None and hasattr(mapper, "orig_to_new_stacked"):
        # Newer versions fuse in the same table that renames; only the renaming is
        # needed.
        mapper = dataclasses.replace(mapper, orig_to_new_stacked={})
    rename = getattr(mapper, "map_name", None) or getattr(mapper, "_map_name", None)
    found: dict[str, str] = {}
    for name in names:
        renamed = name if name in known or rename is None else rename(name)
        if renamed not in known and renamed is not None:
            # Some models rename it in their loader instead of their table.
            renamed = re.sub(r"\.A_log$", ".A", renamed)
        if renamed in known:
            found[name] = renamed
    return found


def checksum(tensors: Iterable[Tensor]) -> int:
    """An unsigned 64-bit sum over the elements' bits, whatever their order and shape.

    Fused and split, sharded and whole tensors give the same sum, and zeros (padding)
    add nothing. Each element's bits go through the MurmurHash3 finalizer (fmix64,
    public domain), so that changes do not cancel out as in a plain sum.
    """
    import torch

    total = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        bits = flat.view(getattr(torch, f"int{8 * flat.element_size()}"))
        for chunk in bits.split(CHUNK):
            total += int(_mixed(chunk).sum().item())
    return total % (1 << 64)


def digests(
    tensors: Mapping[str, Tensor], by_content: Container[str], others: Iterable[Tensor]
) -> dict[str, str]:
    """The digest of each tensor; for names in ``by_content`` its checksum, in hex.

    ``others``, if there are any, share one checksum, under ``OTHERS``.
    """
    summed = {n: [tensor] for n, tensor in tensors.items() if n in by_content}
    if rest := list(others):
        summed[OTHERS] = rest
    exact = {n: tensor for n, tensor in tensors.items() if n not in by_content}
    sums = {name: f"{checksum(parts):016x}" for name, parts in summed.items()}
    return digest.digests(exact) | sums


def _mixed(bits: Tensor) -> Tensor:
    import torch

    mixed = bits.to(torch.int64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        # Signed arithmetic wraps like unsigned; only the shift differs.
        mixed = mixed ^ ((mixed >> 33) & 0x7FFFFFFF)
        mixed = mixed * (factor - (1 << 64))
    return mixed ^ ((mixed >> 33) & 0x7FFFFFFF)
