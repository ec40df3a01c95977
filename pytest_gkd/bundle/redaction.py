r"""Redacts secrets from the texts of a bundle, and lists what was redacted and where.

Stricter than ``sanitize``, which every text passes anyway: a bundle goes to strangers,
so what merely looks like a secret goes as well. Four signs: a known shape (``hf_``), a
name (``db_pass: ...``), a place (``mysql -p...``, the end of a private key), and
randomness (entropy). A value that was given away once is redacted wherever else it
appears, also where it was cut short or wrapped. Linear time.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ahocorasick_rs import AhoCorasick, MatchKind

from pytest_gkd import sanitize

RANDOM = "random text"
ELSEWHERE = "a secret seen elsewhere"

# -- by name -----------------------------------------------------------------------

_PEEK = 400
# The name's end, from which it is read backwards: a search for its start is quadratic.
_NAMED = re.compile(
    r"(?P<end>pass|passwd|password|passphrase|pwd|pat|token|secret|credentials?|key"
    r"|webhook(?:_url)?|dsn|connection_string|auth|session(?:id|_id)?)"
    r"(?:[\"']\]?)?\s{0,3}(?:=>?|:)\s{0,3}(?:[fbru]{1,2}(?=[\"']))?(?P<open>[\"'\[(]{0,2})",
    re.IGNORECASE,
)
_BARE_VALUE = re.compile(rf"[^\s\"',;&)\]}}<>]{{1,{_PEEK}}}")
# Values of these are secrets whatever they look like; of the others if random.
_CERTAIN = re.compile(
    r"(?i)pass|passwd|password|passphrase|secret|credentials?|webhook\w*|dsn"
    r"|connection_string"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Their keys and tokens are no secrets: of a cache, a table, a vocabulary.
_HARMLESS = {
    *("cache", "pad", "eos", "bos", "unk", "prompt", "response", "primary", "sort"),
    *("public", "foreign", "hash", "partition", "idempotency", "dedup", "compile"),
}
_NO_SECRET = re.compile(
    r"[\d.,:+-]+$|[/<{]|\*{3}|~/|\.{1,3}/|\.{3}|\$(?:[A-Z_][A-Z0-9_]*$|[{(])"
    r"|%(?:[a-z(]|\w+%)|(?i:none|null|true|false|empty|unset|required|optional"
    r"|yes|no|on|off|ok|failed|passed|error|str|bytes|string|int|torch)\b"
)
# A line of a configuration or an environment whose value is a phrase.
_PHRASE = re.compile(
    r"^[ \t]{0,40}(?:- )?(?:export )?[\w.-]{0,60}(?:passw(?:or)?d|passphrase|secret)"
    r"[ \t]{0,3}[:=][ \t]{0,3}(?P<value>\S[^\n]{3,200})$",
    re.IGNORECASE | re.MULTILINE,
)

# -- by place ----------------------------------------------------------------------

# Letters and digits without a word's end for long.
_OPAQUE = (
    r"[\w-]{0,24}(?:[0-9a-f]{24,200}|(?=[A-Za-z]{0,30}\d)[A-Za-z0-9]{20,200})"
    r"(?![A-Za-z0-9])[\w.=-]{0,200}"
)
_PLACES = (
    (
        "password option",
        re.compile(
            r"\b(?:(?:docker|podman|nerdctl|helm registry|swanlab|skopeo) login"
            r"|ossutil\w*|redis-cli|mysql\w*|mariadb|smbclient|ldapsearch)\b"
            r"[^\n]{0,200}?\s-[pkaw] ?[\"']?(?P<value>[^\s\"'-][^\s\"']{3,400})"
        ),
    ),
    (
        "user and password",
        re.compile(
            r"\b(?:wget|http|mc)\b[^\n]{0,300}?\s(?:-u|-U|--user|--proxy-user)[ =]"
            r"[\"']?[^:\s\"']{0,60}:(?P<value>[^\s\"']{3,400})"
        ),
    ),
    (
        "passphrase option",
        re.compile(
            r"\bssh-keygen\b[^\n]{0,300}?\s-[NP] ?[\"']?"
            r"(?P<value>[^\s\"'-][^\s\"']{3,400})"
        ),
    ),
    (
        "key of a command",
        re.compile(
            r"(?i)\b(?:set|add|login|auth|config)\s+(?:api[_-]?key|(?:\w{1,20}-)?token"
            rf"|secret|password)\s+[\"']?(?P<value>{_OPAQUE})"
        ),
    ),
    (
        "refused key",
        re.compile(
            r"(?i)\b(?:invalid|incorrect|wrong|malformed|expired|unknown|revoked)\s"
            r"(?:\w{1,20}\s){0,2}(?:token|key|secret|password|credentials?)"
            rf"(?:\sprovided)?:?\s[\"']?(?P<value>{_OPAQUE})"
        ),
    ),
    ("netrc", re.compile(r"\blogin\s+\S{1,80}\s+password\s+(?P<value>\S{3,400})")),
    (
        "parameter of an address",
        re.compile(
            r"[?&](?:key|api_?key|token|access_token|auth|code|secret|password|signature)="
            r"(?P<value>[^&\s\"'<>]{8,400})",
            re.IGNORECASE,
        ),
    ),
    (
        "header",
        re.compile(
            r"(?i)-(?:auth|key|token|secret)(?:-[a-z]{1,10})?[\"']?: ?[\"']?"
            r"(?P<value>[\w.~+/=-]{20,2000})"
        ),
    ),
    (
        "basic authorization",
        re.compile(r"(?i)\bbasic (?P<value>[A-Za-z0-9+/]{16,2000}={0,2})(?![\w/+])"),
    ),
)
# Kubernetes' manifest of a secret: all that it holds, whatever its names.
_MANIFEST = re.compile(
    r"kind: Secret\b[^\0]{0,1000}?\n(?:stringData|data):\n"
    r"(?P<value>(?:[ \t]+[^\n]+\n?){1,200})"
)
_KEY_END = re.compile(r"-----END (?:[A-Z]{1,20} ){0,3}PRIVATE KEY")
_NO_KEY = re.compile(r"[^A-Za-z0-9+/=\s\\]")
_KEY_BYTES = 8192
_BOT = re.compile(r"\d+:")

# -- by randomness -----------------------------------------------------------------

# Longer is data, such as the base64 of a tensor.
SHORTEST, LONGEST = 20, 160
_TOKEN = re.compile(r"[A-Za-z0-9+/_-]{20,}={0,2}")
_RUNS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
# Words and numbers per letter or digit, and the share of letters in words of four or
# more. Of random ones of 40 characters, 98 of 100 lie on the other side of both; names
# of classes, models and files do not.
_WORDS_PER_LETTER, _IN_WORDS = 0.37, 0.45
_DIFFERENT = 0.4  # characters per character, of the first 40
_NAMES = re.compile(
    # A C++ symbol, what Ray calls its jobs and data sets, a UUID.
    r"_Z|raysubmit_|dataset_|(?:.{0,8}-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
)
_FOLDER = re.compile(r"(?:^|/)(?:[a-z][a-z._-]{2,}|[A-Za-z]{3,})(?:/|$)|^/[a-z]")


class Redaction(NamedTuple):
    """Something that was redacted: the file, its line there, and what gave it away."""

    file: str
    line: int
    why: str


class _Span(NamedTuple):
    begin: int
    end: int
    why: str


def redact(
    texts: Mapping[str, str], also: Iterable[str] = ()
) -> tuple[dict[str, str], list[Redaction]]:
    """The texts by file name without secrets, and what was redacted in which line.

    ``also`` are secrets known from elsewhere, such as this process's environment.
    """
    shown = {name: sanitize.plain(text) for name, text in texts.items()}
    spans = {name: list(_suspects(text)) for name, text in shown.items()}
    values = {one for one in also if _is_telling(one)}
    for name, found in spans.items():
        values |= {
            value
            for one in found
            if _is_telling(value := shown[name][one.begin : one.end])
        }
    elsewhere = _Elsewhere(values)
    told: list[Redaction] = []
    done = {}
    for name, text in shown.items():
        merged = _merged([*spans[name], *elsewhere.places(text)])
        done[name] = _without(text, merged)
        told += _lines(name, text, merged)
    return done, told


def of_environment(variables: Mapping[str, str]) -> set[str]:
    """The secrets among variables, by their names."""
    return {
        value
        for name, value in variables.items()
        if sanitize.names_secret(name, value) or _CERTAIN.search(name)
    }


def text(raw: str) -> str:
    """One text by itself, redacted."""
    return redact({"": raw})[0][""]


def _suspects(raw: str) -> Iterator[_Span]:
    for sign, begin, end in sanitize.places(raw):
        if _BOT.fullmatch(sign):  # tells whose token it is
            yield _Span(begin - len(sign), end, "token of a bot")
        else:
            yield _Span(begin, end, sanitize.line(sign)[:40])
    for begin, end in _worth_a_look(raw):
        yield from _by_name(raw, begin, end)
        for why, pattern in _PLACES:
            for found in pattern.finditer(raw, begin, end):
                if sanitize.MASK not in found["value"]:
                    yield _Span(*found.span("value"), why)
    for found in _MANIFEST.finditer(raw):
        yield _Span(*found.span("value"), "Secret of Kubernetes")
    done = 0
    for found in _KEY_END.finditer(raw):
        low = max(done, found.start() - _KEY_BYTES)
        done = found.end()
        before = raw[low : found.start()]
        other = [m.end() for m in _NO_KEY.finditer(before)]
        yield _Span(low + (other[-1] if other else 0), found.start(), "private key")
    for found in _TOKEN.finditer(raw):
        if is_random(found[0]):
            yield _Span(*found.span(), RANDOM)


def _worth_a_look(raw: str) -> Iterator[tuple[int, int]]:
    """The lines with a word that may give a secret away, each with the one before."""
    low = raw.lower()
    if len(low) != len(raw):  # a few letters are two in lower case
        yield 0, len(raw)
        return
    begin = end = 0
    for _, at, _ in _words().find_matches_as_indexes(low):
        if at < end:
            continue
        start = raw.rfind("\n", 0, at) + 1
        start = raw.rfind("\n", 0, max(0, start - 1)) + 1
        if start > end and end:
            yield begin, end
            begin = start
        elif not end:
            begin = start
        end = raw.find("\n", at)
        end = len(raw) if end < 0 else end
    if end:
        yield begin, end


@functools.cache
def _words() -> AhoCorasick:
    return AhoCorasick(
        [
            *("pass", "pwd", "pat=", "pat:", "pat'", 'pat"', "token", "secret"),
            *("credential", "key", "webhook", "dsn", "connection_string", "auth"),
            *("session", "cookie", "login", "ossutil", "redis-cli", "mysql", "curl"),
            *("mariadb", "smbclient", "ldapsearch", "wget", "http ", "mc ", "basic "),
            *("code=", "signature="),
        ]
    )


def _by_name(raw: str, begin: int, end: int) -> Iterator[_Span]:
    for found in _PHRASE.finditer(raw, begin, end):
        if not _NO_SECRET.match(found["value"].strip("\"'")):
            yield _Span(*found.span("value"), "password")
    for found in _NAMED.finditer(raw, begin, end):
        low = found.start()
        while low > max(0, found.start() - 60) and (
            raw[low - 1].isalnum() or raw[low - 1] in "_.-"
        ):
            low -= 1
        name = raw[low : found.end("end")]
        words = [word.lower() for word in _WORD.findall(name)]
        if not words or not _HARMLESS.isdisjoint(words):
            continue
        last = found["end"].lower()
        if words[-1] not in (last, last.split("_")[-1]) and not name.endswith(
            ("PASS", "pass")
        ):
            continue  # compass: ..., monkey: ...
        quote = found["open"][-1:]
        if "]" in found[0] and quote not in ("'", '"'):
            continue  # code: another name, or a call
        is_list = any(sign in found["open"] for sign in "[(")
        yield from _value(raw, found.end(), quote, is_list, name, last)


def _value(
    raw: str, at: int, quote: str, is_list: bool, name: str, last: str
) -> Iterator[_Span]:
    if quote in ("'", '"'):
        end = raw.find(quote, at, at + 2000)
        end = end if end >= 0 else min(len(raw), at + _PEEK)
        value = raw[at:end].split("\n")[0]
    else:
        found = _BARE_VALUE.match(raw, at)
        value = found[0] if found else ""
    certain = _CERTAIN.fullmatch(last) is not None or (
        is_list and last in ("key", "token")
    )
    if len(value) < 4 or _NO_SECRET.match(value) or sanitize.MASK in value:
        return
    if certain or _is_credential(value):
        yield _Span(at, at + len(value), name[-40:])


def _is_credential(value: str) -> bool:
    """Whether a named value, of a key or a token, is one: long, letters and digits."""
    return (
        len(value) >= 16
        and re.fullmatch(r"[\w.~+/=-]+", value) is not None
        and any(c.isdigit() for c in value)
        and any(c.isalpha() for c in value)
        and (
            is_random(value)
            or re.fullmatch(r"(?:[0-9a-f]{32,}|[a-z0-9]{20,}|[A-Z0-9]{20,})", value)
            is not None
        )
    )


def is_random(token: str) -> bool:
    """Whether a token of base64 or of letters and digits is a random one.

    Of 20 to 160 characters; hexadecimal ones, which hashes and ids are, never are.
    """
    if not SHORTEST <= len(token.rstrip("=")) <= LONGEST or _NAMES.match(token):
        return False
    if "/" in token and _FOLDER.search(token):
        return False
    runs = _RUNS.findall(token)
    letters = sum(map(len, runs))
    has = (
        any(map(is_kind, token)) for is_kind in (str.islower, str.isupper, str.isdigit)
    )
    if not all(has) or letters < 0.8 * len(token):
        return False
    in_words = sum(len(run) for run in runs if len(run) >= 4 and run[1:].islower())
    first = token[:40]
    return (
        len(runs) >= _WORDS_PER_LETTER * letters
        and in_words <= _IN_WORDS * letters
        and len(set(first)) >= _DIFFERENT * len(first)
    )


# -- elsewhere ---------------------------------------------------------------------

_EDGE = 10


def _is_telling(value: str) -> bool:
    """Whether a value is so peculiar that it means the same wherever it appears."""
    return (
        len(value) >= 8
        and len(set(value)) >= 6
        and any(c.isdigit() for c in value)
        and any(c.isalpha() for c in value)
        and sanitize.MASK not in value
        and "\n" not in value
    )


class _Elsewhere:
    """Finds known secrets, also those cut short or wrapped: by their first and last
    characters."""

    def __init__(self, values: set[str]) -> None:
        edges = set[str]()
        for value in values:
            if len(value) > 20:
                ends = (value[:_EDGE], value[-_EDGE:])
                edges |= {one for one in ends if _is_telling(one)}
            edges.add(value)
        self._found = (
            AhoCorasick(sorted(edges), matchkind=MatchKind.LeftmostLongest)
            if edges
            else None
        )

    def places(self, raw: str) -> Iterator[_Span]:
        """Where they are."""
        if self._found is None:
            return
        for _, begin, end in self._found.find_matches_as_indexes(raw):
            while end < len(raw) and (raw[end].isalnum() or raw[end] in "_+/=~"):
                end += 1
            while begin and (raw[begin - 1].isalnum() or raw[begin - 1] in "+/~"):
                begin -= 1
            yield _Span(begin, end, ELSEWHERE)


def _merged(spans: list[_Span]) -> list[_Span]:
    merged: list[_Span] = []
    for one in sorted(spans, key=lambda span: (span.begin, -span.end)):
        if merged and one.begin < merged[-1].end:
            last = merged[-1]
            merged[-1] = _Span(last.begin, max(last.end, one.end), last.why)
        elif one.end > one.begin:
            merged.append(one)
    return merged


def _without(raw: str, spans: list[_Span]) -> str:
    parts, done = [], 0
    for one in spans:
        parts += [raw[done : one.begin], sanitize.MASK]
        done = one.end
    return "".join([*parts, raw[done:]])


def _lines(name: str, raw: str, spans: list[_Span]) -> Iterator[Redaction]:
    if not spans:
        return
    # Of the redacted text, whose lines the reader counts: a key of ten lines is one.
    ends, removed = [m.start() for m in re.finditer("\n", raw)], 0
    for one in spans:
        line = bisect_right(ends, one.begin - 1) + 1 - removed
        removed += raw.count("\n", one.begin, one.end)
        yield Redaction(name, line, one.why)
