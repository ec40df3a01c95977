"""Configuration files as settings with their lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.job import documents
from pytest_gkd.job.findings import CheckError

YAML = """\
# a comment
base: &base {lr: 1.0e-6, steps: 3}
policy:
  <<: *base
  steps: 4
  name: "a: b"
  lengths: [512, 1024]
  empty: {}
  nothing:
"""
TAGGED = "a: !!python/object/apply:os.system ['touch canary']\nb: !Own {c: 1}\n"
ROUND = "a: &a\n  b: *a\n"
BOMB = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 30)
)
LISTS = "a0: &a0 [1, 2]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 11)
)


def read(path: Path, text: str) -> dict[str, tuple[Any, int]]:
    path.write_text(text)
    return {s.key: (s.value, s.word.line) for s in documents.settings(path)}


def test_yaml_comes_with_its_lines(tmp_path: Path) -> None:
    found = read(tmp_path / "job.yaml", YAML)
    assert found == {
        "base.lr": (1e-6, 2),
        "base.steps": (3, 2),
        "policy.lr": (1e-6, 2),
        "policy.steps": (4, 5),
        "policy.name": ("a: b", 6),
        "policy.lengths": ([512, 1024], 7),
        "policy.empty": ({}, 8),
        "policy.nothing": (None, 9),
    }


def test_json_with_tabs_and_toml(tmp_path: Path) -> None:
    found = read(tmp_path / "job.json", '{\n\t"a": {"b": null},\n\t"c": 1e3\n}\n')
    assert found["a.b"] == (None, 2)
    found = read(tmp_path / "job.toml", 'x = 1\n[a]\nb.c = "d"\n')
    assert found == {"x": (1, 1), "a.b.c": ("d", 3)}


TOML = """\
name = "x"
text = \"\"\"
other = 1
\"\"\"
[a]
name = "y"
b."c.d" = 1
[[a.list]]
name = 1
[a.list.inner]
name = 2
[[a.list]]
name = 3
[z]
other = 2
"""


def test_a_name_in_several_tables_of_toml_has_each_its_line(tmp_path: Path) -> None:
    found = {key: line for key, (_, line) in read(tmp_path / "a.toml", TOML).items()}
    lines = {
        "name": 1,
        "text": 2,
        "a.name": 6,
        "a.b.c.d": 7,
        "a.list": 8,
        "z.other": 15,
    }
    assert found == lines
    inside = documents.toml_lines(TOML)
    keys = ("a.list.0.name", "a.list.0.inner.name", "a.list.1.name")
    assert [inside[key] for key in keys] == [9, 11, 13]


def test_tags_are_never_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = read(tmp_path / "job.yaml", TAGGED)
    assert found["a"] == (["touch canary"], 1)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "job.yaml",
            "a: [1\nb: 2\n",
            "job.yaml is not valid YAML: did not find expected ',' or ']' (line 2)",
        ),
        ("job.yaml", "- a\n- b\n", "its top level is not a mapping"),
        ("job.yaml", "", "its top level is not a mapping"),
        ("job.yaml", ROUND, "nested deeper than can be followed"),
        ("job.yaml", BOMB, "stands for more than 5,000 settings"),
        ("job.yaml", "a: *b\n", "found undefined alias (line 1)"),
        ("job.yaml", LISTS, "stands for more than 5,000 settings"),
        ("job.json", '{"a": ' + "9" * 5000 + "}", "limit"),
        ("job.yaml", "a: " + "[" * 100_000, "nested deeper"),
        ("job.json", '{"a": }}', "line 1"),
        ("job.yaml", "a: " + "1:" * 9000 + "1\n", "limit of 4000 digits"),
        ("job.yaml", f"a:\n  {'b' * 1000}: 1\n", "line 2: the key a.bbb"),
        ("job.toml", "a = \n", "is not valid TOML"),
        ("job.toml", "".join(f"a{n}=1\n" for n in range(5_001)), "than 5,000"),
        ("job.toml", "a" + ".a" * 50_000 + " = 1", "nested deeper"),
        ("job.toml", "a = {b" + ' . "a"' * 20_000 + " = 1}", "nested deeper"),
    ],
)
def test_a_broken_file_is_refused_by_name(
    name: str, text: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckError, match=name) as caught:
        read(tmp_path / name, text)
    assert says in str(caught.value)
