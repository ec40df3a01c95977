"""Makes report.html when a run is over; what takes long is done while stages run."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from pytest_gkd import sanitize
from pytest_gkd.report.record import PAGE, RunRecord

# For what is read meanwhile, should a disk hang: a run does not wait for its page.
LIMIT_S = 5.0


class ReportPage:
    """The page of the run that reports to ``folder``.

    ``path`` is where it is; None before there is one.
    """

    def __init__(self, folder: Path) -> None:
        self.path: Path | None = None
        self._folder = folder
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Load what renders it, in a thread: some 70 ms of processor time."""
        self._thread = threading.Thread(target=_load, name="gkd-page", daemon=True)
        self._thread.start()

    def write(self, record: RunRecord) -> str:
        """Write the page of a run that is over; returns why there is none, or ""."""
        if self._thread is not None:
            self._thread.join(LIMIT_S)
            if self._thread.is_alive():
                return f"reading the template took over {LIMIT_S:g} s"
        try:
            from pytest_gkd.report import compare, history, page, page_file

            report = compare.Report(str(self._folder), record.to_json())
            before = compare.earlier(self._folder, record.started, checked=False)
            path = self._folder / PAGE
            runs = history.of_report(self._folder)
            page_file.write(page.html(report, self._folder, before, runs), path)
            self.path = path
        except compare.ReportError as error:
            return str(error)
        except OSError as error:
            return error.strerror or str(error)
        except Exception as error:  # of a page that no verdict depends on
            return sanitize.line(f"{type(error).__name__}: {error}")
        return ""


def _load() -> None:
    # Whatever is wrong with it is told by ``write``, which asks for the same.
    with contextlib.suppress(Exception):
        from pytest_gkd.report import page

        page.load()
