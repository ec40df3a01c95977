"""Checks that a name stands for a model, before anything heavy is imported.

A wrong path, a missing shard or a truncated file is reported in milliseconds, where an
engine would fail after half a minute, or less clearly.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gkd.checkpoint import text_part
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload import paths
from pytest_gkd.workload.models.model_paths import is_offline, locate, reach_hub
from pytest_gkd.workload.models.weight_files import check_weights, differ, tensors_named

# Any one of these holds a vocabulary that transformers can build a tokenizer from.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)


# Model types' names for the same thing (vLLM 0.32, model_arch_config_convertor.py).
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# The input embedding's name in the checkpoints of transformers' models.
_EMBEDDING = re.compile(
    r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight"
)
_HEAD = re.compile(r"(.*\.)?lm_head\.weight")
# Widths of latent attention (keys plus rotary part) that vLLM 0.32 can decode on a CPU
# (v1/attention/backends/mla/cpu_mla.py), and anywhere
# (layers/attention/mla_attention.py).
LATENT_WIDTHS = {"cpu": (576,), "cuda": (320, 512, 576)}
# Model types whose latent attention vLLM 0.32 runs as such (is_deepseek_mla in
# model_arch_config_convertor.py); it expands that of others (minicpm3) to heads.
LATENT_TYPES = {
    *("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
    *("deepseek_v41", "dots3_note", "deepseek_mtp", "k3_dspark", "glm5_next"),
    *("glm5_next_text", "glm_moe_dsa", "glm4_moe_lite", "glm4_moe_lite_mtp"),
    *("kimi_k2", "kimi_linear", "longcat_flash", "pangu_ultra_moe"),
    *("pangu_ultra_moe_mtp", "bailing_hybrid", "bailing_hybrid_mtp"),
    *("bailing_hybrid_v3_mtp", "hy_v4", "hy_v4_mtp"),
}


@dataclass(frozen=True)
class ModelFiles:
    """The contents of a model directory."""

    directory: Path
    config: dict[str, Any]
    weight_files: tuple[Path, ...]


def inspect(name: str, origin: str) -> ModelFiles | None:
    """Config, weights and tokenizer files of ``name``, checked.

    ``origin`` says where the name came from, such as ``--gkd-student``. None means that
    only the hub can tell: a hub id that is not or only partly in the cache. Raises
    StageFault ``checkpoint.missing``, ``checkpoint.corrupt``, ``tokenizer.load``,
    ``env.permission`` or ``env.hub-unreachable``.
    """
    found = locate(name, origin)
    if found is None:
        reach_hub(name, origin)
        return None
    try:
        config = read_config(found.directory, origin)
        weights = check_weights(found.directory, origin)
        check_tokenizer_files(found.directory, origin)
    except StageFault as fault:
        if found.from_hub and fault.facts.get("absent") and not is_offline():
            reach_hub(name, origin)  # for what is not here yet
            return None
        raise
    check_embedding(config, weights, origin)
    return ModelFiles(found.directory, config, weights)


def check_student(files: ModelFiles, origin: str, device: str) -> None:
    """Check that the student can be trained here, and served by vLLM meanwhile.

    Raises StageFault ``vllm.quantization``, ``env.package-missing`` or
    ``vllm.attention-backend``; an engine would fail after half a minute.
    """
    config = {**files.config, **text_part(files.config)}
    directory = files.directory
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        method = str(quantized.get("quant_method", "unnamed"))
        raise paths.fault(
            "vllm.quantization",
            directory,
            origin,
            f"is quantized ({method}): such weights cannot be trained in place, nor "
            "pushed to an engine; expected the unquantized checkpoint (a quantized "
            "teacher is fine)",
            quant_method=method,
            quantized_student=True,
        )
    # transformers' video processors all need torchvision, and vLLM serves the text
    # models of Qwen3.5 from the module of its vision-language ones.
    sees = [name for name in files.config if name.startswith("video_token_")]
    sees += [name for name in [str(config.get("model_type"))] if "qwen3_5" in name]
    if sees and importlib.util.find_spec("torchvision") is None:
        what = (
            f"is served by the code of a vision-language model ({sees[0]} in "
            "config.json), and torchvision, which that imports, is not installed"
        )
        facts = {"package": "torchvision"}
        raise paths.fault("env.package-missing", directory, origin, what, **facts)
    if not _has_latent_attention(config):
        return
    widths = [config.get(name) for name in ("kv_lora_rank", "qk_rope_head_dim")]
    latent = sum(width for width in widths if isinstance(width, int))
    known = LATENT_WIDTHS.get(device, LATENT_WIDTHS["cuda"])
    if all(widths) and latent not in known:
        raise StageFault(
            "vllm.attention-backend",
            f"{origin}: the latent attention of {directory} is {latent} wide "
            f"(kv_lora_rank {widths[0]} and qk_rope_head_dim {widths[1]}); vLLM has "
            f"it for {', '.join(map(str, known))} on this device",
            facts={"path": str(directory), "origin": origin, "head_size": latent},
        )


def _has_latent_attention(config: Mapping[str, Any]) -> bool:
    """Whether vLLM's latent attention decodes it, at the width that the config says.

    DeepSeek V4 has another width, ``head_dim``.
    """
    disabled = os.environ.get("VLLM_MLA_DISABLE", "0").strip() not in ("", "0")
    return (
        config.get("model_type") in LATENT_TYPES
        and "compress_ratios" not in config
        and not disabled
    )


def check_embedding(
    config: dict[str, Any], weights: Iterable[Path], origin: str
) -> None:
    """Check that the input embedding has as many rows as ``config`` says.

    Raises StageFault ``checkpoint.mismatch``.
    """
    rows = vocab_size(config)
    for tensor in tensors_named(_EMBEDDING, weights, origin):
        if rows is not None and tensor.shape[0] != rows:
            raise StageFault(
                "checkpoint.mismatch",
                f"{origin}: config.json says vocab_size {rows}, but {tensor.name} in "
                f"{tensor.path} has {tensor.shape[0]} rows; one of them is of another "
                "model, or the embedding was resized and the config kept",
                facts={
                    "path": str(tensor.path),
                    "origin": origin,
                    "vocab_size": rows,
                    "embedding_rows": tensor.shape[0],
                },
            )


def untied_head(files: ModelFiles, origin: str) -> str | None:
    """In words, that an output head is not a copy of the embedding it is tied to.

    None if the config does not say ``tie_word_embeddings``, or the weights hold only
    one of the two, or both with the same values (see ``weight_files.differ``).
    """
    said = [
        c.get("tie_word_embeddings") for c in (files.config, text_part(files.config))
    ]
    if next((one for one in said if one is not None), None) is not True:
        return None
    heads = tensors_named(_HEAD, files.weight_files, origin)
    embeddings = tensors_named(_EMBEDDING, files.weight_files, origin)
    if len(heads) != 1 or len(embeddings) != 1 or not differ(heads[0], embeddings[0]):
        return None
    return (
        f"{origin}: config.json of {files.directory} says tie_word_embeddings, but "
        f"{heads[0].name} in {heads[0].path.name} is not {embeddings[0].name}. "
        "transformers 5 and vLLM since 0.29 take the head that is there, others take "
        "the embedding in its place, so that a job can train one model and serve "
        "another. Set tie_word_embeddings to false, or drop the head from the weights."
    )


def positions(config: Mapping[str, Any]) -> int | None:
    """The number of positions of the model of ``config``, None if unspecified."""
    found = [config[name] for name in POSITIONS if isinstance(config.get(name), int)]
    return min(found, default=None)


def context_tokens(name: str, origin: str) -> int | None:
    """Tokens that fit in the model's context, before any scaling of its positions.

    None if unknown: a model on the hub, one without a limit, or one whose rotary
    positions are scaled.
    """
    found = locate(name, origin)
    if found is None or not (found.directory / "config.json").is_file():
        return None
    config = read_config(found.directory, origin)
    config = {**config, **text_part(config)}
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return None if "factor" in json.dumps(rope) else positions(config)


def read_config(directory: Path, origin: str) -> dict[str, Any]:
    """``config.json`` of the directory, as an object.

    Raises StageFault ``checkpoint.missing`` or ``checkpoint.corrupt``.
    """
    path = directory / "config.json"
    adapter = directory / "adapter_config.json"
    if adapter.is_file() and not path.is_file():
        settings = _read_object(adapter, origin, "checkpoint.corrupt")
        base = settings.get("base_model_name_or_path") or "an unnamed model"
        what = (
            f"holds a LoRA adapter of {base}, and not a model; expected the adapter "
            "merged into its base, or the base"
        )
        raise paths.fault(
            "checkpoint.missing", directory, origin, what, adapter_of=str(base)
        )
    if not path.is_file():
        deeper = sorted(str(found.parent) for found in directory.glob("*/config.json"))
        names = sorted(entry.name for entry in directory.iterdir())
        found_text = ", ".join(names[:6]) or "nothing"
        near = paths.did_you_mean(deeper[:3])
        raise paths.fault(
            "checkpoint.missing",
            directory,
            origin,
            f"has no config.json; found {found_text}{near}",
            found=names[:20],
            near=deeper[:3],
            absent=True,
        )
    return _read_object(path, origin, "checkpoint.corrupt")


def check_tokenizer_files(directory: Path, origin: str) -> None:
    """The files that hold the vocabulary, checked without parsing.

    Raises StageFault ``tokenizer.load`` if there is none, or one is empty, truncated or
    a git-lfs pointer.
    """
    named = (directory / name for name in TOKENIZER_FILES)
    found = [path for path in named if path.is_file()]
    found += sorted(directory.glob("*.tiktoken"))
    config: dict[str, Any] = {}
    settings = directory / "tokenizer_config.json"
    if settings.is_file():
        config = _read_object(settings, origin, "tokenizer.load")
    if not found and not config.get("auto_map"):
        names = sorted(entry.name for entry in directory.iterdir())
        what = f"has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}"
        raise paths.fault(
            "tokenizer.load", directory, origin, what, found=names[:20], absent=True
        )
    for path in found:
        problem = _outside(path, origin)
        if problem:
            raise paths.fault(
                "tokenizer.load",
                path,
                origin,
                problem,
                path=str(directory),
                file=path.name,
                size_bytes=path.stat().st_size,
            )


def has_processor(directory: Path) -> bool:
    """Whether there is an image or audio processor next to the tokenizer."""
    names = ("processor_config.json", "preprocessor_config.json")
    return any((directory / name).is_file() for name in names)


def vocab_size(config: dict[str, Any]) -> int | None:
    """Embedding rows: those of a multimodal model's text part, or of the config."""
    for part in (config.get("text_config"), config.get("llm_config"), config):
        if isinstance(part, dict) and isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None


