"""Keep the Chinese catalogue: what has to be translated, and what is wrong with it.

``python tools/translations.py`` takes new texts of the program into
``pytest_gkd/locale/zh/LC_MESSAGES/gkd.po``, drops those it no longer has, and prints
what is still to be done; ``--check`` writes nothing. Both exit with 1 if anything is.
"""

from __future__ import annotations

import io
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import message_templates
from babel.messages.catalog import Catalog
from babel.messages.extract import extract
from babel.messages.pofile import read_po, write_po

from pytest_gkd import language, plugin, variable_table
from pytest_gkd.__main__ import argument_parser
from pytest_gkd.diagnosis import log_phases, suspects
from pytest_gkd.diagnosis.catalogue import ADVICE_DIR, TEXTS, Rule, parse_rule
from pytest_gkd.filled_texts import PLACE
from pytest_gkd.job import debug_variables
from pytest_gkd.job.environment import ROWS
from pytest_gkd.language import CATALOGUES, CHINESE, DOMAIN, FILLED
from pytest_gkd.options import WITH_INI

PACKAGE = CATALOGUES.parent
PO = CATALOGUES / CHINESE / "LC_MESSAGES" / f"{DOMAIN}.po"
KEYWORDS = {"tr": None, "marked": None}
# Modules whose messages end up in the record of a run, which is rendered.
SHOWN = (
    *("processes/gpus", "processes/host_capabilities", "processes/kernel_calls"),
    *("processes/kill", "processes/oom", "processes/py_spy", "processes/resource_use"),
    *("processes/stacks", "processes/stall", "processes/tree"),
    *("run/findings", "run/guardian_watch", "run/job_settings", "run/outcome"),
    *("run/pytest_report", "run/recorder", "run/stage_reports", "run/user_settings"),
    *("run/worker", "run/option_origins", "run/report_directory", "run/selection"),
    *("run/session", "run/surroundings", "options", "fault_specs", "stage_plan"),
    *("diagnosis/log_file", "diagnosis/silence"),
    *("processes/stale_runs", "processes/cleanup", "processes/manifest_writer"),
    *("processes/guardian_start", "processes/shell_line"),
    *("run/controller", "run/scheduler", "run/nodes", "run/parts", "run/shutdown"),
    *("run/collection", "run/run_directory", "report/history", "report/page_file"),
    *("diagnosis/log_sources", "diagnosis/standing", "diagnosis/metrics/learning"),
    *("diagnosis/metrics/numerics", "diagnosis/metrics/resources"),
    "diagnosis/metrics/impossible",
    "diagnosis/silent_ranks",
    *("diagnosis/catalogue", "diagnosis/own_rules", "diagnosis/proofreading"),
    *("bundle/archive", "bundle/collectors", "bundle/gathering", "bundle/log_extracts"),
    *("bundle/make_bundle", "processes/guardian", "run/keyword_selection"),
    *("gpu_report/gpu_runs", "gpu_report/result_files", "checkpoint"),
    *("diagnosis/flight_records", "report/live", "report/record", "stage_api"),
    *("run/watchdog", "run/other_plugins", "run/report_page"),
)
# Where users are told something with values in it, below the repository.
MESSAGES = (
    *("stages", "pytest_gkd/job", "pytest_gkd/workload", "pytest_gkd/own_faults.py"),
    "pytest_gkd/variable_table.py",
    *("pytest_gkd/watch", "pytest_gkd/diagnosis/shadowed_imports.py"),
    *(f"pytest_gkd/{module}.py" for module in SHOWN),
)
# Of these, the tables hold messages, too.
TABLES = (
    *("pytest_gkd/job", "pytest_gkd/watch/waiting.py"),
    *("pytest_gkd/watch/ray_nodes.py", "pytest_gkd/watch/node_agent.py"),
    *("pytest_gkd/workload/data/train", "pytest_gkd/workload/sync/transfer.py"),
    *("pytest_gkd/workload/environment/variable_names.py", "pytest_gkd/run/selection"),
    *("pytest_gkd/workload/layouts/local_layouts.py", "pytest_gkd/run/watchdog"),
    *("pytest_gkd/diagnosis/catalogue", "pytest_gkd/workload/layouts/estimate"),
)
# Help pages, a program of its own, sample texts, and faults that are injected.
NO_MESSAGES = ("watch/arguments.py", "gguf.py", "tiny_text.py", "workload/inject/*.py")
# What is shown of tables.
TOML = {
    "faults/*.toml": ("how",),
    "job/frameworks/smallest.toml": ("why", "note"),
    "job/debug_variables.toml": ("gives", "cost", "more"),
}
METHODS = {".py": "python", ".jinja": "jinja2.ext:babel_extract"}
# What a translation must have as often as its text: {name}, <name>, %s, `quoted`,
# options, variables, keys, file names and commands, which hold no Chinese.
KEPT = re.compile(
    r"\{[^{}]*\}|<[a-z]\w*>|%[sd]|`[^`]*`|'[^'\s]+'|--[\w-]+(?:=[\w,./-]+)?"
    r"|\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b|\b[a-z][a-z0-9]*_[a-z0-9_]+\b|/(?:dev|proc|etc)/\w+"
)


