"""What happened in the run that these logs come from? Several files are its ranks."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pytest_gkd import phases
from pytest_gkd.match import (
    EvidenceLine,
    TextSource,
    advice,
    evidence_lines,
    headline,
    telling_lines,
)
from pytest_gkd.root import Found, choose
from pytest_gkd.rules import Catalogue
from pytest_gkd.scan import Hit, Scanner, index, shown

BLOCK = 1 << 20
EDGE = 1 << 20
MAX_CAUSES = 3
# Below this size looking for every signature here is quicker than starting grep.
SMALL = 1 << 19

_BAR = b"Training Progress:   0%"
_NOISE = re.compile(
    rb"Exception ignored in|destroy_process_group|resource_tracker|shutting down"
    rb"|[Ss]hutdown|SIGTERM|atexit|leaked"
)
_DISTILS = re.compile(rb"on_policy_distill|recipe\.gkd|gkd[./]|OnPolicyDistill|Teacher")
_FRAMEWORKS = {
    "verl": re.compile(rb"\bverl\b|actor_rollout_ref|\(WorkerDict pid="),
    "trl": re.compile(rb"\btrl[/.]|GRPOTrainer|GKDTrainer|GRPOConfig|\btrl\b"),
    "lightrft": re.compile(rb"(?i)lightrft"),
    "deepspeed": re.compile(rb"(?i)deepspeed"),
    "ray": re.compile(rb"ray::|\(raylet|\bRay\b|ray\.exceptions|\(\w+ pid=\d+"),
    "vllm": re.compile(rb"(?i)vllm|EngineCore"),
}
_SPECIFIC = ("verl", "trl", "lightrft", "deepspeed")


class LogError(Exception):
    """A file that cannot be read as a log; the text says which and why."""


@dataclass(frozen=True)
class CauseFound:
    """A cause in a log, with its proof, its advice and what followed from it."""

    cause: str
    confidence: str
    title: str
    why: str
    evidence: tuple[EvidenceLine, ...]
    advice: tuple[str, ...]
    consequences: tuple[tuple[str, EvidenceLine], ...] = ()


@dataclass(frozen=True)
class LogReport:
    """The verdict over all files.

    ``verdict`` is ``failed``, ``hung``, ``healthy`` or ``unknown``; ``phase`` one of
    ``phases.PHASES``. ``last`` is the last sign of life. ``telling`` are the lines to
    read when nothing is known. ``unreadable`` are the files that were left out.
    """

    verdict: str
    phase: str
    causes: tuple[CauseFound, ...] = ()
    last: EvidenceLine | None = None
    waits_for: str = ""
    telling: tuple[EvidenceLine, ...] = ()
    unreadable: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as ``gkd diagnose --format json`` prints it."""
        return {
            "schema": 1,
            "verdict": self.verdict,
            "phase": self.phase,
            "waits_for": self.waits_for,
            "last": _line_json(self.last) if self.last else None,
            "causes": [
                {
                    "cause": one.cause,
                    "confidence": one.confidence,
                    "title": one.title,
                    "why": one.why,
                    "evidence": [_line_json(line) for line in one.evidence],
                    "advice": list(one.advice),
                    "consequences": [
                        {"cause": cause, "file": line.source, "line": line.line}
                        for cause, line in one.consequences
                    ],
                }
                for one in self.causes
            ],
            "telling": [_line_json(line) for line in self.telling],
            "unreadable": list(self.unreadable),
        }


def _line_json(line: EvidenceLine) -> dict[str, Any]:
    return {"file": line.source, "line": line.line, "text": line.text}


@dataclass
class Log:
    """What was kept of one source: its hits, its first and its last bytes."""

    name: str
    hits: list[Hit] = field(default_factory=list)
    head: bytes = b""
    tail: bytes = b""
    tail_at: int = 0
    lines: int = 0

    @property
    def edges(self) -> bytes:
        """The first and the last bytes, each byte once."""
        return self.head[: self.tail_at] + self.tail


