"""A hook of MkDocs: the site has the repository's files under their own paths.

So a link that leads somewhere in the repository leads to the same place on the site.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

# What is read, and what is linked to, below the repository's root.
SOURCES = (
    *("README.md", "README.zh.md", "CHANGELOG.md", "LICENSE", "docs", "gpu-results"),
    *(".github/workflows/gpu-gate.yml", ".pre-commit-hooks.yaml"),
    *("pytest_gkd/report/report.schema.json", "pytest_gkd/job/frameworks/values.toml"),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put these in the place of what lies in ``docs_dir``."""
    root = Path(config.config_file_path).parent
    return Files(
        File.generated(
            config,
            path.relative_to(root).as_posix(),
            abs_src_path=str(path),
            inclusion=InclusionLevel.INCLUDED,  # also where a name begins with a dot
        )
        for source in SOURCES
        for path in found(root / source)
    )


def found(source: Path) -> list[Path]:
    """The file, or the files below the folder."""
    below = sorted(one for one in source.rglob("*") if one.is_file())
    return below if source.is_dir() else [source]
