"""Files made to cost time or memory: each is read or refused within 100 MB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gkd.job import check, documents, model_files, script_file, tokenizer_ids
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.sources import files

SIZE = script_file.MOST_BYTES - 200
START = "python3 -m verl.trainer.main_ppo"


def filled(unit: str, before: str = "", after: str = "") -> str:
    """As many of them as go into a file that is read."""
    return before + unit * ((SIZE - len(before) - len(after)) // len(unit)) + after


def numbered(unit: str, before: str = "", after: str = "") -> str:
    """The same with their numbers for each @."""
    width = len(unit) + 5 * unit.count("@")
    units = (unit.replace("@", str(n)) for n in range((SIZE - 200) // width))
    return before + "".join(units) + after


HOSTILE = {
    "alias.yaml": filled("*a,", "a: &a [1]\nb: [", "]"),
    "keys.yaml": numbered("a@: 1\n"),
    "merged.yaml": numbered("b@:\n  <<: *a\n", f"a: &a {{{'k: 1,' * 2000}}}\n"),
    "long.yaml": filled("a", "", ": 1\n"),
    "dates.yaml": filled("2001-12-14t21:59:43.10-05:00,", "a: [", "]"),
    "deep.json": filled('{"a":'),
    "lists.json": filled("[],", '{"a": [', "1]}"),
    "keys.json": numbered('"a@":1,', "{", '"b":1}'),
    "tables.toml": numbered(f"[{'.'.join('abcdefghijklmnop')}.k@]\n"),
    "dotted.toml": numbered(f"{'a@.' * 45}b=1\n"),
    "arrays.toml": filled("{a={}},", "a = [", "]"),
    "lines.sh": filled("a=1\n", "", f"{START} data.seed=1\n"),
    "comments.sh": filled("# a\n", "", f"{START} data.seed=1\n"),
    "words.sh": filled(" a=1", START),
    "keys.sh": numbered(" data.k@=1", START),
    "array.sh": filled("x=1 ", "a=(", f")\n{START} ${{a[@]}}\n"),
    "braces.sh": filled(" {a,b}{c,d}{e,f}{g,h}{i,j}{k,l}", START),
    "sums.sh": filled("1+", "a=$((", f"1))\n{START} a=$a\n"),
    "nested.sh": filled("(", "a=$((", ""),
    "case.sh": numbered("a@) b=@;;\n", "case $x in\n", f"esac\n{START}\n"),
    "pipes.sh": filled("|a", "a"),
    "here.sh": filled("$a", "a=1\nb=$(cat <<E\n", f"\nE\n)\n{START} a=$b\n"),
    "ways.sh": "".join(f'[ "$A{n}" = 1 ] && B{n}=1\n' for n in range(4))
    + f"{START} {' '.join(f'data.k{n}=1' for n in range(2990))} $B0 $B1 $B2 $B3\n",
    "sourced.sh": filled("source ./comments.sh\n", "", f"{START}\n"),
}


# The kernel's figure of a process is at least that of the one it was forked from, and
# these tests may have grown.
MEASURED = """
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
code = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(code, used.ru_maxrss, file=sys.stderr)
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_costs_less_than_100_megabytes(
    name: str, tmp_path: Path
) -> None:
    for other in {name, "comments.sh"}:
        (tmp_path / other).write_text(HOSTILE[other])
    command = [sys.executable, "-m", "pytest_gkd", "check", name]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    code, kib = map(int, done.stderr.split()[-2:])
    assert code in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert code < 2 or name in done.stdout + done.stderr
    assert kib * 1024 < 100e6


