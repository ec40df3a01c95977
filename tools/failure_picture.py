"""Record the README's picture of a failure: ``python tools/failure_picture.py``.

A real run of all stages with a fault put in, as it prints in colour. Left out are
pytest's own header, the lines of progress and pytest's summary.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from pytest_gkd.stage_specs import STAGES

PICTURE = Path(__file__).parent.parent / "docs/failure.svg"
FAULT = "nccl:rank-stopped"
WIDTH = 100
# Rich's own template loads a font from the network.
TEMPLATE = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, Menlo,
  Consolas, "DejaVu Sans Mono", monospace; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})"
 clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def record() -> list[str]:
    """The lines that a run with the fault prints, with their colours."""
    options = ["--gkd-stages", f"--gkd-inject={FAULT}"]
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--color=yes", *options],
            cwd=place,
            env=os.environ | {"COLUMNS": str(WIDTH)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.replace(f"{place}/", "").splitlines()
    return [f"$ pytest {' '.join(options)}", *told(lines)]


def told(lines: list[str]) -> list[str]:
    """What of a run's lines is the plugin's, without what it repeats at the end."""
    start = next(n for n, line in enumerate(lines) if "___ test_nccl ___" in line)
    names = "|".join(stage.name for stage in STAGES)
    own = re.compile(rf"gkd: |\x1b\[3[12]m({names}) ")
    run = [line for line in lines[:start] if own.match(line)]
    failure = itertools.takewhile(
        lambda line: not line.startswith("gkd: "), lines[start + 1 :]
    )
    return [*run, "", *(line for line in failure if not line.startswith("[gw"))]


def picture(lines: list[str]) -> str:
    """The lines as a terminal in SVG, without anything from the network."""
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, overflow="ellipsis")
    return console.export_svg(
        title="", theme=MONOKAI, code_format=TEMPLATE, unique_id="gkd"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(record()), "utf-8")
