"""A causal model's forward pass, to the logits that predict a response."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from collections.abc import Sequence as Listing
from typing import TYPE_CHECKING, Any

from pytest_gkd.processes import background
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.engine import load_times
from pytest_gkd.workload.engine.load_times import GB
from pytest_gkd.workload.gkd.batch import Batch, Sequence

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def load_model(
    path: str, *, device: str, dtype: str, trust_remote_code: bool = False
) -> Any:
    """The transformers model at ``path``, on ``device``, without dropout.

    ``dtype`` is a torch name (``bfloat16``). Raises StageFault ``checkpoint.mismatch``
    if weights are missing or have another shape: transformers would fill them with
    random numbers and only warn. Its ``gkd_load_facts`` say how long that took, in
    seconds, how many of ``load_s`` were spent waiting for the disk (``read_s``), and
    GB.
    """
    import torch
    from transformers import AutoConfig

    disk, started = load_times.disk_bytes(), time.perf_counter()
    waits = load_times.DiskWaits()
    with background.every(waits.EVERY_S, "gkd-disk-waits", waits.look):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        model, info = model_class(config).from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        for tensor in (held := [*model.parameters(), *model.buffers()]):
            if tensor.device.type == "cpu":
                load_times.touch(tensor)  # counts as reading, not as moving
    read = time.perf_counter()
    missing = sorted(info["missing_keys"])
    # transformers 4 lists (name, shape, shape), 5 a set of the same.
    mismatched = sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if missing or mismatched:
        kind, names = ("missing", missing) if missing else ("misshapen", mismatched)
        raise StageFault(
            "checkpoint.mismatch",
            f"{len(names)} weights of {path} are {kind}, {names[0]} first; expected "
            f"every weight that {type(model).__name__} has",
            facts={
                "path": path,
                "missing": missing[:10],
                "mismatched": mismatched[:10],
            },
        )
    # No dropout: only the update may change the loss of a repeated batch.
    model = model.to(device).eval()
    model.gkd_load_facts = {
        "load_s": round(read - started, 2),
        "read_s": round(waits.seconds, 2),
        "move_s": round(time.perf_counter() - read, 2),
        "load_gb": round(sum(tensor.nbytes for tensor in held) / GB, 3),
        "load_from_disk_gb": round((load_times.disk_bytes() - disk) / GB, 3),
    }
    return model


def model_class(config: Any) -> Any:
    """The auto class for ``config``: a vision-language model is not a CausalLM."""
    import transformers

    if (
        type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        and type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    ):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def coarsest_dtype(model: Any) -> torch.dtype:
    """The coarsest floating-point dtype among the parameters, float32 without one.

    Quantized storage types do not count: a model does not compute in them.
    """
    import torch

    found = {parameter.dtype for parameter in model.parameters()}
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in found:
            return dtype
    return torch.float32


def embedding_rows(model: Any) -> int:
    """How many token ids ``model`` accepts: the rows of its input embedding."""
    return int(model.get_input_embeddings().weight.shape[0])


def check_ids(sequences: Listing[Sequence], rows: int, model: str) -> None:
    """Check that every token id is below ``rows``, the embedding of ``model`` (a name).

    Raises StageFault ``tokenizer.vocab-mismatch``; on a GPU the alternative is a
    device-side assertion that names neither id nor model.
    """
    for row, sequence in enumerate(sequences):
        for token in (*sequence.prompt_ids, *sequence.response_ids):
            if not 0 <= token < rows:
                raise StageFault(
                    "tokenizer.vocab-mismatch",
                    f"token id {token} of sequence {row} is outside the {model}'s "
                    f"embedding; expected 0 to {rows - 1}",
                    facts={"token_id": token, "embedding_rows": rows, "model": model},
                )


def pad_token_id(model: Any) -> int:
    """The model's padding token, or 0: some models have none, some say -1."""
    token = getattr(model.config, "pad_token_id", None)
    return token if isinstance(token, int) and 0 <= token < embedding_rows(model) else 0


def last_logits(model: Any, count: int, **inputs: Tensor) -> Tensor:
    """Logits [batch, tokens, vocab] of the last ``count`` tokens, or of more.

    A long prompt's logits are the largest tensor of all, and nobody reads them; a model
    that cannot omit them returns all.
    """
    import inspect

    wanted = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        wanted["logits_to_keep"] = count
    logits: Tensor = model(**inputs, use_cache=False, **wanted).logits
    return logits


def response_logits(model: Any, batch: Batch) -> Tensor:
    """Logits [batch, response, vocab] that predict ``batch.response_ids``.

    In the model's dtype and with gradients if these are enabled. Entries outside
    ``batch.mask`` are copied from a valid position and mean nothing.
    """
    import torch

    device = next(model.parameters()).device
    tokens = int(batch.input_ids.shape[1])
    logits = last_logits(
        model,
        tokens - int(batch.positions.min()),
        input_ids=torch.from_numpy(batch.input_ids).to(device),
        attention_mask=torch.from_numpy(batch.attention_mask).to(device),
    )
    skipped = tokens - logits.shape[1]
    positions = torch.from_numpy(batch.positions).to(device) - skipped
    rows = torch.arange(positions.shape[0], device=device)[:, None]
    return logits[rows, positions]


@contextlib.contextmanager
def participants(model: Any) -> Iterator[set[str]]:
    """Yields the names of the parameters whose own module took part in a forward pass
    inside ``with``."""
    names: set[str] = set()
    handles = []
    for prefix, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(prefix, recurse=False)]
        handles.append(
            module.register_forward_hook(lambda *_, own=own: names.update(own))
        )
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()
