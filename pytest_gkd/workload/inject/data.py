"""Train files that cannot be used."""

from __future__ import annotations

from pytest_gkd.workload.inject.site import Site


def missing_file(site: Site) -> None:
    """A path where nothing is."""
    site.settings(train_files=(str(site.folder / "train.parquet"),))