def read(
    stream: IO[bytes],
    name: str,
    number: int,
    catalogue: Catalogue,
    progress: Callable[[int], None] | None = None,
) -> Log:
    """Read a whole source in constant memory; ``number`` is its place among all.

    Raises LogError when it is empty or no text.
    """
    blocks = _counted(_text_blocks(stream, name), progress)
    log = Log(name)
    start = b""
    for block in blocks:
        start += block
        if len(start) > SMALL:
            break
    else:
        if not start:
            raise LogError(f"{name}: is empty")
        _keep(log, start)
        scanner = Scanner(index(catalogue), name, number)
        scanner.feed(start)
        log.hits = scanner.hits
        return log
    _keep(log, start)

    def everything() -> Iterator[bytes]:
        yield start
        for block in blocks:
            _keep(log, block)
            yield block

    log.hits = _scan_large(everything(), name, number, catalogue)
    return log


def _keep(log: Log, block: bytes) -> None:
    if len(log.head) < EDGE:
        log.head += block[: EDGE - len(log.head)]
    total = log.tail_at + len(log.tail) + len(block)
    log.tail = (log.tail + block)[-EDGE:]
    log.tail_at = total - len(log.tail)
    log.lines += block.count(b"\n")


def _counted(
    blocks: Iterator[bytes], progress: Callable[[int], None] | None
) -> Iterator[bytes]:
    done = 0
    for block in blocks:
        done += len(block)
        if progress is not None:
            progress(done)
        yield block


def _text_blocks(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """The bytes of the log, decompressed, as UTF-8 where it was UTF-16."""
    first = stream.read(BLOCK)
    if first[:2] == b"\x1f\x8b":
        blocks = _gunzip(first, stream, name)
    elif first[:4] == b"\x28\xb5\x2f\xfd":
        blocks = _unzstd(first, stream, name)
    else:
        blocks = _plain(first, stream)
    start = next(blocks, b"")
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        decoded = (start + b"".join(blocks)).decode("utf-16", "replace")
        yield decoded.encode()
        return
    sample = start[:8192]
    if sample[:4] in (b"\x7fELF", b"PAR1", b"PK\x03\x04") or (
        sample and sum(c < 9 or 13 < c < 27 for c in sample) > len(sample) * 0.3
    ):
        raise LogError(f"{name}: holds binary data, not the text of a log")
    yield start
    yield from blocks


def _plain(first: bytes, stream: IO[bytes]) -> Iterator[bytes]:
    block = first
    while block:
        yield block
        block = stream.read(BLOCK)


def _gunzip(first: bytes, stream: IO[bytes], name: str) -> Iterator[bytes]:
    reader = zlib.decompressobj(wbits=31)
    data = first
    while data:
        try:
            block = reader.decompress(data, BLOCK)
        except zlib.error as error:
            raise LogError(f"{name}: damaged gzip data: {error}") from error
        if block:
            yield block
        data = reader.unconsumed_tail
        if reader.eof:
            data, reader = reader.unused_data, zlib.decompressobj(wbits=31)
        data = data or stream.read(BLOCK)


def _unzstd(first: bytes, stream: IO[bytes], name: str) -> Iterator[bytes]:
    tool = shutil.which("zstd")
    if tool is None:
        raise LogError(f"{name}: is zstd data, and there is no zstd to read it with")
    with _fed([tool, "-dcq"], iter([first]), stream) as output:
        yield from _plain(output.read(BLOCK), output)


@contextlib.contextmanager
def _fed(
    command: list[str], blocks: Iterable[bytes], rest: IO[bytes] | None = None
) -> Iterator[IO[bytes]]:
    """The output of a filter that is fed the blocks, and then the rest, by a thread.

    An error of the feeding thread is raised at the end.
    """
    failures: list[BaseException] = []
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"LC_ALL": "C"}
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def feed(pipe: IO[bytes]) -> None:
        try:
            with pipe:
                for block in blocks:
                    pipe.write(block)
                while rest is not None and (block := rest.read(BLOCK)):
                    pipe.write(block)
        except BrokenPipeError:
            pass  # the reader has seen enough
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=feed, args=(process.stdin,), daemon=True)
    thread.start()
    try:
        yield process.stdout
        thread.join()
    finally:
        process.stdout.close()
        process.kill()
        process.wait()
    if failures:
        raise failures[0]


