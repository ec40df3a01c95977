"""Records what a framework's release reads of its options, for ``gkd check``.

    python tools/record_schema.py NAME RELEASE FOLDER... [--before RELEASE=FOLDER...]

FOLDER is where the packages are imported from: of a checkout, or of what ``pip install
--no-deps --target FOLDER`` made; pytest_gkd/job/sources says which packages. Nothing of
them is imported. ``--before`` are older releases, to tell what they had; ``--examples``
is TRL's folder of that name, which no wheel has. Writes
pytest_gkd/job/schemas/NAME-RELEASE.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from packaging.version import Version

from pytest_gkd.job.releases import SCHEMAS
from pytest_gkd.job.sources import SOURCES, files, ms_swift, trl


def read(name: str, folders: list[str], examples: Path | None = None) -> dict[str, Any]:
    """The schema of the packages in these folders, with the digest of their files."""
    _, texts = files.texts(SOURCES[name], folders)
    digest = files.digest(texts)
    more = {}
    if examples:
        for path in sorted(examples.glob("scripts/**/*.py")):
            place = path.relative_to(examples).as_posix()
            more[f"examples/{place}"] = path.read_text("utf-8")
    return {**SOURCES[name].read({**texts, **more}), "digest": digest}


def main() -> None:
    """Record the release named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SOURCES)
    parser.add_argument("release")
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--before", nargs="*", default=[])
    parser.add_argument("--examples", type=Path)
    asked = parser.parse_args()
    schema = read(asked.name, asked.folders, asked.examples)
    before = dict(one.split("=", 1) for one in asked.before)
    if before and asked.name not in {"trl", "transformers", "accelerate", "ms-swift"}:
        parser.error(f"--before: gkd check compares {asked.name}'s releases itself")
    if before:
        older = [
            (r, read(asked.name, [before[r]])) for r in sorted(before, key=Version)
        ]
        tell = ms_swift.gone if asked.name == "ms-swift" else trl.removed
        schema["removed"] = tell(schema, asked.release, older)
    path = SCHEMAS / f"{asked.name}-{asked.release}.json"
    path.write_text(json.dumps(schema, indent=0, sort_keys=True) + "\n")
    print(path)


if __name__ == "__main__":
    main()
