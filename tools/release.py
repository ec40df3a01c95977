"""The release checklist: ``python tools/release.py`` says what still stands in the way.

It builds in a temporary directory and neither tags nor uploads; ``--output=DIR`` keeps
what was built if every check passed. Needs git, the network for pip, the supported
Pythons (on PATH, or from pyenv), and for the stages, which run on the first of them,
torch's CPU wheel: from PyTorch's own index, or a folder that PIP_FIND_LINKS names.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PYTHON = "Programming Language :: Python :: "
# Lines of what failed that are shown.
LAST = 15
PYTHONS = tuple(
    one.removeprefix(PYTHON) for one in PROJECT["classifiers"] if PYTHON in one
)
TOOLS = ("build", "twine")
# Where the wheel has what lies beside the package in the tree.
INSIDE = {"stages/": "pytest_gkd/stages/", "gpu-results/": "pytest_gkd/gpu-results/"}


class ReleaseError(Exception):
    """A check that did not pass; the text says what was found."""


def main() -> int:
    """Run the checks; 0 if all passed, 1 if one did not, 2 for a usage error."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="leave out the tests and the stages, which take half an hour",
    )
    parser.add_argument(
        "--python",
        action="append",
        choices=PYTHONS,
        help="only this one; repeatable (default: all supported ones)",
    )
    parser.add_argument(
        "--tests",
        action="append",
        metavar="FILE",
        help="only these files of tests/, such as test_catalogue.py; repeatable",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="keep what was built in this new DIR"
    )
    asked = parser.parse_args()
    if asked.output and asked.output.exists():
        parser.error(f"--output: {asked.output} exists; name a new directory")
    with tempfile.TemporaryDirectory(prefix="gkd-release-") as place:
        return Checklist(Path(place), asked).run()


@dataclass
class Checklist:
    """The checks in order, with ``place`` for all that is built and installed."""

    place: Path
    asked: argparse.Namespace

    def run(self) -> int:
        """Make every check, also after one that failed; returns the exit status."""
        version = tree_version(ROOT)
        checks: list[tuple[str, Callable[[], str]]] = [
            ("the tree is clean", lambda: clean(ROOT)),
            ("the changelog has the version", lambda: changelog(ROOT, version)),
            ("the version has no tag yet", lambda: untagged(ROOT, version)),
            ("build", self._build),
            ("the sdist is the tree", lambda: sdist_is_tree(self._sdist, ROOT)),
            ("the wheel is the tree's", lambda: wheel_is_tree(self._wheel, ROOT)),
            ("the sdist builds that wheel", self._rebuild),
            ("metadata", lambda: metadata(wheel_metadata(self._wheel), version)),
            ("twine check", self._twine),
        ]
        for python in self.asked.python or PYTHONS:
            checks.append((f"Python {python}: install", self._installs(python)))
            if not self.asked.quick:
                checks.append((f"Python {python}: tests", self._tests(python)))
        if not self.asked.quick:
            checks.append(("the stages, from the wheel", self._stages))
        failed = 0
        for name, check in checks:
            print(f"...     {name}", flush=True)
            try:
                print(f"ok      {name}: {check()}", flush=True)
            except ReleaseError as error:
                failed += 1
                print(f"FAILED  {name}: {error}", flush=True)
        if failed:
            print(f"{failed} of {len(checks)} checks failed; this is no release")
            return 1
        print(f"all {len(checks)} checks passed; nothing was tagged or uploaded")
        if self.asked.output:
            shutil.copytree(self._dist, self.asked.output)
            print(
                f"{self._sdist.name} and {self._wheel.name} are in {self.asked.output}"
            )
        return 0

    @property
    def _dist(self) -> Path:
        return self.place / "dist"

    @property
    def _sdist(self) -> Path:
        return self._built("*.tar.gz")

    @property
    def _wheel(self) -> Path:
        return self._built("*.whl")

    def _built(self, pattern: str) -> Path:
        found = list(self._dist.glob(pattern))
        if len(found) != 1:
            raise ReleaseError(f"{len(found)} files {pattern} were built, not one")
        return found[0]

    def _build(self) -> str:
        self._tool("build", "--sdist", "--wheel", "--outdir", self._dist, ROOT)
        files = sorted(self._dist.iterdir())
        return ", ".join(f"{one.name} ({one.stat().st_size:,} bytes)" for one in files)

    def _rebuild(self) -> str:
        again = self.place / "again"
        self._tool("build", "--wheel", "--outdir", again, self._unpacked("rebuilt"))
        (wheel,) = again.glob("*.whl")
        same(
            wheel_hashes(self._wheel), wheel_hashes(wheel), "the tree's", "the sdist's"
        )
        return "file by file"

    def _twine(self) -> str:
        self._tool("twine", "check", "--strict", self._sdist, self._wheel)
        return "passed"

    def _tool(self, name: str, *arguments: str | Path) -> None:
        home = self.place / "tools"
        if not home.exists():
            command(sys.executable, "-m", "venv", home)
            pip(home, *TOOLS)
        command(home / "bin/python", "-m", name, *arguments)

    def _unpacked(self, name: str) -> Path:
        target = self.place / name
        with tarfile.open(self._sdist) as archive:
            archive.extractall(target, filter="data")
        (top,) = target.iterdir()
        return top

    def _installs(self, version: str) -> Callable[[], str]:
        def check() -> str:
            home = self._home(version)
            command(find_python(version), "-m", "venv", home)
            pip(home, self._wheel)
            command(home / "bin/python", "-m", "pip", "check")
            gkd = home / "bin/gkd"
            said = command(gkd, "--version", cwd=self.place).strip()
            for words in (["--help"], ["faults"], ["env"], ["completion", "zsh"]):
                command(gkd, *words, cwd=self.place)
            causes = command(gkd, "explain", "--list", cwd=self.place)
            found = command(home / "bin/pytest", "--help", cwd=self.place)
            if "--gkd-stages" not in found:
                raise ReleaseError("pytest does not find the plugin")
            return f"{said}, {len(causes.splitlines())} causes"

        return check

    def _home(self, version: str) -> Path:
        return self.place / f"python-{version}"

    def _tests(self, version: str) -> Callable[[], str]:
        def check() -> str:
            home = self._home(version)
            source = self._unpacked(f"tests-{version}")
            (installed,) = home.glob("lib/python*/site-packages/pytest_gkd")
            use_installed(source, installed)
            pip(home, "pytest-cov")
            files = [f"tests/{name}" for name in self.asked.tests or ["."]]
            said = command(
                *(".ci/tests", home / "bin/pytest", "-q", "-n2", "--dist=loadfile"),
                *("--no-loadscope-reorder", "--timeout=600", *files),
                cwd=source,
            )
            return told_of_tests(said)

        return check

    def _stages(self) -> str:
        version = (self.asked.python or PYTHONS)[0]
        source = self._unpacked("stages")
        command("make", f"PYTHON={find_python(version)}", ".venv/.ready", cwd=source)
        home = source / ".venv"
        pip(home, "--no-deps", "--force-reinstall", self._wheel)
        work = self.place / "work"
        work.mkdir()
        said = command(home / "bin/pytest", "--gkd-stages", cwd=work)
        return f"Python {version}: {said.strip().splitlines()[-1].strip('= ')}"


