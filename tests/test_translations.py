"""The Chinese catalogue is whole and in step (tools/translations.py)."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from test_language import CHINESE_TEXT

if not (Path(sys.prefix) / ".ready").exists():  # in the lock
    pytest.importorskip("babel")
import message_templates
import translations
from babel.messages.catalog import Catalog
from babel.messages.extract import extract

from pytest_gkd import language
from pytest_gkd.language import FILLED


def test_every_text_has_its_translation_and_no_other_is_kept() -> None:
    wrong = list(translations.wrong(translations.updated()))
    assert wrong == [], (
        "run python tools/translations.py, write what it lists into "
        f"{translations.PO}, and run it again"
    )
    found = {("", text) for _, text in translations.texts()}
    found |= {(FILLED, text) for _, text in translations.messages()}
    kept = {(one.context or "", one.id) for one in translations.kept() if one.id}
    assert kept == found


def test_the_file_is_what_the_tool_makes() -> None:
    assert translations.PO.read_bytes() == translations.po_bytes(translations.updated())


def test_what_is_read_at_run_time_is_what_was_translated() -> None:
    assert language.catalogue("zh") == {
        (one.context or "", one.id): one.string for one in translations.kept() if one.id
    }


@pytest.mark.parametrize("text", ['a "b"', "\\n", "a\nb\n", "\t|\r", '\\"', "x " * 99])
def test_every_character_is_read_as_it_was_written(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog(locale="zh")
    catalog.add(text, f"{text}中", context=FILLED)
    catalog.add(text, "")
    place = tmp_path / "zh/LC_MESSAGES/gkd.po"
    place.parent.mkdir(parents=True)
    place.write_bytes(translations.po_bytes(catalog))
    monkeypatch.setattr(language, "CATALOGUES", tmp_path)
    assert language.catalogue("zh") == {(FILLED, text): f"{text}中", ("", text): ""}


def test_a_translation_is_chinese_and_ends_as_its_text_does() -> None:
    for message in translations.kept():
        text, told = str(message.id), str(message.string)
        if text and re.search("[a-z]{3} [a-z]{2}", text):
            assert CHINESE_TEXT.search(told), text
        if text.endswith(".") and not text.endswith("..."):
            assert told.endswith("。") or not CHINESE_TEXT.search(told), text


@pytest.mark.parametrize(
    ("text", "told", "wrong"),
    [
        ("rank {rank} waits", "", "not translated"),
        ("rank {rank} waits", "rank {ranks} 在等", "{ranks}, {rank} in one"),
        ("see <place>", "见这里", "<place>"),
        ("run `gkd explain`", "运行 `gkd explain`", ""),
        ("run `gkd explain`", "运行 `gkd 解释`", "`gkd explain`"),
        ("set NCCL_DEBUG", "设置 NCCL_DEBUGS", "NCCL_DEBUG"),
        ("pass --gkd-stages=nccl", "传入 --gkd-stage=nccl", "--gkd-stages=nccl"),
        ("the key max_model_len", "配置项 max_model_length", "max_model_len"),
        ("%s of it", "其中", "%s"),
    ],
)
def test_what_must_stay_is_missed(text: str, told: str, wrong: str) -> None:
    catalog = Catalog(locale="zh")
    catalog.add(text, told, locations=[("x.py", 0)])
    found = list(translations.wrong(catalog))
    assert len(found) == bool(wrong)
    assert all(wrong in one for one in found)


def test_a_new_text_of_each_kind_is_found() -> None:
    files = {file.rpartition(".")[2] for file, _ in translations.texts()}
    assert files == {"py", "jinja", "toml"}
    source = io.BytesIO(b'told = tr("one " "text"); other = marked("two")\n')
    found = extract("python", source, keywords=translations.KEYWORDS)
    assert [text for _, text, *_ in found] == ["one text", "two"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f():\n    g(f"{a.rows} rows of {len(b)}")', "{rows} rows of {b}"),
        ('x = f"{a} is {a!r} of {c}"', "{a} is {a2} of {c}"),
        ('def f():\n    t = f"{a} is "\n    t += "not here"', "{a} is not here"),
        ('def f():\n    t = "it is"\n    t += f", {c} d"', "it is, {c} d"),
        ('def f():\n    t = f"{a} is"\n    g(k, f"{t} not here")', "{a} is not here"),
        (
            'def f():\n    t = f"{a} is here"\n    t = f"{t} not"\n    g(t)',
            "{a} is here not",
        ),
        (
            'def f():\n    t = f"{a} is here"\n    g(f"{t}, {b} not")\n    g(t)',
            "{a} is here|{a} is here, {b} not",
        ),
        (
            'def f():\n    t = f"{a} is here"\n    if b:\n        g(f"{t} not")',
            "{a} is here|{t} not",
        ),
        ('def f():\n    t = "not " + (x if y else z)', "not {z}"),
        ('def f():\n    fault("id", "is not here")', "is not here"),
        ("x = f\"is {a or 'not known'} here\"", "is {a} here|not known"),
        ("def f():\n    'A docstring of two'", ""),
        ('def f():\n    return "is not here" in text', ""),
        ('def f():\n    return text.startswith("is not here")', ""),
        ('def f():\n    return f"{a}-{b}.json"', ""),
        ('def f():\n    return re.compile(r"a \\\\w+ b")', ""),
        ('NAMES = ("of a module",)', ""),
    ],
)
def test_a_message_is_found_with_its_values_as_places(
    source: str, expected: str
) -> None:
    assert "|".join(message_templates.messages(source)) == expected


def test_places_without_a_text_between_them_stay_together() -> None:
    catalog = Catalog(locale="zh")
    catalog.add("no {what}{more}", "没有{more}{what}", context=FILLED)
    catalog.add("not {what}{more}", "不是{what}{more}", context=FILLED)
    (wrong,) = translations.wrong(catalog)
    assert "{what}{more} must stay together" in wrong


def test_texts_that_cannot_be_told_apart_have_one_translation() -> None:
    catalog = Catalog(locale="zh")
    catalog.add("{some} of {all}", "{all} 个中的 {some} 个", context=FILLED)
    catalog.add("{part} of {whole}", "{whole} 个中的 {part} 个", context=FILLED)
    catalog.add("{caller} of {name}", "{name} 的 {caller}", context=FILLED)
    (wrong,) = translations.wrong(catalog)
    assert "another translation than of {some} of {all}: {caller} of" in wrong
