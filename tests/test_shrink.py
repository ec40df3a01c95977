"""Copies with fewer layers: which layers they have, their files, and who says so."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fresh_python
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from pytest_gkd import options
from pytest_gkd.options import Settings, SettingsError
from pytest_gkd.run import user_settings
from pytest_gkd.stage_api import StageContext, StageFault
from pytest_gkd.workload.layouts import random_weights, shrunk
from pytest_gkd.workload.models import shrink, tiny, tiny_text
from pytest_gkd.workload.models.inputs import Inputs

ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
Sizes = Mapping[str, tuple[str, list[int]]]


def dense(layers: int, stack: str = "model.layers", *kinds: str) -> dict[str, Any]:
    """Tensors of a model; the kinds of the layers take turns."""
    found = {"model.embed_tokens.weight": ("BF16", [8, 4])}
    for number in range(layers):
        kind = kinds[number % len(kinds)] if kinds else "mlp"
        found[f"{stack}.{number}.{kind}.weight"] = ("BF16", [4, 4])
        found[f"{stack}.{number}.norm.bias"] = ("F32", [3])
    return found | {"lm_head.weight": ("BF16", [8, 4])}


def model(directory: Path, sizes: Sizes, shards: int = 1, **config: Any) -> Path:
    """A model directory; each byte of a tensor tells which one it is of."""
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "config.json").write_text(json.dumps({"vocab_size": 8, **config}))
    names = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    where = {name: names[number % shards] for number, name in enumerate(sizes)}
    for file in names:
        header, data = {}, b""
        for number, (name, (dtype, shape)) in enumerate(sizes.items()):
            if where[name] == file:
                start = len(data)
                data += bytes([number + 1]) * (math.prod(shape) * ITEM_BYTES[dtype])
                place = {"shape": shape, "data_offsets": [start, len(data)]}
                header[name] = {"dtype": dtype, **place}
        raw = json.dumps(header).encode()
        (directory / file).write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    if shards > 1:
        index = json.dumps({"metadata": {}, "weight_map": where})
        (directory / "model.safetensors.index.json").write_text(index)
    return directory


def planned(source: Path, layers: int | None = None, **more: Any) -> shrink.ShrunkCopy:
    found = shrink.plan(source, "--gkd-student", layers, **{"random": False, **more})
    assert found is not None
    return found


def written(source: Path, layers: int | None = None) -> Path:
    copy = source.with_name("copy")
    copy.mkdir()
    planned(source, layers).write(copy)
    return copy


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


# -- weights -----------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_a_copy_has_the_bytes_of_the_first_layers_and_of_all_that_is_in_none(
    tmp_path: Path, shards: int
) -> None:
    sizes = dense(6) | {"model.norm.odd": ("F8_E4M3", [5])}
    source = model(tmp_path / "m", sizes, shards, num_hidden_layers=6)
    with safe_open(written(source, 2) / "model.safetensors", "pt") as copy:
        assert copy.metadata() == {"format": "pt"}
        kept = [n for n in sizes if not re.search(r"layers\.[2-5]\.", n)]
        assert sorted(copy.keys()) == sorted(kept)
        for name in kept:
            tensor = copy.get_slice(name)
            assert (tensor.get_dtype(), tensor.get_shape()) == sizes[name]
    raw = (source.with_name("copy") / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    del header["__metadata__"]
    for name, tensor in header.items():
        start, end = tensor["data_offsets"]
        assert set(raw[8 + length + start : 8 + length + end]) == {
            list(sizes).index(name) + 1
        }
        assert (8 + length + start) % ITEM_BYTES[tensor["dtype"]] == 0


def test_other_stacks_are_kept_whole_and_layers_that_draft_are_not(
    tmp_path: Path,
) -> None:
    drafts = {
        "mtp.layers.0.mlp.weight": ("F32", [4]),
        "model.layers.4.eh_proj.weight": ("F32", [4]),
    }
    sees = {f"vision_tower.layers.{n}.mlp": ("F32", [4]) for n in range(7)}
    few = {f"lm_heads.{n}.weight": ("F32", [4]) for n in range(3)}
    source = model(
        tmp_path / "m",
        dense(4) | drafts | sees | few,
        num_hidden_layers=4,
        num_nextn_predict_layers=1,
    )
    copy = written(source, 1)
    kept = set(load_names(copy))
    assert sees.keys() | few.keys() <= kept
    assert not kept & drafts.keys()
    assert config_of(copy)["num_nextn_predict_layers"] == 0


def load_names(copy: Path) -> list[str]:
    with safe_open(copy / "model.safetensors", "pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("stack", ["h", "transformer.h", "backbone.layers"])
def test_the_layers_may_have_any_name(tmp_path: Path, stack: str) -> None:
    source = model(tmp_path / "m", dense(5, stack), n_layer=5)
    copy = written(source, 1)
    assert {n for n in load_names(copy) if n.startswith(stack)} == {
        f"{stack}.0.mlp.weight",
        f"{stack}.0.norm.bias",
    }
    assert config_of(copy)["n_layer"] == 1


def test_tensors_that_do_not_show_the_layers_are_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "m", dense(3), num_hidden_layers=6)
    with pytest.raises(StageFault, match=r"has 6 layers .* model.layers 0 to 2") as one:
        planned(source, 2)
    assert one.value.cause == "checkpoint.mismatch"


def test_the_original_stays_as_it_is_and_its_tokenizer_is_linked(
    tmp_path: Path,
) -> None:
    source = model(tmp_path / "m", dense(4), 2, num_hidden_layers=4)
    (source / "pytorch_model.bin").write_bytes(b"x")
    (source / "modeling_own.py").touch()
    before = {path: path.read_bytes() for path in source.iterdir()}
    copy = written(source, 2)
    assert {path: path.read_bytes() for path in source.iterdir()} == before
    assert {path.name: path.is_symlink() for path in copy.iterdir()} == {
        "config.json": False,
        "model.safetensors": False,
        "modeling_own.py": True,
        "tokenizer.json": True,
    }


def test_a_disk_without_room_is_told_before_it_is_written_to(tmp_path: Path) -> None:
    with pytest.raises(StageFault, match=r"takes 4194304.0 GiB; copy fewer") as caught:
        shrink.check_space(tmp_path, 1 << 52)
    assert caught.value.cause == "env.disk-full"


# -- config ------------------------------------------------------------------------


def test_what_is_said_of_each_layer_is_cut_and_all_else_stays(tmp_path: Path) -> None:
    text = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding", "full", "sliding", "full"],
        "no_rope_layers": [1, 1, 1, 0],
        "hybrid_override_pattern": "M-M*",
        "hidden_act": "silu",
        "eos_token_id": [1, 2, 3, 4],
        "num_kv_shared_layers": 2,
        "num_experts": 4,
        "use_sliding_window": True,
        "max_window_layers": 3,
    }
    source = model(tmp_path / "m", dense(4), text_config=text, depths=[1, 2, 3, 4])
    copy = config_of(written(source, 3))
    assert copy["depths"] == [1, 2, 3, 4]
    assert copy["text_config"] == text | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding", "full", "sliding"],
        "no_rope_layers": [1, 1, 1],
        "hybrid_override_pattern": "M-M",
        "num_kv_shared_layers": 1,
        "max_window_layers": 2,
    }


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (2, {}),
        (4, {"first_k_dense_replace": 3}),
        (6, {"layer_types": [*["sliding"] * 5, "full"] * 4}),
        (6, {"sliding_window_pattern": 6}),
        (4, {"sliding_window_pattern": "LLLG"}),
        (10, {"attn_layer_indices": [9, 18]}),
        (2, {"decoder_sparse_step": 1, "mlp_only_layers": []}),
        (8, {"attn_layer_period": 8, "expert_layer_period": 2}),
    ],
)
def test_few_layers_are_as_many_as_have_every_kind_that_the_config_tells(
    tmp_path: Path, layers: int, said: dict[str, Any]
) -> None:
    source = model(tmp_path / "m", dense(24), num_hidden_layers=24, **said)
    assert planned(source).text == f"{layers} of 24 layers"


def test_few_layers_are_as_many_as_have_every_kind_of_tensors(tmp_path: Path) -> None:
    sizes = dense(24, "model.layers", "mamba", "mamba", "mamba", "attention")
    source = model(tmp_path / "m", sizes, num_hidden_layers=24)
    assert planned(source).layers == 4


def test_kinds_that_a_copy_lacks_are_told(tmp_path: Path) -> None:
    types = [*["sliding"] * 20, "full"]
    source = model(tmp_path / "m", dense(21), num_hidden_layers=21, layer_types=types)
    lacking = "2 of 21 layers (none of the kind of layer 20 (full))"
    assert planned(source).text == lacking
    assert planned(source, 20).text == lacking.replace("2 of", "20 of", 1)


def test_a_model_with_no_more_layers_is_not_copied(tmp_path: Path) -> None:
    source = model(tmp_path / "m", dense(2), num_hidden_layers=2)
    assert shrink.plan(source, "--gkd-student", None, random=False) is None
    assert shrink.plan(source, "--gkd-student", 3, random=False) is None
    assert planned(source, random=True).text == "2 of 2 layers, random weights"


def test_a_list_may_say_how_many_layers_there_are(tmp_path: Path) -> None:
    kinds = ["mamba", "mamba", "attention", "mamba"]
    source = model(tmp_path / "m", dense(4), layers_block_type=kinds)
    copy = config_of(written(source))
    assert copy == {"vocab_size": 8, "layers_block_type": kinds[:3]}


# -- what cannot be copied ---------------------------------------------------------


def refused(source: Path, *, random: bool = False) -> StageFault:
    with pytest.raises(StageFault) as caught:
        shrink.plan(source, "--gkd-student", 1, random=random)
    return caught.value


def test_a_config_without_layers_is_named(tmp_path: Path) -> None:
    fault = refused(model(tmp_path / "m", dense(2)))
    assert fault.cause == "config.missing-value"
    assert "no number of layers in config.json (num_hidden_layers, " in fault.message


def test_pickled_weights_are_refused_and_can_be_random(tmp_path: Path) -> None:
    source = model(tmp_path / "m", {}, num_hidden_layers=4)
    (source / "model-00001-of-00001.safetensors").rename(source / "pytorch_model.bin")
    fault = refused(source)
    assert fault.cause == "checkpoint.missing"
    assert "--gkd-shrink-weights=random" in fault.message
    assert planned(source, random=True).tensors is None


def test_random_weights_are_not_quantized(tmp_path: Path) -> None:
    quantized = {"quant_method": "gptq"}
    source = model(
        tmp_path / "m", dense(4), num_hidden_layers=4, quantization_config=quantized
    )
    assert planned(source, 1).layers == 1
    assert refused(source, random=True).cause == "vllm.quantization"


def test_an_embedding_that_all_layers_share_is_refused(tmp_path: Path) -> None:
    shared = {"hidden_size_per_layer_input": 4}
    source = model(tmp_path / "m", dense(4), num_hidden_layers=4, **shared)
    assert "an embedding that all layers share" in refused(source).message


# -- the option --------------------------------------------------------------------


@pytest.mark.parametrize("raw", ["few", "auto", "1", "80"])
def test_layers_are_a_number_or_a_word(raw: str) -> None:
    options.check_layers(raw, "--gkd-shrink")


@pytest.mark.parametrize("raw", ["0", "-2", "2.5", "random", "tests/"])
def test_other_layers_are_refused(raw: str) -> None:
    text = f"--gkd-shrink: {raw!r} is not a number of layers, few or auto"
    with pytest.raises(SettingsError, match=re.escape(text)):
        options.check_layers(raw, "--gkd-shrink")


def decided(shrink: str, student: Path | str, **more: Any) -> Settings:
    read = Settings(student=str(student), shrink=shrink, **more)
    return user_settings.decide_shrink(read, ("vllm", "training_step"))


def test_a_run_knows_beforehand_what_will_be_copied(tmp_path: Path) -> None:
    student = model(tmp_path / "s", dense(32), num_hidden_layers=32)
    found = decided("few", student)
    assert found.shrink == "few"
    assert found.shrink_why == (
        "vllm, weight_sync, training_step run on a copy of student and teacher with 2 "
        "of 32 layers, by --gkd-shrink"
    )
    teacher = model(tmp_path / "t", dense(80), num_hidden_layers=80)
    found = decided("4", student, teacher=str(teacher), shrink_weights="random")
    assert (
        "a copy of student with 4 of 32 layers, random weights, a copy of teacher with "
        "4 of 80 layers, random weights" in found.shrink_why
    )


def test_auto_leaves_models_that_fit(tmp_path: Path) -> None:
    found = decided("auto", model(tmp_path / "s", dense(32), num_hidden_layers=32))
    assert found.shrink is None
    assert found.shrink_why == "full models, by --gkd-shrink: by their files they fit"


def test_auto_copies_models_that_do_not_fit(tmp_path: Path) -> None:
    student = model(tmp_path / "s", dense(4), num_hidden_layers=4)
    file = student / "model-00001-of-00001.safetensors"
    raw = file.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    end = max(tensor["data_offsets"][1] for tensor in header.values())
    rows = 1 << 38
    for number in range(4):  # 1 TiB each, of a file without blocks
        start, end = end, end + 4 * rows
        place = {"shape": [rows, 2], "data_offsets": [start, end]}
        header[f"model.layers.{number}.wide"] = {"dtype": "BF16", **place}
    text = json.dumps(header).encode()
    with file.open("wb") as sparse:
        sparse.write(struct.pack("<Q", len(text)) + text)
        sparse.truncate(8 + len(text) + end)
    found = decided("auto", student)
    assert found.shrink == "few"
    assert re.search(
        r"with 2 of 4 layers, by --gkd-shrink: with "
        r"the full models vllm cannot fit, by the models' files: host memory has ",
        found.shrink_why,
    )


def test_what_cannot_be_told_beforehand_is_left_to_the_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked, shrink_is in (("few", "few"), ("auto", None)):
        found = decided(asked, tmp_path / "nowhere")
        assert found.shrink == shrink_is
        assert "nowhere does not exist" in found.shrink_why
    monkeypatch.setattr(user_settings, "SHRINK_S", 0.0)
    found = decided("few", tmp_path)
    assert found.shrink == "few"
    assert "could not be read in 0 s" in found.shrink_why


def test_the_flag_alone_means_few_and_the_header_says_what_it_comes_to(
    tmp_path: Path,
) -> None:
    model(tmp_path / "s", dense(32), num_hidden_layers=32)
    probe = tmp_path / "test_own.py"
    probe.write_text(
        "import pytest\n"
        "@pytest.mark.gkd_stage('own', timeout=60)\n"
        "def test_own(gkd):\n"
        "    assert gkd.settings.shrink == 'few'\n"
    )
    own = ("--gkd-stages=own", "--gkd-shrink", "--gkd-student=s", probe.name)
    done = fresh_python.run("-m", "pytest", *own, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "student and teacher with 2 of 32 layers, by --gkd-shrink" in done.stdout
    report = json.loads((tmp_path / ".gkd/last/report.json").read_text())
    assert "2 of 32 layers" in report["settings"]["shrink_why"]


# -- in a stage --------------------------------------------------------------------


def in_a_stage(tmp_path: Path, **settings: Any) -> StageContext:
    (tmp_path / "run").mkdir()
    return StageContext(Settings(**settings), tmp_path / "run", tmp_path / "report")


def test_models_of_one_directory_share_a_copy_that_is_made_once(tmp_path: Path) -> None:
    source = str(model(tmp_path / "s", dense(8), num_hidden_layers=8))
    gkd = in_a_stage(tmp_path, student=source, shrink="3")
    first = shrunk.inputs_of(gkd, Inputs(source, source, ("f",)))
    assert first.student == first.teacher != source
    assert first.train_files == ("f",)
    assert config_of(Path(first.student))["num_hidden_layers"] == 3
    assert gkd.facts["shrunk"] == "on a copy of student and teacher with 3 of 8 layers"
    weights = Path(first.student) / "model.safetensors"
    before = weights.stat()
    gkd.begin("weight_sync", None)
    assert shrunk.inputs_of(gkd, Inputs(source, source, ("f",))) == first
    assert weights.stat().st_ino == before.st_ino
    assert "shrunk" in gkd.facts


def test_each_model_has_a_copy_where_it_has_more_layers(tmp_path: Path) -> None:
    student = str(model(tmp_path / "s", dense(2), num_hidden_layers=2))
    teacher = str(model(tmp_path / "t", dense(8), num_hidden_layers=8))
    gkd = in_a_stage(tmp_path, student=student, teacher=teacher, shrink="few")
    found = shrunk.inputs_of(gkd, Inputs(student, teacher, ()))
    assert found.student == student
    assert config_of(Path(found.teacher))["num_hidden_layers"] == 2
    assert gkd.facts["shrunk"] == "on a copy of teacher with 2 of 8 layers"


def test_a_model_that_only_the_hub_has_is_not_copied(tmp_path: Path) -> None:
    gkd = in_a_stage(tmp_path, student="some/model", shrink="few")
    with pytest.raises(StageFault, match="some/model is not on this machine") as caught:
        shrunk.inputs_of(gkd, Inputs("some/model", "some/model", ()))
    assert caught.value.cause == "checkpoint.missing"


def test_without_the_option_nothing_is_copied(tmp_path: Path) -> None:
    given = Inputs("some/model", "some/model", ())
    assert shrunk.inputs_of(in_a_stage(tmp_path, student="s"), given) == given


def test_random_weights_are_those_of_the_config(tmp_path: Path) -> None:
    shape = dataclasses.replace(tiny.STUDENT, layers=3)
    source = tmp_path / "s"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(tiny.model_config(shape)))
    (source / "tokenizer.json").write_text(json.dumps(tiny_text.tokenizer()))
    gkd = in_a_stage(tmp_path, student=str(source), shrink="1", shrink_weights="random")
    found = shrunk.inputs_of(gkd, Inputs(str(source), str(source), ()))
    copy = load_file(Path(found.student) / "model.safetensors")
    layers = {name.split(".")[2] for name in copy if ".layers." in name}
    assert layers == {"0"}
    assert copy["model.embed_tokens.weight"].std() > 0
    again = tmp_path / "again"
    again.mkdir()
    planned(source, 1, random=True).write(again)
    random_weights.write(random_weights.Order(again, "float32", 7, False))
    other = load_file(again / "model.safetensors")
    assert other.keys() == copy.keys()
    name = "model.embed_tokens.weight"
    assert (other[name] != copy[name]).any()