def told_of_tests(said: str) -> str:
    """How many passed, and which failed once and passed alone (``.ci/tests``)."""
    whole, *_ = re.findall(r"(?m)^(?:\d+ failed, )?\d+ passed.*", said)
    again = re.findall(r"(?m)^PASSED (\S+)", said)
    return "; once more and alone: ".join(filter(None, (whole, ", ".join(again))))


def command(*words: str | Path, cwd: Path = ROOT) -> str:
    """What a command prints. Raises ReleaseError if it fails.

    The error has its last lines, and of a test run the tests that failed.
    """
    env = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        shown = " ".join(Path(str(word)).name for word in words[:4])
        lines = done.stdout.splitlines()
        failed = [line for line in lines[:-LAST] if line.startswith("FAILED ")]
        told = "\n".join(f"        {line}" for line in [*failed, *lines[-LAST:]])
        raise ReleaseError(f"{shown} ... exited with {done.returncode}\n{told}")
    return done.stdout


def pip(home: Path, *what: str | Path) -> None:
    """Install into the environment ``home``."""
    quiet = ("-q", "--disable-pip-version-check")
    command(home / "bin/python", "-m", "pip", "install", *quiet, *what, cwd=home)


def find_python(version: str) -> Path:
    """A Python such as 3.12: on PATH, or of pyenv's."""
    pyenv = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for found in (shutil.which(f"python{version}"), *pyenv):
        # pyenv's python3.12 on PATH fails where another version is chosen.
        with contextlib.suppress(ReleaseError):
            if found and command(found, "--version").startswith(f"Python {version}."):
                return Path(found)
    raise ReleaseError(f"there is no Python {version} on this machine")


