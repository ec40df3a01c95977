"""The made models and prompts: deterministic, kept, and remade when damaged."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fresh_python
import pytest

from pytest_gkd import files
from pytest_gkd.options import Settings
from pytest_gkd.workload.data import first_prompts
from pytest_gkd.workload.models import inputs, model_files, tiny, tiny_text


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pytest-gkd"


def manifest(made: tiny.Tiny) -> bytes:
    return (made.root / tiny.MANIFEST).read_bytes()


def test_the_same_bytes_come_out_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tiny.write(tmp_path / name)
    first, second = (tmp_path / n / tiny.MANIFEST for n in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_a_second_call_finds_the_first_ones_files(tmp_path: Path, cache: Path) -> None:
    made = tiny.make(tmp_path)
    assert made.root.parent == cache
    before = made.student.joinpath("model.safetensors").stat()
    tiny.make(tmp_path)
    after = made.student.joinpath("model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    made = tiny.make(tmp_path)
    whole = manifest(made)
    weights = made.teacher / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1  # same length, one bit
    weights.write_bytes(raw)
    assert not tiny.is_whole(made.root)
    again = tiny.make(tmp_path)
    assert tiny.is_whole(again.root)
    assert manifest(again) == whole


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", '{"x": 1}'])
def test_a_damaged_manifest_is_noticed(tmp_path: Path, text: str) -> None:
    made = tiny.make(tmp_path)
    (made.root / tiny.MANIFEST).write_text(text)
    assert not tiny.is_whole(made.root)
    assert tiny.is_whole(tiny.make(tmp_path).root)


def test_what_somebody_wrote_into_the_made_models_is_not_lost(tmp_path: Path) -> None:
    made = tiny.make(tmp_path)
    (made.student / "model.safetensors").write_bytes(b"trained for a night")
    (made.student / "checkpoint-5").mkdir()
    assert tiny.is_whole(tiny.make(tmp_path).root)
    (kept,) = made.root.parent.glob(f"{made.root.name}.changed-*")
    assert (kept / "student/model.safetensors").read_bytes() == b"trained for a night"
    assert (kept / "student/checkpoint-5").is_dir()


def test_a_cache_that_cannot_be_written_gives_way_to_the_callers_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("no directory can be made below a file, not even by root")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    made = tiny.make(tmp_path / "run")
    assert made.root.parent == tmp_path / "run"
    assert tiny.is_whole(made.root)


def test_a_relative_cache_variable_counts_as_unset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", "/home/x")
    assert files.cache_directory() == Path("/home/x/.cache/pytest-gkd")


def test_several_makers_at_once_leave_one_whole_result(
    tmp_path: Path, cache: Path
) -> None:
    with ThreadPoolExecutor(6) as pool:
        roots = set(pool.map(lambda _: tiny.make(tmp_path).root, range(6)))
    assert len(roots) == 1
    assert tiny.is_whole(roots.pop())
    assert len(list(cache.iterdir())) == 1  # no draft is left behind


@pytest.mark.needs("numpy", "safetensors", "tokenizers")
def test_making_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from pytest_gkd.workload.models import tiny; "
        f"tiny.make(pathlib.Path({str(tmp_path)!r})); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert fresh_python.output(code).strip() == "[]"


def test_prompts_are_distinct_and_shorter_than_promised(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    made = tiny.make(tmp_path)
    rows = [json.loads(line) for line in made.train_file.read_text().splitlines()]
    texts = [row["prompt"][0]["content"] for row in rows]
    assert len(set(texts)) == len(texts) == 288
    tokenizer = Tokenizer.from_file(str(made.student / "tokenizer.json"))
    longest = max(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))
    assert longest < 40  # and some 15 more for the chat template


def test_both_models_pass_our_own_inspection(tmp_path: Path) -> None:
    made = tiny.make(tmp_path)
    for directory in (made.student, made.teacher):
        found = model_files.inspect(str(directory), "test")
        assert found is not None
        assert model_files.vocab_size(found.config) == tiny_text.VOCAB_SIZE


def test_transformers_loads_the_student_and_its_greedy_tokens_are_no_near_ties(
    tmp_path: Path,
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    made = tiny.make(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.student)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        made.student, dtype=torch.float32
    )
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    tensors = {name for name, _ in model.named_parameters()}
    assert len(tensors) == 2 + 12 * model.config.num_hidden_layers
    job = inputs.resolve(Settings(), tmp_path)
    ids = first_prompts.prompt_ids(job, Settings(), 4)
    for prompt in ids:
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False
        )
        assert output.shape[1] == len(prompt) + 16  # no early end
        with torch.no_grad():
            top = model(output).logits[0, len(prompt) - 1 : -1].topk(2).values
        # 4.8e-6 is the largest difference measured between vLLM and transformers.
        assert (top[:, 0] - top[:, 1]).min() > 1e-3


def test_a_student_alone_teaches_itself(tmp_path: Path) -> None:
    job = inputs.resolve(Settings(student="/models/s"), tmp_path)
    assert job.teacher == "/models/s"
    assert job.made == ("teacher", "train_files")
    assert "itself" in job.why
    assert job.origin("student") == "--gkd-student"
    assert job.origin("teacher") == "made by pytest-gkd"


def test_nothing_is_made_when_everything_is_named(tmp_path: Path, cache: Path) -> None:
    settings = Settings(student="s", teacher="t", train_files=("f.jsonl",))
    job = inputs.resolve(settings, tmp_path)
    assert (job.student, job.teacher, job.train_files) == ("s", "t", ("f.jsonl",))
    assert job.made == ()
    assert not cache.exists()


def test_the_made_prompts_ignore_the_users_column(tmp_path: Path) -> None:
    settings = Settings(prompt_column="question")
    job = inputs.resolve(settings, tmp_path)
    assert job.prompt_column is None
    named = Settings(train_files=("f.jsonl",), prompt_column="question")
    assert inputs.resolve(named, tmp_path).prompt_column == "question"
