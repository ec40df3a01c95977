"""A hook of MkDocs: the site has the repository's files under their own paths.

So a link that leads somewhere in the repository leads to the same place on the site.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

# What is read, and what is linked to, below the repository's root.
SOURCES = (
    *("README.md", "README.zh.md", "CHANGELOG.md", "LICENSE", "docs", "gpu-results"),
    *(".github/workflows/gpu-gate.yml", ".pre-commit-hooks.yaml"),
    *("pytest_gkd/report/report.schema.json", "pytest_gkd/job/frameworks/values.toml"),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put these in the place of what lies in ``docs_dir``; the theme's own stay."""
    root = Path(config.config_file_path).parent
    theme = [one for one in files if one.src_dir != config.docs_dir]
    return Files(
        theme
        + [
            File.generated(
                config,
                path.relative_to(root).as_posix(),
                abs_src_path=str(path),
                inclusion=InclusionLevel.INCLUDED,  # a name may begin with a dot
            )
            for source in SOURCES
            for path in found(root / source)
        ]
    )


def found(source: Path) -> list[Path]:
    """The file, or the files below the folder."""
    below = sorted(one for one in source.rglob("*") if one.is_file())
    return below if source.is_dir() else [source]


def on_post_build(config: MkDocsConfig) -> None:
    """Raises PluginError where a page loads what is elsewhere or not there."""
    site = Path(config.site_dir)
    pages = (one for one in site.rglob("*.html") if one.name != "404.html")
    for page in pages:  # the other's paths begin at the server's root
        loaded = Loaded()
        loaded.feed(page.read_text("utf-8"))
        for what in loaded.urls:
            if not (page.parent / what.partition("?")[0]).is_file():
                raise PluginError(
                    f"{page.relative_to(site)} loads {what}: no such file"
                )


class Loaded(HTMLParser):
    """The addresses of what a browser loads with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("img", "script", "iframe", "source"):
            self.urls.append(found.get("src") or "")
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.urls.append(found.get("href") or "")
        self.urls = [url for url in self.urls if url and not url.startswith("data:")]