class Undated(Catalog):
    """A catalogue without dates and versions in its header: those change alone."""

    mime_headers = (("Content-Type", "text/plain; charset=utf-8"),)


def texts() -> Iterator[tuple[str, str]]:
    """Every text of the program, with its file below the package."""
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in METHODS:
            with path.open("rb") as file:
                found = extract(METHODS[path.suffix], file, keywords=KEYWORDS)
                for _, text, *_ in found:
                    if isinstance(text, str):
                        yield path.relative_to(PACKAGE).as_posix(), text
    for text in of_help_pages():
        yield "__main__.py", text
    for text in (plugin.TITLE, plugin.KEYWORD, plugin.MARKER):
        yield "plugin.py", text
    for option in WITH_INI:
        yield "options.py", option.help
    for name, keys in TOML.items():
        for path in sorted(PACKAGE.glob(name)):
            for text in _below(tomllib.loads(path.read_text("utf-8")), keys):
                yield path.relative_to(PACKAGE).as_posix(), text
    for text in log_phases.WAITS_FOR.values():
        yield "diagnosis/phases.toml", text
    for phase in log_phases.PHASES:
        for text in of_hangs(suspects.HANGS_DIR / f"{phase}.toml"):
            yield f"diagnosis/hangs/{phase}.toml", text
    for path in sorted(ADVICE_DIR.glob("*/*.toml")):
        data = tomllib.loads(path.read_text("utf-8"))
        rule = parse_rule(data, f"{path.parent.name}.{path.stem}", str(path))
        for text in of_rule(rule):
            yield path.relative_to(PACKAGE).as_posix(), text


def _below(data: Any, keys: Sequence[str]) -> Iterator[str]:
    """The texts under these keys, wherever they stand."""
    if isinstance(data, dict):
        yield from (data[key] for key in keys if key in data)
        data = list(data.values())
    for part in data if isinstance(data, list) else ():
        yield from _below(part, keys)


class _Asked(dict[tuple[str, str], str]):
    """Keeps what it is asked to translate."""

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        self[key] = key[1]
        return default


def of_help_pages() -> list[str]:
    """What the commands' --help tells, with the limits in it as they are."""
    asked, before = _Asked(), language._catalogue
    language._catalogue = asked
    try:
        argument_parser()
    finally:
        language._catalogue = before
    return [text for _, text in asked if text]


def messages() -> Iterator[tuple[str, str]]:
    """Every text that is shown with its values filled in, with its file."""
    root = PACKAGE.parent
    for place in (root / name for name in MESSAGES):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            if any(map(path.match, NO_MESSAGES)):
                continue
            name = path.relative_to(root).as_posix()
            source = path.read_text("utf-8")
            tables = name.startswith(TABLES)
            for text in message_templates.messages(source, tables=tables):
                yield name, text
    for text in filter(message_templates.is_prose, of_variables()):
        yield "pytest_gkd/variables.toml", text