def _scan_large(
    blocks: Iterator[bytes], name: str, number: int, catalogue: Catalogue
) -> list[Hit]:
    """The hits of a large source: grep finds the lines, the Scanner reads them."""
    scanner = Scanner(index(catalogue), name, number)
    tool = shutil.which("grep")
    if tool is None:
        for block in _whole_lines(blocks):
            scanner.feed(block)
        return scanner.hits
    with tempfile.NamedTemporaryFile(suffix=".txt") as words:
        words.write(b"\n".join(scanner.texts) + b"\n")
        words.flush()
        command = [tool, "-a", "-n", "-b", "-F", "-f", words.name]
        with _fed(command, blocks) as output:
            for line in output:
                place, offset, text = line.split(b":", 2)
                scanner.feed_line(text, int(place), int(offset))
    return scanner.hits


def _whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if not cut and len(rest) < 16 * BLOCK:
            rest += block
            continue
        yield rest + block[:cut]
        rest = block[cut:]
    if rest:
        yield rest


def judge(logs: list[Log], catalogue: Catalogue) -> LogReport:
    """The verdict over the logs of one run."""
    text = b"\n".join(log.edges for log in logs)
    distils = _DISTILS.search(text) is not None
    phase = _phase(logs, distils)
    found = choose(_that_count(logs), catalogue)
    strong = [one for one in found if not one.weak and one.confidence != "guess"]
    strong = strong or [one for one in found if not one.weak and _failed(logs)]
    if strong:
        frameworks = {name for name, mark in _FRAMEWORKS.items() if mark.search(text)}
        causes = _causes(strong, found, frameworks, catalogue)
        return LogReport("failed", phase, causes, last=_last(logs))
    if any(_finished(log) >= 0 for log in logs):
        return LogReport("healthy", phase, last=_last(logs))
    if _failed(logs):
        return LogReport("unknown", phase, last=_last(logs), telling=_telling(logs))
    if any(phases.WORKING.search(line) for log in logs for line in _end(log)):
        return LogReport("healthy", phase, last=_last(logs))
    if phase != "unknown":
        waits = phases.WAITS_FOR[phase]
        return LogReport("hung", phase, last=_last(logs), waits_for=waits)
    return LogReport("unknown", phase, last=_last(logs), telling=_telling(logs))


def _that_count(logs: list[Log]) -> Iterator[Hit]:
    """The hits that the run did not survive, and those it survives in silence."""
    over = {log.name: _finished(log) for log in logs}
    steps = {log.name: _later_steps(log) for log in logs}
    run_over = all(at >= 0 for at in over.values())
    for log in logs:
        for hit in log.hits:
            if hit.signature.silent:
                yield hit
            elif over[log.name] >= 0 and hit.order >= over[log.name]:
                if hit.tier == "cause" and not _shutdown(log, hit):
                    yield hit
            elif not run_over and not any(
                at > hit.order + 2000 for at in steps[log.name][-2:-1]
            ):
                yield hit


def _finished(log: Log) -> int:
    """At which byte the log says that the run is over, or -1."""
    found = -1
    for match in phases.FINISHED.finditer(log.tail):
        if not _quoted(log.tail, match.start()):
            found = log.tail_at + match.start()
    return found


def _quoted(text: bytes, at: int) -> bool:
    """Whether the find is part of a configuration that is printed."""
    start = text.rfind(b"\n", 0, at) + 1
    return text[start:at].count(b"':") > 3


def _later_steps(log: Log) -> list[int]:
    return [log.tail_at + match.start() for match in phases.STEP.finditer(log.tail)]