@pytest.mark.parametrize("suffix", ["sh", "yaml", "json", "toml"])
def test_a_file_of_100_megabytes_is_refused_with_what_to_give(
    suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"job.{suffix}"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(CheckError) as caught:
        check.check(path)
    said = str(caught.value)
    assert f"{path} has 100.0 MB" in said
    assert "give the launch script or configuration itself" in said


def test_the_longest_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    start = f"{START} data.seed=1\n"
    path.write_text(start + "#" * (script_file.MOST_BYTES - len(start)))
    assert script_file.text_of(path)
    path.write_text(path.read_text() + "#")
    with pytest.raises(CheckError, match="is read up to 128 KiB"):
        script_file.text_of(path)


@pytest.mark.parametrize(("items", "fits"), [(14_990, True), (15_010, False)])
def test_a_list_is_read_up_to_its_length(
    items: int, fits: bool, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"a: [{'1,' * items}]\n")
    if fits:
        assert len(documents.settings(path)[0].value) == items
        assert len(documents.value_of(f"[{'1,' * items}]")) == items
        return
    for read in (
        lambda: documents.settings(path),
        lambda: documents.value_of(f"[{'1,' * items}]"),
    ):
        with pytest.raises(CheckError, match="stands for more than 5,000 settings"):
            read()


@pytest.mark.parametrize(("times", "fits"), [(140, True), (160, False)])
def test_what_aliases_stand_for_counts(times: int, fits: bool, tmp_path: Path) -> None:
    """Each of a hundred numbers, with a few characters."""
    text = f"{{a: &a [{'1,' * 100}], b: [{'*a,' * times}]}}"
    path = tmp_path / "job.yaml"
    path.write_text(text)
    if fits:
        assert len(documents.settings(path)[1].value) == times
        assert len(documents.value_of(text)["b"]) == times
        return
    for read in (lambda: documents.settings(path), lambda: documents.value_of(text)):
        with pytest.raises(CheckError, match="stands for more than 5,000 settings"):
            read()


def test_a_models_configuration_is_read_up_to_a_mebibyte(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = '{"vocab_size": 7}'
    path.write_text(text + " " * ((1 << 20) - len(text)))
    assert model_files.vocabulary(str(tmp_path)) == 7
    path.write_text(path.read_text() + " ")
    assert model_files.vocabulary(str(tmp_path)) is None


def test_a_tokenizer_is_read_up_to_64_mebibytes(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"vocab": {"a": 7}}, "added_tokens": []}')
    os.truncate(path, 64 << 20)
    assert next(tokenizer_ids.read(path)) == (b"a", 7)
    os.truncate(path, (64 << 20) + 1)
    with pytest.raises(ValueError, match="is not a file of at most 67108864 bytes"):
        next(tokenizer_ids.read(path))


def test_an_installed_package_is_read_up_to_32_mebibytes(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    part = tmp_path / "big" / "__init__.py"
    part.write_text("# a\n")
    source = files.Source({"big": ("big/*.py",)}, dict)
    assert files.texts(source, [str(tmp_path)])[0] == tmp_path / "big"
    os.truncate(part, (32 << 20) + 1)
    with pytest.raises(files.SourceError, match="has more than is read"):
        files.texts(source, [str(tmp_path)])


@pytest.mark.parametrize("name", ["zero", "null"])
def test_a_device_is_no_job(name: str, tmp_path: Path) -> None:
    (tmp_path / "job.sh").symlink_to(f"/dev/{name}")
    with pytest.raises(CheckError, match="is not a regular file"):
        check.check(tmp_path / "job.sh")


def test_a_file_is_as_long_as_what_is_read_of_it(tmp_path: Path) -> None:
    """Those of /proc say that they have no bytes."""
    path = Path("/proc/kallsyms")
    if not path.is_file() or len(path.open("rb").read(SIZE * 2)) < SIZE * 2:
        pytest.skip("this machine shows none that is long")
    with pytest.raises(CheckError, match=r"is read up to|binary"):
        script_file.text_of(path)


def test_what_is_sourced_is_read_up_to_a_sum(tmp_path: Path) -> None:
    (tmp_path / "part.sh").write_text("#" * 50_000 + "\nSEED=$1\n")
    path = tmp_path / "job.sh"
    for count, known in ((2, True), (3, False)):
        sources = "".join(f"source ./part.sh {n}\n" for n in range(count))
        path.write_text(f"cd {tmp_path}\n{sources}{START} data.seed=$SEED\n")
        remarks = [f.message for f in check.check(path).findings if f.level == "note"]
        assert any("is sourced and not read" in one for one in remarks) is not known


def test_a_command_of_more_words_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(f"{START} {' '.join(f'+a.k{n}=1' for n in range(3000))}\n")
    found = check.check(path)
    assert any("more than 3000 words" in f.message for f in found.findings)
    assert {value.source for value in found.values.values()} == {"undetermined"}


def test_more_words_on_all_ways_than_are_read_leave_nothing_certain(
    tmp_path: Path,
) -> None:
    path = tmp_path / "job.sh"
    ways = "".join(f'[ "$A{n}" = 1 ] && B{n}=1\n' for n in range(4))
    for count, all_ways in ((240, True), (260, False)):
        words = " ".join(f"+data.k{n}=1" for n in range(count))
        ends = "data.seed=1 a=$B0 b=$B1 c=$B2 d=$B3 data.train_batch_size=7"
        path.write_text(f"{ways}{START} {words} {ends}\n")
        found = check.check(path)
        told = [one.message for one in found.findings if "ways through" in one.message]
        assert bool(told) is not all_ways
        value = found.values["train_batch_size"]
        assert value.source == ("user" if all_ways else "undetermined")
    assert told[0].startswith("only 15 of 16 ways through the script are checked")


@pytest.mark.parametrize(
    ("start", "framework", "word"),
    [
        ("uv run examples/run_grpo.py", "nemo-rl==0.7.0", "policy.modl_name{}=1"),
        (
            "python examples/math/gsm8k_rl.py --config job.yaml",
            "areal==1.0.4",
            "actor.pathh{}=1",
        ),
        (START, "verl==0.9.1", "data.trian_files{}=1"),
    ],
)
def test_near_names_are_looked_for_so_often(
    start: str, framework: str, word: str, tmp_path: Path
) -> None:
    """Each takes milliseconds."""
    path = tmp_path / "job.sh"
    words = " ".join(word.format(n) for n in range(100))
    (tmp_path / "job.yaml").write_text("actor:\n  path: x\n")
    path.write_text(f"cd {tmp_path}\n{start} {words}\n")
    found = check.check(path, framework=framework)
    wrong = [f.message for f in found.findings if f.level == "error"]
    assert len(wrong) >= 40
    assert 1 <= sum("did you mean" in one for one in wrong) <= 60


def test_a_case_of_many_patterns_ends(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    items = "".join(f"a{n}) ;;\n" for n in range(1000))
    path.write_text(f"case $x in\n{items}esac\n{START} data.seed=1\n")
    with pytest.raises(CheckError, match="more than is followed"):
        check.check(path)


@pytest.mark.parametrize("text", ["cat <<E\nE\n" * 600, ";" * 10_001])
def test_a_script_of_too_many_signs_is_not_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(f"{text}\n{START} data.seed=1\n")
    with pytest.raises(CheckError, match="or 500 here-documents, are in it"):
        check.check(path)


# -- tokenizers --------------------------------------------------------------------


def tokenizer(path: Path, text: str | bytes) -> dict[bytes, int]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return dict(tokenizer_ids.read(path))


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 20])
def test_a_tokenizer_is_read_in_pieces(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_ids, "PIECE", piece)
    vocab = {"a": 0, "\u0120b": 10, '"': 2, "\\": 3, "vocab": 4, "merges": 5, "": 6}
    added = [{"content": "<e>", "special": True, "id": 7}, {"id": 8, "content": "[x]"}]
    merges = ["a b", "vocab {", "added_tokens ["]
    expected = {**vocab, "<e>": 7, "[x]": 8}
    for model in (
        {"vocab": vocab, "merges": merges},
        {"merges": merges, "vocab": vocab},
    ):
        for file in (
            {"version": "1", "added_tokens": added, "model": model},
            {"model": model, "added_tokens": added},
        ):
            for form in ({}, {"indent": 1}, {"ensure_ascii": False}):
                found = tokenizer(tmp_path / "t.json", json.dumps(file, **form))
                assert {token.decode(): n for token, n in found.items()} == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"model": {"vocab": "none"}}',
        '{"model": {"vocab": {"a": "0"}}}',
        '{"model": {"vocab": {"a": {"b": 1}}}}',
        '{"added_tokens": [{"id": 1, "content": "a"}]}',
        '"' + "a" * (5 << 20),
    ],
)
def test_what_is_no_tokenizer_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t\.json"):
        tokenizer(tmp_path / "t.json", text)


def test_a_tokenizer_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("student", "teacher"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        os.mkfifo(tmp_path / name / "tokenizer.json")
    names = str(tmp_path / "student"), str(tmp_path / "teacher")
    assert model_files.other_tokenizer(*names) == ("", False)


def test_the_rest_of_a_tokenizer_is_not_read(tmp_path: Path) -> None:
    """Behind its tokens stand the merges."""
    file = {"added_tokens": [], "model": {"vocab": {"a": 0}}}
    text = json.dumps(file)[:-2] + ', "merges": [' + '"' * 4001
    assert tokenizer(tmp_path / "t.json", text) == {b"a": 0}
