"""The Chinese catalogue is whole and in step (tools/translations.py)."""

from __future__ import annotations

import gettext
import io
import re
import sys
from pathlib import Path

import pytest
from test_language import CHINESE_TEXT

if not (Path(sys.prefix) / ".ready").exists():  # in the lock
    pytest.importorskip("babel")
import translations
from babel.messages.catalog import Catalog
from babel.messages.extract import extract


def test_every_text_has_its_translation_and_no_other_is_kept() -> None:
    wrong = list(translations.wrong(translations.updated()))
    assert wrong == [], (
        "run python tools/translations.py, write what it lists into "
        f"{translations.PO}, and run it again"
    )
    kept = {message.id for message in translations.kept() if message.id}
    assert kept == {text for _, text in translations.texts()}


def test_the_files_are_what_the_tool_makes() -> None:
    made = translations.updated()
    assert translations.PO.read_bytes() == translations.po_bytes(made)
    assert translations.MO.read_bytes() == translations.mo_bytes(made)


def test_what_is_read_at_run_time_is_what_was_translated() -> None:
    with translations.MO.open("rb") as file:
        read = gettext.GNUTranslations(file)
    for message in translations.kept():
        if message.id:
            assert read.gettext(str(message.id)) == message.string


def test_a_translation_is_chinese_and_ends_as_its_text_does() -> None:
    for message in translations.kept():
        text, told = str(message.id), str(message.string)
        if text and re.search("[a-z]{3} [a-z]{2}", text):
            assert CHINESE_TEXT.search(told), text
        if text.endswith("."):
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