def of_variables() -> Iterator[str]:
    """What is said of environment variables, ``{value}`` for what one is set to."""
    for row in variable_table.VARIABLES:
        if row.always:
            yield f"{row.name} {row.always}"
        for text in row.when.values():
            yield f"{row.name}={{value}} {text}"
        yield from filter(None, (row.expected, row.ends_job))
    yield from variable_table.GONE_FROM_VLLM.values()
    for named in debug_variables.TABLE["variable"]:
        if "cost" not in named:
            yield ROWS[named["names"][0]].when[named["value"]]
    for _, text in debug_variables.not_advised():
        yield text


def of_hangs(path: Path) -> Iterator[str]:
    """The texts of the signs and suspects of a phase."""
    data = tomllib.loads(path.read_text("utf-8"))
    for key in ("sign", "suspect"):
        for table in data.get(key, ()):
            told = (table.get(name) for name in suspects.TEXTS[key])
            yield from filter(None, told)


def of_rule(rule: Rule) -> Iterator[str]:
    """The texts of a cause, in their order."""
    for table in (rule, *rule.signatures, *rule.fixes, *rule.myths):
        yield from filter(None, (getattr(table, key) for key in TEXTS[type(table)]))


def kept() -> Catalog:
    """The catalogue as it lies in the repository; empty before the first run."""
    if not PO.exists():
        return Catalog(locale=CHINESE, domain=DOMAIN)
    with PO.open("rb") as file:
        return read_po(file, locale=CHINESE, domain=DOMAIN)


def updated() -> Catalog:
    """The kept translations of the texts that the program has now.

    Each stands once, under the first of its files, without a line: moving a text within
    a file changes nothing.
    """
    old = kept()
    made = Undated(locale=CHINESE, domain=DOMAIN, fuzzy=False)
    for context, found in ((None, texts()), (FILLED, messages())):
        for file, text in sorted(set(found)):
            if made.get(text, context) is None:
                known = old.get(text, context)
                told = known.string if known else ""
                made.add(text, told, locations=[(file, 0)], context=context)
    return made


def po_bytes(catalog: Catalog) -> bytes:
    """The catalogue as a file for translators."""
    file = io.BytesIO()
    write_po(file, catalog, omit_header=True, include_lineno=False)
    return b'msgid ""\nmsgstr "Content-Type: text/plain; charset=utf-8\\n"\n\n' + (
        file.getvalue()
    )


def wrong(catalog: Catalog) -> Iterator[str]:
    """What has no translation, or one that differs in what must stay as it is."""
    alike: dict[str, tuple[str, str]] = {}
    for message in catalog:
        text, told = str(message.id), str(message.string or "")
        if not text:
            continue
        file = message.locations[0][0] if message.locations else "?"
        if not told:
            yield f"{file}: not translated: {text}"
            continue
        lost = set(KEPT.findall(text)) ^ set(KEPT.findall(told))
        if lost:
            yield f"{file}: {', '.join(sorted(lost))} in one language only: {text}"
        elif message.context == FILLED:
            # Where one of them ends the text does not tell.
            for pair in re.findall(r"(?=(\{\w+\}\{\w+\}))", text):
                if pair not in told:
                    yield f"{file}: {pair} must stay together: {text}"
            # Nor which of two that differ in names alone it was made of.
            shape, shown = _unnamed(text, told)
            first, known = alike.setdefault(shape, (text, shown))
            if known != shown:
                yield f"{file}: another translation than of {first}: {text}"


def _unnamed(text: str, told: str) -> tuple[str, str]:
    """Both with numbers for the names of their places."""
    names = list(dict.fromkeys(PLACE.findall(text)))

    def numbered(one: str) -> str:
        return PLACE.sub(lambda found: f"{{{names.index(found[1])}}}", one)

    return numbered(text), numbered(told) if told else ""


def main(arguments: Sequence[str]) -> int:
    """Write the catalogue (not with ``--check``), and print what is to be done."""
    made = updated()
    found = list(wrong(made))
    data = po_bytes(made)
    if "--check" not in arguments:
        PO.parent.mkdir(parents=True, exist_ok=True)
        PO.write_bytes(data)
    elif not PO.exists() or PO.read_bytes() != data:
        found.append(f"{PO.name}: out of date: run python tools/translations.py")
    print("\n".join(found) or "complete")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
