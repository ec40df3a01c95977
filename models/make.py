"""Makes the models that are tried: tiny, random ones of every text architecture."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from pytest_gkd.workload.models import shrink, tiny_text

SHAPES = Path(__file__).parent / "shapes.toml"


def shapes() -> dict[str, dict[str, Any]]:
    """Name of a model -> the values of its config that are its own."""
    found: dict[str, dict[str, Any]] = tomllib.loads(SHAPES.read_text())["model"]
    return found


def make(name: str, directory: Path, times: int = 1) -> Path:
    """Write the model ``name``, its tokenizer and config into ``directory``.

    With so many ``times`` the layers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    saved = shapes()[name].get("saved", {})
    torch.manual_seed(1)
    config = AutoConfig.for_model(**_deepened(values(name), times))
    dtype = getattr(torch, saved.get("dtype", "float32"))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.do_sample = False
    model.save_pretrained(directory, max_shard_size=saved.get("shard", "50GB"))
    for file, value in (
        ("tokenizer.json", tiny_text.tokenizer()),
        ("tokenizer_config.json", tiny_text.tokenizer_config()),
    ):
        (directory / file).write_text(json.dumps(value, ensure_ascii=False), "utf-8")
    _change(directory, saved)
    return directory


def _deepened(given: dict[str, Any], times: int) -> dict[str, Any]:
    layers = next(given[key] for key in shrink.DEPTHS if key in given)
    found = dict(given)
    for key, value in given.items():
        if key in shrink.DEPTHS:
            found[key] = value * times
        elif isinstance(value, list | str) and len(value) == layers:
            found[key] = value * times if key != "model_type" else value
    return found


def _change(directory: Path, saved: dict[str, Any]) -> None:
    """Do to a saved model what ``saved`` says.

    ``config`` and ``generation`` are keys to set in the two files, ``renamed`` keys of
    the config to rename; ``head`` adds the output matrix that is tied to the
    embedding, ``bin`` turns safetensors into a pickle.
    """
    from safetensors.torch import load_file, save_file
    from torch import save

    for file, part in (
        ("config.json", "config"),
        ("generation_config.json", "generation"),
    ):
        given = json.loads((directory / file).read_text("utf-8"))
        given |= saved.get(part, {})
        if part == "config":
            renamed = saved.get("renamed", {})
            given = {renamed.get(key, key): value for key, value in given.items()}
        (directory / file).write_text(json.dumps(given), "utf-8")
    weights_file = directory / "model.safetensors"
    if saved.get("head"):
        weights = load_file(weights_file)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, weights_file, {"format": "pt"})
    if saved.get("bin"):
        save(load_file(weights_file), directory / "pytorch_model.bin")
        weights_file.unlink()


def values(name: str) -> dict[str, Any]:
    """All that is given to the config: common values that it knows, and its own."""
    from transformers import AutoConfig

    own = dict(shapes()[name])
    own.pop("saved", None)
    model_type = own.pop("model_type", name)
    known = AutoConfig.for_model(model_type)
    ids = tiny_text.token_ids()
    common = tomllib.loads(SHAPES.read_text())["common"] | {
        "vocab_size": tiny_text.VOCAB_SIZE,
        "bos_token_id": ids[tiny_text.END_TOKEN],
        "eos_token_id": ids[tiny_text.END_TOKEN],
        "pad_token_id": ids[tiny_text.PAD_TOKEN],
    }
    names = common.keys() & {*known.to_dict(), *known.attribute_map}
    names -= set(own.pop("without", []))
    return {"model_type": model_type, **{n: common[n] for n in names}, **own}


def known(name: str, layout: str) -> dict[str, str] | None:
    """The failure of ``name`` in ``layout`` that is not ours, if there is one.

    ``stage`` fails, for ``cause`` where that is given; it is ``whose`` (vLLM or the
    model), and ``why`` in words.
    """
    entries: list[dict[str, Any]] = tomllib.loads(SHAPES.read_text()).get("known", [])
    for entry in entries:
        if entry["model"] == name and layout in entry.get("layouts", [layout]):
            return entry
    return None
