"""Models that a job names, as they lie on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd import hub_cache
from pytest_gkd.job import check, model_files

WORDS = {f"w{number}": number for number in range(1000)}


def model(place: Path, words: Any = None, **config: Any) -> Path:
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    if words is not None:
        file = {
            "model": {"vocab": words},
            "added_tokens": [{"id": 1000, "content": "<e>"}],
        }
        (place / "tokenizer.json").write_text(json.dumps(file))
    return place


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with a model org/name in it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub/models--org--name"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text("abc\n")
    return model(place / "snapshots/abc", vocab_size=7)


def test_a_name_is_a_directory_or_in_the_hubs_cache(
    tmp_path: Path, cache: Path
) -> None:
    here = model(tmp_path / "job/models/m", text_config={"vocab_size": 5})
    assert model_files.directory(str(here)) == here
    assert model_files.vocabulary("models/m", tmp_path / "job") == 5
    assert model_files.directory("org/name") == cache
    assert model_files.vocabulary("org/name") == 7


@pytest.mark.parametrize(
    "name", ["", None, ["a"], "org/other", "a\0b", "~nobody/m", "/x"]
)
def test_what_is_not_here_has_no_files(name: Any, cache: Path) -> None:
    assert model_files.directory(name) is None
    assert model_files.config(name) == {}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"vocab_size": true}', "[" * 100_000])
def test_a_config_that_cannot_be_read_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert model_files.vocabulary(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("words", "says", "in_earnest"),
    [
        (WORDS, "", False),
        ([[word, 0.0] for word in WORDS], "", False),  # as Unigram models have it
        (WORDS | {"more": 2000}, "", False),
        (WORDS | {"w3": 1500}, "1 of the student's 1001 tokens", False),
        ({f"w{n}": n + 1 for n in range(1000)}, "'w0' (0 against 1)", True),
        ({"x": 0}, "(0 against none)", True),
        ("no vocabulary", "", False),
    ],
)
def test_tokenizers_are_held_together_by_their_ids(
    words: Any, says: str, in_earnest: bool, tmp_path: Path
) -> None:
    student = model(tmp_path / "student", WORDS)
    teacher = model(tmp_path / "teacher", words, of="another")
    said = model_files.other_tokenizer(str(student), str(teacher))
    assert (says in said[0], bool(said[0]), said[1]) == (True, bool(says), in_earnest)


START = """\
python3 -m verl.trainer.main_ppo distillation.enabled=True \\
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.actor.use_dynamic_bsz=True \\
  actor_rollout_ref.model.path={0}/student \\
  distillation.teacher_models.teacher_model.model_path={0}/teacher
"""


@pytest.mark.parametrize(("shift", "level"), [(0, None), (1, "error")])
def test_a_teacher_of_another_tokenizer_is_told_of_verls(
    shift: int, level: str | None, tmp_path: Path
) -> None:
    model(tmp_path / "student", WORDS)
    model(tmp_path / "teacher", {w: n + shift for w, n in WORDS.items()}, of="another")
    (tmp_path / "run.sh").write_text(START.format(tmp_path))
    found = check.check(tmp_path / "run.sh", [], "verl==0.9.1").findings
    told = [f.level for f in found if f.cause == "tokenizer.vocab-mismatch"]
    assert told == ([level] if level else [])
    alone = START.format(tmp_path).replace("enabled=True", "enabled=False")
    (tmp_path / "run.sh").write_text(alone)
    found = check.check(tmp_path / "run.sh", [], "verl==0.9.1").findings
    assert "tokenizer.vocab-mismatch" not in {f.cause for f in found}


HUB = "models--org--tiny-1.5b"
PLACES = {
    "HF_HOME": f"hub/{HUB}/snapshots/abc",
    "HF_HUB_CACHE": f"{HUB}/snapshots/abc",
    "HUGGINGFACE_HUB_CACHE": f"{HUB}/snapshots/abc",
    "XDG_CACHE_HOME": f"huggingface/hub/{HUB}/snapshots/abc",
    "MODELSCOPE_CACHE": "models/org/tiny-1___5b",
}
FROM_HUB = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=org/tiny-1.5b "
    "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.name=vllm\n"
)


def cached(cache: Path, place: str) -> None:
    (cache / place).mkdir(parents=True)
    (cache / place / "config.json").write_text("{}")
    if HUB in place:
        refs = cache / place.partition(HUB)[0] / HUB / "refs"
        refs.mkdir()
        (refs / "main").write_text("abc\n")


def is_found(folder: Path, script: str, **given: str) -> bool:
    (folder / "run.sh").write_text(script)
    found = check.check(folder / "run.sh", framework="verl==0.9.1", given=given)
    return "has no config.json here" not in found.no_memory_plan


@pytest.mark.parametrize("variable", PLACES)
def test_a_model_is_looked_up_in_the_cache_that_the_script_names(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PLACES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "empty"))
    cached(tmp_path / "cache", PLACES[variable])
    cache = tmp_path / "cache"
    assert not is_found(tmp_path, FROM_HUB)
    assert not is_found(tmp_path, f"{variable}={cache}\n{FROM_HUB}")
    assert is_found(tmp_path, f"export {variable}={cache}\n{FROM_HUB}")
    assert is_found(tmp_path, f"{variable}={cache} {FROM_HUB}")
    assert is_found(
        tmp_path, f"export {variable}=$D/cache\n{FROM_HUB}", D=str(tmp_path)
    )
    assert not is_found(tmp_path, f"export {variable}=$D/cache\n{FROM_HUB}")
    # What one script names is nobody else's.
    assert is_found(tmp_path, f"{variable}={cache} {FROM_HUB}")
    assert model_files.directory("org/tiny-1.5b") is None
    assert not is_found(tmp_path, FROM_HUB)


@pytest.mark.parametrize(
    "place",
    [
        "models/org/tiny-1___5b",
        "models/org--tiny-1.5b/snapshots/abc",
        "org/tiny-1___5b",
        "org/tiny-1.5b",
    ],
)
def test_modelscope_has_models_in_several_places(place: str, tmp_path: Path) -> None:
    environ = {"MODELSCOPE_CACHE": str(tmp_path)}
    assert hub_cache.modelscope("org/tiny-1.5b", environ) is None
    (tmp_path / place).mkdir(parents=True)
    assert hub_cache.modelscope("org/tiny-1.5b", environ) is None
    (tmp_path / place / "config.json").write_text("{}")
    assert hub_cache.modelscope("org/tiny-1.5b", environ) == tmp_path / place
