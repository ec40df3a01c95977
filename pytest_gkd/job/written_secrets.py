"""Finds keys and tokens written out in a job's files, and redacts them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pytest_gkd import sanitize
from pytest_gkd.job import script_file
from pytest_gkd.job.findings import CheckError, Finding

CAUSE = "config.secret-in-file"
KINDS = {
    "hf_": "a token of Hugging Face",
    "api_org_": "a token of Hugging Face",
    "wandb": "a key of W&B",
    "AKIA": "a key of AWS",
    "ASIA": "a key of AWS",
    "X-Amz": "a signature of AWS",
    "gh": "a token of GitHub",
    "github": "a token of GitHub",
    "glpat": "a token of GitLab",
    "nvapi": "a key of NVIDIA",
    "AIza": "a key of Google",
    "sk-": "a key of an API (sk-)",
    "xox": "a token of Slack",
    "xapp": "a token of Slack",
    "npm_": "a token of npm",
    "pypi": "a token of PyPI",
    "eyJ": "a JSON web token",
    "-----BEGIN": "a private key",
    "://": "a password in an address",
    "Bearer": "a bearer token",
    "bearer": "a bearer token",
}
# A placeholder for the reader's own key.
BLANK = re.compile(
    r"your|example|dummy|placeholder|xxx|change|fake|sample|todo|insert|replace|"
    r"\b(?:test|here|empty|none|password|passwd|secret|token|user)\b|my[_-]|[<>{}$]|\.\.\.",
    re.IGNORECASE,
)
RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.~+/=-]{16,}")
PASSWORD = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\S{8,}")
# W&B's older keys look like a commit hash; the words before it tell a commit.
BARE_KEY = re.compile(r"(?<![\w/@.-])[0-9a-f]{40}(?![\w/])")
COMMIT = re.compile(
    r"revision|commit|checkout|hash|\bref\b|(?<![a-z])sha(?![a-z])", re.IGNORECASE
)
BEFORE = 120
MOST = 20
FEWEST = 7  # different characters
SHORTEST_LINE, LONGEST_LINE = 8, 4000


def in_files(
    files: Iterable[str], private: Iterable[str] = ()
) -> tuple[list[Finding], list[str]]:
    """The secrets in a job's files as findings, and all possible ones, to be redacted.

    A ``private`` file, which a script sources for its variables, may hold them.
    """
    told: list[Finding] = []
    unsaid: list[str] = []
    own = list(dict.fromkeys(files))
    for file in dict.fromkeys([*own, *private]):
        try:
            text = script_file.text_of(Path(file), is_script=False)
        except (CheckError, ValueError):
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) < SHORTEST_LINE:
                continue
            seen = set[str]()
            for sign, secret in sanitize.secrets(line[:LONGEST_LINE]):
                unsaid.append(secret)
                is_new = not any(secret in other or other in secret for other in seen)
                is_told = file in own and is_new and len(told) < MOST
                if is_told and _is_written_out(sign, secret):
                    seen.add(secret)
                    told.append(_finding(sign, file, number))
    return told, unsaid


def _kind(sign: str) -> str:
    return next((KINDS[key] for key in KINDS if sign.startswith(key)), "")


def _is_written_out(sign: str, secret: str) -> bool:
    """Whether it is a secret rather than a placeholder."""
    secret = secret.lstrip("-=?+").rstrip("}")  # of ${NAME:-VALUE}
    if BLANK.search(secret) or len(set(secret)) < FEWEST:
        return False
    if _kind(sign):
        return True
    shape = PASSWORD if "passw" in sign.lower() else RANDOM
    is_path = secret.startswith(("/", "~", ".")) or "://" in secret
    return not is_path and shape.fullmatch(secret) is not None


def _finding(sign: str, file: str, line: int) -> Finding:
    # A sign with its value's name in capitals is not a kind: HF_TOKEN, --wandb-key.
    name = "" if _kind(sign) else sign.lstrip("-+")
    what = f"the value of {sign}" if name else _kind(sign)
    said = (
        f"{what} is written out here: whoever can read the file can use it. Revoke it, "
        "and pass the new one through the shell's environment"
    )
    return Finding(CAUSE, "warning", said, file, line, name)


def hiding(unsaid: Iterable[str]) -> Callable[[Any], Any]:
    """A function that redacts secrets in texts and lists, even if cut short."""
    parts = sorted({one for one in unsaid if len(one) > 5}, key=len, reverse=True)
    whole = [
        re.escape(one[:12]) + r"[\w.~+/=-]*" if len(one) > 15 else re.escape(one)
        for one in parts
    ]
    pattern = re.compile("|".join(whole)) if whole else None

    def hide(value: Any) -> Any:
        if isinstance(value, list):
            return [hide(one) for one in value]
        if not isinstance(value, str):
            return value
        if pattern is not None:
            value = pattern.sub(sanitize.MASK, value)
        return sanitize.mask(BARE_KEY.sub(_masked, value))

    return hide


def _masked(found: re.Match[str]) -> str:
    before = found.string[max(0, found.start() - BEFORE) : found.start()]
    return found[0] if COMMIT.search(before) else sanitize.MASK


def in_error(error: CheckError, files: Iterable[str] = ()) -> str:
    """Why a job cannot be read, with the secrets of its files redacted."""
    return str(hiding(in_files((), files)[1])(str(error)))


def files_of(words: Iterable[Any]) -> Iterator[str]:
    """The files that the words are from, not the command line."""
    files = (word.file for word in words if word is not None and word.line)
    yield from (file for file in dict.fromkeys(files) if Path(file).is_file())