def tree_version(root: Path) -> str:
    """The version that the package has in the tree."""
    text = (root / "pytest_gkd/__init__.py").read_text("utf-8")
    (found,) = re.finditer(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return found[1]


def clean(root: Path) -> str:
    """Nothing is changed or untracked."""
    if changed := git(root, "status", "--porcelain"):
        raise ReleaseError(f"changed or untracked: {listed(changed)}")
    return git(root, "rev-parse", "HEAD")[0]


def changelog(root: Path, version: str) -> str:
    """The newest heading of CHANGELOG.md is that of the version, with a date."""
    text = (root / "CHANGELOG.md").read_text("utf-8")
    newest = next(re.finditer(r"^## (.+)$", text, re.MULTILINE))[1]
    if not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", newest):
        raise ReleaseError(
            f"CHANGELOG.md's newest heading is {newest!r}, not '{version} - YYYY-MM-DD'"
        )
    return newest


def untagged(root: Path, version: str) -> str:
    """No tag has the version's name."""
    if git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"v{version} is tagged already; give the package a new one")
    return f"v{version}"


def git(root: Path, *arguments: str) -> list[str]:
    """The lines that git prints."""
    return command("git", "-C", root, *arguments).splitlines()


def tracked(root: Path) -> dict[str, str]:
    """Every tracked file, with the hash of what lies in the tree."""
    paths = command("git", "-C", root, "ls-files", "-z").split("\0")
    return {path: digest((root / path).read_bytes()) for path in paths if path}


def sdist_is_tree(sdist: Path, root: Path) -> str:
    """The sdist has every tracked file, and nothing else but its metadata."""
    found = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None, f"{member.name} is no file"
            found[member.name.partition("/")[2]] = digest(content.read())
    found.pop("PKG-INFO")
    same(tracked(root), found, "the tree", "the sdist")
    return f"{len(found)} files, and PKG-INFO"


def wheel_is_tree(wheel: Path, root: Path) -> str:
    """The wheel has the package, the stages and the results of GPUs, all of them."""
    expected = {}
    for path, content in tracked(root).items():
        folder = f"{path.partition('/')[0]}/"
        if folder == "pytest_gkd/" or folder in INSIDE:
            expected[path.replace(folder, INSIDE.get(folder, folder), 1)] = content
    same(expected, wheel_hashes(wheel), "the tree", "the wheel")
    return f"{len(expected)} files"


def wheel_hashes(wheel: Path) -> dict[str, str]:
    """The files of a wheel that are installed as they are, with their hashes."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: digest(archive.read(name))
            for name in archive.namelist()
            if ".dist-info/" not in name
        }


def digest(content: bytes) -> str:
    """A hash of a file's content."""
    return hashlib.sha256(content).hexdigest()


def same(one: dict[str, str], other: dict[str, str], name: str, its: str) -> None:
    """Two sets of files are the same. Raises ReleaseError with what differs."""
    wrong = [
        *(f"{path} is only in {name}" for path in sorted(one.keys() - other)),
        *(f"{path} is only in {its}" for path in sorted(other.keys() - one)),
        *(
            f"{path} differs"
            for path in sorted(one.keys() & other)
            if one[path] != other[path]
        ),
    ]
    if wrong:
        raise ReleaseError(listed(wrong))


def wheel_metadata(wheel: Path) -> Message:
    """What the index will show."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def metadata(told: Message, version: str) -> str:
    """The index will show the project's fields, and the Pythons as classified."""
    expected = {
        "Version": version,
        "License-Expression": PROJECT["license"],
        "License-File": "LICENSE",
        "Summary": PROJECT["description"],
        "Description-Content-Type": "text/markdown",
    }
    wrong = [
        f"{field} is {told[field]!r}, not {value!r}"
        for field, value in expected.items()
        if told[field] != value
    ]
    wanted = SpecifierSet(told["Requires-Python"])
    allowed = tuple(f"3.{n}" for n in range(50) if wanted.contains(f"3.{n}.0"))
    if allowed != PYTHONS:
        wrong.append(f"Requires-Python {wanted} is not the classifiers' {PYTHONS}")
    if wrong:
        raise ReleaseError("; ".join(wrong))
    urls = told.get_all("Project-URL", ["no URL: [project.urls] names none"])
    return f"Python {wanted}, {', '.join(urls)}"


def use_installed(source: Path, installed: Path) -> None:
    """Put the installed package in the place of an unpacked sdist's own."""
    for name, target in (
        ("pytest_gkd", installed),
        ("stages", installed / "stages"),
        ("gpu-results", installed / "gpu-results"),
    ):
        shutil.rmtree(source / name)
        (source / name).symlink_to(target)


def listed(names: list[str]) -> str:
    """Names in one line, the first few if there are many."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


if __name__ == "__main__":
    sys.exit(main())