def _shutdown(log: Log, hit: Hit) -> bool:
    at = hit.order - log.tail_at
    return _NOISE.search(log.tail[max(0, at - 600) : at + 400]) is not None


def _end(log: Log, count: int = 12) -> list[bytes]:
    lines = [line for line in re.split(rb"[\r\n]+", log.tail[-20000:]) if line.strip()]
    return lines[-count:]


def _failed(logs: list[Log]) -> bool:
    for log in logs:
        steps = _later_steps(log)
        for line in re.finditer(rb"[^\r\n]+", log.tail):
            if phases.FAILED.search(line.group()[:300]):
                at = log.tail_at + line.start()
                if not any(step > at for step in steps[-2:-1]):
                    return True
    return False


def _phase(logs: list[Log], distils: bool) -> str:
    """The phase of the log that came farthest."""
    found = []
    for log in logs:
        text = log.edges
        marker = phases.last_marker(text)
        bar = text.rfind(_BAR)
        if bar >= 0 and (marker is None or bar >= marker.at):
            marker = phases.Marker(bar, "bar")
        found.append(phases.phase_of(marker, distils))
    return max(found, key=_far)


def _far(phase: str) -> int:
    return -1 if phase == "unknown" else phases.PHASES.index(phase)


def _last(logs: list[Log]) -> EvidenceLine | None:
    for log in logs:
        lines = _end(log, 1)
        if lines:
            return EvidenceLine(log.name, log.lines or 1, shown(lines[-1]))
    return None


def _telling(logs: list[Log]) -> tuple[EvidenceLine, ...]:
    sources = []
    for log in logs:
        text = log.tail[-200_000:].decode("utf-8", "replace")
        sources.append(TextSource(log.name, text))
    lines = telling_lines(sources)
    # Only the end was looked at, so its line numbers are not those of the file.
    return tuple(EvidenceLine(line.source, None, line.text) for line in lines)


def _causes(
    strong: list[Found],
    found: list[Found],
    frameworks: set[str],
    catalogue: Catalogue,
) -> tuple[CauseFound, ...]:
    root = strong[0]
    also = [one for one in strong[1:] if one.rank <= root.rank and not one.explained]
    also = also[: MAX_CAUSES - 1]
    followed = [one for one in found if one is not root and one not in also]
    reports = []
    for one in (root, *also):
        rule = catalogue[one.cause]
        consequences = [
            (other.cause, EvidenceLine(other.best.source, other.best.line, ""))
            for other in (followed if one is root else [])
        ]
        reports.append(
            CauseFound(
                cause=rule.id,
                confidence=one.confidence if one is root else "guess",
                title=headline(rule, one.best),
                why=rule.why,
                evidence=tuple(evidence_lines(one.hits)),
                advice=advice(rule, frameworks, one.best.facts, of_stage=False),
                consequences=tuple(consequences),
            )
        )
    return tuple(reports)


def diagnose(
    paths: Iterable[Path | IO[bytes]],
    catalogue: Catalogue,
    progress: Callable[[int], None] | None = None,
) -> LogReport:
    """Read all sources and judge them together.

    A file that cannot be read is named in ``unreadable`` and does not lose the
    others. Raises LogError when none can be read.
    """
    logs: list[Log] = []
    unreadable: list[str] = []
    for number, source in enumerate(paths):
        name = str(source) if isinstance(source, Path) else "standard input"
        try:
            if isinstance(source, Path):
                with source.open("rb") as stream:
                    logs.append(read(stream, name, number, catalogue, progress))
            else:
                logs.append(read(source, name, number, catalogue, progress))
        except LogError as error:
            unreadable.append(str(error))
        except OSError as error:
            unreadable.append(f"{name}: {(error.strerror or str(error)).lower()}")
    if not logs:
        raise LogError("\n".join(unreadable))
    report = judge(logs, catalogue)
    return LogReport(**{**report.__dict__, "unreadable": tuple(unreadable)})
