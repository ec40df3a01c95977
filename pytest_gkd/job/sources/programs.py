"""The options of OpenRLHF's and LightRFT's programs: a table for each of them."""

from __future__ import annotations

import posixpath
import tomllib
from pathlib import Path

from pytest_gkd.job.sources.add_argument import Options, Sources, Unrolled, tables
from pytest_gkd.job.sources.files import Files, Schema, Source, SourceError, matching

# Keys of options with dots.
OPENRLHF_NAMES = Path(__file__).parent / "openrlhf_names.toml"
LIGHTRFT_SHARED = "lightrft/utils/cli_args.py"


def openrlhf(files: Files) -> Schema:
    """Tables by program name, with keys as they were before they had dots."""
    names = tomllib.loads(OPENRLHF_NAMES.read_text("utf-8"))
    found = {}
    for file, text in files.items():
        options = _options({file: text})
        for one in options.values():
            one["key"] = names.get(one["key"], one["key"])
        found[posixpath.basename(file).removesuffix(".py")] = options
    return tables(found)


def lightrft(files: Files) -> Schema:
    """Tables by the programs' paths below examples/."""
    programs = matching(files, r"examples/\w+/train_\w+\.py")
    if not programs:
        raise SourceError("its examples/ are not next to it")
    shared = matching(files, LIGHTRFT_SHARED)
    return tables(
        {
            file.removeprefix("examples/"): _options({file: text, **shared})
            for file, text in programs.items()
        }
    )


def _options(files: Files) -> Options:
    sources = Sources(files)
    options = Options(sources)
    for tree in sources.trees.values():
        options.calls(Unrolled({}).visit(tree))
    return options


OPENRLHF = Source({"openrlhf": ("openrlhf/cli/train_*.py",)}, openrlhf)
LIGHTRFT = Source({"lightrft": (LIGHTRFT_SHARED, "examples/*/train_*.py")}, lightrft)
