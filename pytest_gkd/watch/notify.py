"""Tells those who asked for it of a verdict: by a command of theirs or a webhook."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from pytest_gkd import sanitize
from pytest_gkd.processes import background
from pytest_gkd.watch.samples import Verdict

LIMIT_S = 10.0


def tell(
    whom: tuple[str, ...],
    verdict: Verdict,
    text: str,
    problem: Callable[[str], None],
    report: str = "",
    option: str = "--notify",
) -> list[Future[None]]:
    """Tell all of them, beside what goes on here; ``problem`` gets what went wrong, by
    the option that named them.

    What is told is masked (see ``sanitize``). ``report`` is the directory of a report,
    which commands get and webhooks do not.
    """
    said = {
        "verdict": verdict.word,
        "phase": verdict.phase,
        "who": sanitize.line(verdict.who),
        "text": sanitize.text(text),
    }
    begun = []
    for one in whom:
        kind, _, line = one.partition(":")
        if kind == "command":
            variables = {f"GKD_{name.upper()}": value for name, value in said.items()}
            work = partial(_run, line, variables | {"GKD_REPORT": report})
        else:
            work = partial(_post, one, said)
        attempt = partial(_attempt, work, problem, option)
        begun.append(background.begin("gkd-notify", attempt))
    return begun


def _attempt(
    work: Callable[[], str], problem: Callable[[str], None], option: str
) -> None:
    if found := work():
        problem(f"{option}: {found}")


def _run(line: str, variables: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", line],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            start_new_session=True,
            env={**os.environ, **variables},
        )
    except subprocess.TimeoutExpired:
        return f"{line}: did not end within {LIMIT_S:g} s"
    except OSError as error:
        return f"{line}: {error}"
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    ended = f"{line}: ended with {done.returncode}"
    return (
        f"{ended}: {said[0]}"
        if done.returncode and said
        else ended * bool(done.returncode)
    )


def _post(url: str, data: Mapping[str, str]) -> str:
    where = url.split("/")[2].rpartition("@")[2]  # a webhook's path is its secret
    try:
        request = urllib.request.Request(  # noqa: S310 - https alone gets here
            url,
            json.dumps(data).encode(),
            {"Content-Type": "application/json", "User-Agent": "gkd-watch"},
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S):  # noqa: S310
            return ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "code", "") or error
        return f"https://{where}/...: {reason}"
