"""What is found wrong with a model directory before anything heavy is imported."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import fresh_python
import pytest

from pytest_gkd.options import Settings
from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.data import lengths
from pytest_gkd.workload.models import model_files, model_paths, tokenizer_load
from pytest_gkd.workload.models.inputs import Inputs, prompt_limit


@pytest.fixture(autouse=True)
def no_hub_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def fault_of(name: Path | str) -> StageFault:
    with pytest.raises(StageFault) as caught:
        model_files.inspect(str(name), "--gkd-student")
    assert str(name) in caught.value.message or "model" in caught.value.message
    assert caught.value.message.startswith("--gkd-student: ")
    json.dumps(caught.value.facts)
    return caught.value


def shard(model: Path, count: int = 2) -> list[Path]:
    """The weights as numbered shards, each a valid file, without an index."""
    single = model / "model.safetensors"
    paths = [
        model / f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)
    ]
    for path in paths:
        shutil.copy(single, path)
    single.unlink()
    return paths


def change(model: Path, **values: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_lora_adapter_is_called_one(model: Path) -> None:
    (model / "config.json").unlink()
    adapter = {"base_model_name_or_path": "org/base", "r": 8}
    (model / "adapter_config.json").write_text(json.dumps(adapter))
    found = fault_of(model)
    assert found.cause == "checkpoint.missing"
    assert "holds a LoRA adapter of org/base, and not a model" in found.message


def test_an_embedding_of_another_size_than_the_config_says_is_found(
    model: Path,
) -> None:
    change(model, vocab_size=600)
    found = fault_of(model)
    assert found.cause == "checkpoint.mismatch"
    assert "vocab_size 600, but model.embed_tokens.weight" in found.message


def add_head(model: Path, *, changed_at: int | None = None) -> None:
    """A copy of the embedding as output head, with one byte of another value."""
    path = model / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    embedding = header["model.embed_tokens.weight"]
    start, end = embedding["data_offsets"]
    head = bytearray(data[start:end])
    if changed_at is not None:
        head[changed_at] ^= 1
    offsets = [len(data), len(data) + len(head)]
    header["lm_head.weight"] = embedding | {"data_offsets": offsets}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data + head)


def untied(model: Path) -> str | None:
    files = model_files.inspect(str(model), "--gkd-student")
    assert files is not None
    return model_files.untied_head(files, "--gkd-student")


@pytest.mark.parametrize("place", [0, 100_000, -1])
def test_a_head_of_its_own_in_a_model_that_ties_it_is_told(
    model: Path, place: int
) -> None:
    assert untied(model) is None
    shutil.copy(model / "model.safetensors", model / "before")
    add_head(model)
    assert untied(model) is None  # a copy, as many tools write it
    shutil.move(model / "before", model / "model.safetensors")
    add_head(model, changed_at=place)
    text = untied(model)
    assert text is not None
    assert "--gkd-student: config.json of " in text
    assert "lm_head.weight in model.safetensors is not model.embed_tokens.we" in text
    change(model, tie_word_embeddings=False)
    assert untied(model) is None
    change(model, tie_word_embeddings=None, text_config={"tie_word_embeddings": True})
    assert untied(model) == text


def student_fault(model: Path, device: str = "cpu", **values: object) -> StageFault:
    change(model, **values)
    files = model_files.inspect(str(model), "x")
    assert files is not None
    with pytest.raises(StageFault) as caught:
        model_files.check_student(files, "--gkd-student", device)
    return caught.value


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_a_quantized_student_is_refused_before_an_engine_starts(
    model: Path, method: str
) -> None:
    found = student_fault(model, quantization_config={"quant_method": method})
    assert found.cause == "vllm.quantization"
    assert f"is quantized ({method})" in found.message


def test_a_model_that_needs_torchvision_says_so(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = student_fault(model, video_token_id=7)
    assert (found.cause, found.facts["package"]) == (
        "env.package-missing",
        "torchvision",
    )


def test_latent_attention_of_a_width_that_vllm_lacks_is_named(model: Path) -> None:
    change(model, model_type="deepseek_v3")
    found = student_fault(model, kv_lora_rank=32, qk_rope_head_dim=16)
    assert found.cause == "vllm.attention-backend"
    assert "is 48 wide" in found.message
    found = student_fault(model, kv_lora_rank=256, qk_rope_head_dim=64)
    assert "vLLM has it for 576 on this device" in found.message
    files = model_files.inspect(str(model), "x")
    assert files is not None
    model_files.check_student(files, "x", "cuda")


@pytest.mark.parametrize(
    ("values", "variable"),
    [
        ({"model_type": "minicpm3"}, None),  # vLLM runs it with plain attention
        ({"model_type": "deepseek_v3"}, "1"),
        ({"model_type": "deepseek_v4", "compress_ratios": [4]}, None),
    ],
)
def test_latent_widths_are_judged_only_where_vllm_has_latent_attention(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, object],
    variable: str | None,
) -> None:
    if variable:
        monkeypatch.setenv("VLLM_MLA_DISABLE", variable)
    change(model, kv_lora_rank=256, qk_rope_head_dim=32, **values)
    files = model_files.inspect(str(model), "x")
    assert files is not None
    model_files.check_student(files, "x", "cpu")


def test_the_model_types_of_latent_attention_are_those_of_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    package = Path(spec.submodule_search_locations[0])
    source = package / "transformers_utils" / "model_arch_config_convertor.py"
    (function,) = (
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "is_deepseek_mla"
    )
    listed = next(node for node in ast.walk(function) if isinstance(node, ast.Tuple))
    assert set(ast.literal_eval(listed)) == model_files.LATENT_TYPES


def test_the_context_is_unknown_where_positions_are_scaled(model: Path) -> None:
    change(model, max_position_embeddings=512)
    assert model_files.context_tokens(str(model), "x") == 512
    change(model, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert model_files.context_tokens(str(model), "x") is None


def test_prompts_leave_room_for_an_answer_in_the_context(model: Path) -> None:
    change(model, max_position_embeddings=64)
    job = Inputs(str(model), str(model), ())
    default = Settings(max_new_tokens=16)
    assert prompt_limit(job, default) == 48
    lengths.check_context(job, default, 48)
    named = Settings(max_prompt_length=60, max_new_tokens=16)
    lengths.check_context(job, named, 40)
    with pytest.raises(
        StageFault, match="does not fit into the student's context"
    ) as e:
        lengths.check_context(job, named, 50)
    assert e.value.cause == "data.too-long"


def test_a_whole_model_is_described(model: Path) -> None:
    found = model_files.inspect(str(model), "--gkd-student")
    assert found is not None
    assert found.weight_files == (model / "model.safetensors",)
    assert found.config["model_type"] == "qwen2"


def test_a_missing_directory_is_named_with_its_near_neighbour(model: Path) -> None:
    fault = fault_of(model.parent / "modle")
    assert fault.cause == "checkpoint.missing"
    assert fault.facts["near"] == [str(model)]
    assert str(model) in fault.message


def test_the_first_part_of_a_path_that_is_missing_is_named(tmp_path: Path) -> None:
    fault = fault_of(tmp_path / "gone" / "deep" / "model")
    assert f"nor does {tmp_path / 'gone'}" in fault.message


def test_a_link_to_nowhere_is_called_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    assert f"is a link to {tmp_path / 'target'}" in fault_of(link).message


def test_a_file_is_not_a_model(model: Path) -> None:
    fault = fault_of(model / "config.json")
    assert fault.cause == "checkpoint.missing"
    assert "is a file" in fault.message


def test_a_directory_above_the_model_points_to_it(model: Path) -> None:
    fault = fault_of(model.parent)
    assert fault.cause == "checkpoint.missing"
    assert fault.facts["near"] == [str(model)]


def test_an_unparsable_config_is_named_by_line(model: Path) -> None:
    (model / "config.json").write_text('{\n "a": 1,\n oops\n}')
    fault = fault_of(model)
    assert fault.cause == "checkpoint.corrupt"
    assert fault.evidence == ((str(model / "config.json"), 3, " oops"),)


def test_no_weights_says_what_lies_there_instead(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model_world_size_8_rank_0.pt").write_bytes(b"x")
    fault = fault_of(model)
    assert fault.cause == "checkpoint.missing"
    assert "FSDP" in fault.message


def test_a_truncated_safetensors_file_is_told_with_both_sizes(model: Path) -> None:
    path = model / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    fault = fault_of(model)
    assert fault.cause == "checkpoint.corrupt"
    assert fault.facts["size_bytes"] == size - 1
    assert fault.facts["expected_bytes"] == size


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "0 bytes"),
        (b"1234", "4 bytes"),
        (struct.pack("<Q", 1000) + b"{}", "inside its header"),
        (b"<html>not found</html>", "not a safetensors file"),
        (struct.pack("<Q", 4) + b"oops", "no readable header"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "no readable header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git-lfs"),
    ],
)
def test_what_is_no_safetensors_file_is_called_corrupt(
    model: Path, content: bytes, part: str
) -> None:
    (model / "model.safetensors").write_bytes(content)
    fault = fault_of(model)
    assert fault.cause == "checkpoint.corrupt"
    assert part in fault.message


def test_a_shard_that_the_others_names_promise_is_missed(model: Path) -> None:
    shards = shard(model, 3)
    shards[1].unlink()
    fault = fault_of(model)
    assert fault.cause == "checkpoint.missing"
    assert str(shards[1]) in fault.message


def test_a_shard_that_the_index_names_is_missed(model: Path) -> None:
    shards = shard(model)
    index = {"weight_map": {"a": shards[0].name, "b": "model-other.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    fault = fault_of(model)
    assert fault.cause == "checkpoint.missing"
    assert "model-other.safetensors" in fault.message


def test_a_damaged_index_is_corrupt(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weights": {}}')
    assert fault_of(model).cause == "checkpoint.corrupt"


def test_a_truncated_pytorch_file_is_found_without_torch(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + b"\0" * 100)
    fault = fault_of(model)
    assert fault.cause == "checkpoint.corrupt"
    assert "truncated" in fault.message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is empty"),
        (b'{"version": "1.0", "model": {"vo', "cut off"),
        (b"<!DOCTYPE html>", "not a JSON object"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"),
    ],
)
def test_a_broken_tokenizer_file_is_found_from_outside(
    model: Path, content: bytes, part: str
) -> None:
    (model / "tokenizer.json").write_bytes(content)
    fault = fault_of(model)
    assert fault.cause == "tokenizer.load"
    assert part in fault.message


def test_a_model_without_a_tokenizer_says_which_files_would_do(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    fault = fault_of(model)
    assert fault.cause == "tokenizer.load"
    assert "tokenizer.model" in fault.message


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Something that takes connections where the hub is thought to be."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("NO_PROXY", "*")
        yield


@pytest.mark.usefixtures("hub")
def test_a_hub_id_that_is_not_cached_is_left_to_the_hub() -> None:
    assert model_files.inspect("org/name", "--gkd-student") is None


def test_a_hub_id_that_is_not_cached_fails_when_offline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fault_of("org/model").cause == "env.hub-unreachable"


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("asks", ["files", "tokenizer"])
def test_a_hub_id_is_refused_at_once_where_nothing_listens(
    monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    """The loaders would try again and again, for 23 s."""

    def ask() -> object:
        if asks == "files":
            return model_files.inspect("org/model", "--gkd-student")
        return tokenizer_load.load(
            "org/model", "--gkd-student", trust_remote_code=False
        )

    def told() -> str:
        with pytest.raises(StageFault) as caught:
            ask()
        assert caught.value.cause == "env.hub-unreachable"
        return caught.value.message

    hub = f"http://127.0.0.1:{closed_port()}"
    monkeypatch.setenv("HF_ENDPOINT", hub)
    assert told().startswith(
        f"--gkd-student: org/model is not here, and the hub {hub} cannot be reached: "
    )
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("http_proxy", f"http://user:secret@127.0.0.1:{closed_port()}")
    assert "by way of the proxy 127.0.0.1 cannot be reached: " in told()


def test_one_address_that_answers_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where IPv6 leads nowhere."""
    over = threading.Event()

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] == "2001:db8::1":
            over.wait(30)
            raise TimeoutError("timed out")
        return socket.socket()

    found = [(0, 0, 0, "", (host, 443)) for host in ("2001:db8::1", "192.0.2.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_connection", connect)
    assert model_paths.refused_connection("hub.example", 443) == ""
    over.set()


def test_an_address_that_never_answers_has_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a name server that drops what it is asked."""
    asked = threading.Event()
    monkeypatch.setattr(model_paths, "REACH_S", 0.1)

    def drop(*_: object, **__: object) -> None:
        asked.wait(30)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", drop)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("NO_PROXY", "*")
    with pytest.raises(StageFault, match=r"no answer in 0\.1 s"):
        model_paths.reach_hub("org/model", "--gkd-student")
    asked.set()


def test_a_relative_path_beside_real_directories_is_no_hub_id(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent.parent)
    fault = fault_of(f"{model.parent.name}/modell")
    assert fault.cause == "checkpoint.missing"
    assert fault.facts["near"] == [str(model)]


def cached(model: Path, tmp_path: Path) -> Path:
    home = tmp_path / "hub" / "models--org--name"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc")
    (home / "snapshots").mkdir()
    return Path(shutil.copytree(model, home / "snapshots" / "abc"))


def test_a_cached_hub_id_is_inspected_in_the_cache(model: Path, tmp_path: Path) -> None:
    snapshot = cached(model, tmp_path)
    found = model_files.inspect("org/name", "--gkd-student")
    assert found is not None
    assert found.directory == snapshot


@pytest.mark.usefixtures("hub")
def test_a_cached_hub_id_without_weights_is_left_to_the_hub_unless_offline(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cached(model, tmp_path) / "model.safetensors").unlink()
    assert model_files.inspect("org/name", "--gkd-student") is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StageFault) as caught:
        model_files.inspect("org/name", "--gkd-student")
    assert caught.value.cause == "checkpoint.missing"


def test_embedding_rows_are_found_in_a_multimodal_config() -> None:
    assert model_files.vocab_size({"text_config": {"vocab_size": 7}}) == 7
    assert model_files.vocab_size({"vocab_size": 5, "text_config": {}}) == 5
    both = {"vocab_size": 5, "text_config": {"vocab_size": 7}}
    assert model_files.vocab_size(both) == 7
    assert model_files.vocab_size({}) is None


def test_inspection_imports_nothing_but_the_standard_library(whole: Path) -> None:
    code = (
        "import sys; from pytest_gkd.workload.data import train_files; "
        "from pytest_gkd.workload.models import model_files; "
        f"model_files.inspect({str(whole)!r}, 'x'); "
        "heavy = {'torch', 'numpy', 'safetensors', 'transformers', 'datasets'}; "
        "print(sorted(heavy & sys.modules.keys()))"
    )
    assert fresh_python.output(code).strip() == "[]"