def end_tokens(directory: Path, origin: str) -> frozenset[int]:
    """Ids of the end tokens named in ``generation_config.json`` or ``config.json``."""
    names = ("generation_config.json", "config.json")
    found: set[int] = set()
    for path in (directory / name for name in names):
        if path.is_file():
            named = _read_object(path, origin, "checkpoint.corrupt").get("eos_token_id")
            several = named if isinstance(named, list) else [named]
            found.update(one for one in several if isinstance(one, int))
    return frozenset(found)


def _outside(path: Path, origin: str) -> str:
    """What is wrong with a vocabulary file, without parsing it; empty if nothing."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64))
            end = file.read().rstrip()
    except PermissionError as error:
        raise paths.denied(path, origin, error) from error
    if not start:
        return "is empty"
    if paths.is_lfs_pointer(start):
        return "is a git-lfs pointer, not the file itself"
    if path.suffix == ".json":
        if not start.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{"):
            return f"is not a JSON object: it starts with {start[:16]!r}"
        if not end.endswith(b"}"):
            return f"is cut off: it ends with {end[-16:]!r} instead of a closing brace"
    return ""


def _read_object(path: Path, origin: str, cause: str) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except PermissionError as error:
        raise paths.denied(path, origin, error) from error
    if paths.is_lfs_pointer(raw):
        raise paths.fault(cause, path, origin, "is a git-lfs pointer")
    try:
        value = json.loads(raw)
    except json.JSONDecodeError as error:
        line = error.lineno
        text = error.doc.splitlines()[line - 1 : line]
        raise StageFault(
            cause,
            f"{origin}: {path}:{line} is not JSON: {error.msg}",
            facts={"path": str(path), "origin": origin, "line": line},
            evidence=tuple((str(path), line, one[:200]) for one in text),
        ) from error
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text: {error}"
        raise paths.fault(cause, path, origin, what) from error
    if not isinstance(value, dict):
        what = f"holds a JSON {type(value).__name__}; expected an object"
        raise paths.fault(cause, path, origin, what)
    return value
