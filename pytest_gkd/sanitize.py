r"""Makes untrusted text safe to display.

Terminals obey escape sequences, CI runners obey lines that look like commands, and
logs repeat secrets. All text from logs, stages, files and processes goes through here
before it is shown or kept: ``text`` keeps lines, ``line`` makes one, ``data`` is for
JSON. Each is idempotent and takes linear time.

Escape sequences are removed, other invisible characters are written as in Python
(``\x08``, ``\u202e``), commands are broken by a space (``## [error]``, ``: :error::``),
and only the kind of a secret remains (``hf_***``, ``--token ***``).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from typing import Any

MASK = "***"

# ECMA-48: CSI, the strings (OSC, DCS, SOS, PM, APC) that end on their line, and the
# remaining two-character sequences. A string does not swallow the lines after it.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\n\x80-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)
_RETURN = re.compile(r"\r+\n?")
# GitHub's runner trims a line and looks for ::name ...::, and finds ##[name] anywhere
# in it (actions/runner, src/Runner.Common/ActionCommand.cs); Azure and TeamCity have
# ##vso[ and ##teamcity[.
_COMMAND = re.compile(r"(?<!\S)::(?=[A-Za-z][\w-]*(?: [^\n]*?)?::)")
_BRACKET_COMMAND = re.compile(r"##(?=\w*\[)")

# Secrets recognizable by their prefix, and what follows it.
_KINDS = {
    **dict.fromkeys(("hf_", "api_org_", "npm_"), r"[A-Za-z0-9]{20,}"),
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"[A-Za-z0-9]{20,}"),
    **dict.fromkeys(("github_pat_", "glpat-", "nvapi-", "pypi-"), r"[\w-]{16,}"),
    **dict.fromkeys(("wandb_v1_", "xoxb-", "xoxp-", "xoxa-", "xapp-"), r"[\w-]{16,}"),
    **dict.fromkeys(("AKIA", "ASIA"), r"[0-9A-Z]{12,}\b"),
    # Each format as in gitleaks' rules (github.com/gitleaks/gitleaks, config/).
    **dict.fromkeys(
        ("gsk_", "r8_", "sk_live_", "rk_live_", "xai-"), r"[A-Za-z0-9]{24,}"
    ),
    **dict.fromkeys(("dckr_pat_", "dckr_oat_", "hvs.", "hvb.", "ya29."), r"[\w-]{20,}"),
    **dict.fromkeys(
        ("glrt-", "gldt-", "glptt-", "glsa_", "glc_", "tvly-"), r"[\w-]{20,}"
    ),
    "dapi": r"(?<![\w-]dapi)(?=[0-9a-f]{32})[0-9a-f]{32}(?:-\d)?\b",
    "LTAI": r"(?<!\wLTAI)[A-Za-z0-9]{12,}\b",
    "SG.": r"(?<!\wSG\.)[\w-]{16,}\.[\w-]{16,}",
    # A token of ModelScope is an id; AWS's of a session begins with its region.
    "ms-": r"(?<!\wms-)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
    "IQoJb3JpZ2luX2Vj": r"[\w+/=-]{40,}",
    "eyJhcGlfYWRkcmVzcyI6": r"[\w+/=-]{16,}",
    "AIza": r"[\w-]{30,}",
    **dict.fromkeys(("lsv2_pt_", "lsv2_sk_"), r"[0-9a-f]{32}_[0-9a-f]{10}"),
    "AGE-SECRET-KEY-1": r"[0-9A-Z]{50,}",
    # Not at the end of task- or disk-, but after an escaped line end, such as \n.
    "sk-": r"(?:(?<![A-Za-z0-9_]sk-)|(?<=\\[nrt]sk-))(?=[\w-]{0,80}\d)[\w-]{20,}",
    "eyJ": r"(?:(?<![\w-]eyJ)|(?<=\\[nrt]eyJ))[\w-]{10,}\.[\w-]{10,}\.[\w-]*",
}
# Placeholders for a secret yet to be filled in: $NAME, <name>, ...; and nothing else.
_UNFILLED = r"(?:\$\{?[A-Z_][A-Z0-9_]{0,40}\}?|<[\w -]{1,40}>|\.{3}|…)(?=[\s\"'@&,;]|$)"
# Random letters and digits: two numbers or more, and three digits.
_OPAQUE = (
    r"(?=[A-Za-z]{0,40}\d{1,40}[A-Za-z]{1,40}\d)(?=(?:[A-Za-z]{0,40}\d){3})"
    r"[A-Za-z0-9]{16,200}(?![\w-])"
)
# Base64 of "user:password" (RFC 7617): of printable ASCII, so that of every four of
# its characters each of the first three can only be some. Words are not like that.
_BASIC = (
    r"(?=(?:[I-Za-f][C-HS-Xi-nyz0-3][ABEFIJMNQRUVYZcdghklopstwx014589][\w+/]){3})"
    r"[A-Za-z0-9+/]{12,}={0,2}(?![\w+/])"
)
# Not a number with its unit: of "loss/token: 1.2345e-05", "time per token=0.01234s".
_CREDENTIAL = re.compile(
    r"(?![\d.]+(?:e[+-]?\d+)?[A-Za-z]{0,3}(?:/\w+)?$)(?=\D*\d)(?=.*[A-Za-z])"
    r"[\w.~+/=-]{8,}"
)
# A scheme (those of RFC 9110, 11.6.2, and of clouds), and what it is followed by.
_SCHEME = "(?i:basic|bearer|token|negotiate|oauth|api-?key|aws|oss)"
_AUTHORIZATION = re.compile(
    rf"((?i:authorization)(?:[\"'], ?b?[\"'](?={_SCHEME} )|[\"']?[:=] ?b?[\"']?)"
    rf"(?:{_SCHEME} )?)(?!{_SCHEME}\b)(?!(?i:required|missing|invalid|failed|realm)\b)"
    rf"(?!{_UNFILLED})"
    r"(?:\w{4,8}\*{3}:)?[^\s\"',*]{6,}"
)
# What a cloud's id of a key is followed by: AWS's has 40 characters, Alibaba's 30,
# Tencent's 32.
_CLOUD = re.compile(
    r"((?:AKIA|ASIA|LTAI|AKID)(?:\w{12,40}(?!\w)|\*{3})[^*]{1,40}?(?<![\w+/]))"
    r"(?=[^\s]{0,39}[A-Z])(?=[^\s]{0,39}[a-z])(?=[^\s]{0,39}\d)"
    r"[A-Za-z0-9+/]{30,40}(?![\w+/])"
)
# RFC 6265, 4.1.1: pairs of names and values; what follows is not secret (Expires=...).
_COOKIE_VALUE = r"(?:\"[^\s\",;]*\"|[^\s\"',;\\]+)"
_COOKIE = re.compile(
    r"([Cc]ookie(?:[\"'], ?b?[\"']|[\"']? ?[:=] ?b?[\"']?"
    r"|\s(?=[\"']?[\w.-]{1,80}=\S{8})[\"']?)(?=[\w.-]))"
    rf"[^\s\"',;=:(]{{1,80}}=(?!{_UNFILLED}){_COOKIE_VALUE}"
    rf"(?:; ?[^\s\"',;=]{{1,80}}={_COOKIE_VALUE}?)*"
)
# Each with a literal that its matches contain, whose absence is seen at once.
_SHAPES = (
    *(
        (kind, re.compile(rf"({re.escape(kind)}){rest}"))
        for kind, rest in _KINDS.items()
    ),
    (
        "PRIVATE KEY-----",
        re.compile(
            r"(-----BEGIN (?:[A-Z]{1,20} ){0,3}PRIVATE KEY-----)[A-Za-z0-9+/=\s\\]{4,}"
        ),
    ),
    (
        "://",
        re.compile(
            rf"(://[^\s/?#@:\"']{{0,200}}:)(?!{_UNFILLED})[^\s/?#\"']{{1,500}}(?=@)"
        ),
    ),
    ("://", re.compile(rf"(://){_OPAQUE}(?=@)")),
    # Addresses that let whoever knows them post: the last part is the secret.
    (
        "hooks.slack.com/",
        re.compile(r"(hooks\.slack\.com/(?:services|workflows|triggers)/)[\w/-]{16,}"),
    ),
    ("/api/webhooks/", re.compile(r"(/api/webhooks/)\d{15,22}/[\w-]{30,}")),
    ("/bot/v2/hook/", re.compile(r"(/bot/v2/hook/)[\w-]{16,}")),
    ("/webhook/send?key=", re.compile(r"(/webhook/send\?key=)[\w-]{16,}")),
    (":A", re.compile(r"(?<![\d:])(\d{5,16}:)A(?=[\w-]*\d)[\w-]{34}(?![\w-])")),
    ("sig=", re.compile(rf"([?&]sig=)(?!{_UNFILLED})[^&\s\"']+")),
    (
        "ignature=",
        re.compile(
            r"([?&](?:[A-Za-z]{1,8}-){0,2}[Ss]ignature="
            r"|Signature=(?=[0-9a-f]{64}\b))"
            rf"(?!{_UNFILLED})[^&\s\"']{{16,}}"
        ),
    ),
    # A parameter of an address, whose value has letters and digits.
    *(
        (
            sign,
            re.compile(
                rf"(\{sign}(?i:key|(?:id[_-]?|security-|)token|auth|code|pwd|pass|jwt|sid"
                r"|j?session(?:[_-]?id)?)=)"
                r"(?=[^\d\s&]{0,80}\d)(?=[^A-Za-z\s&]{0,80}[A-Za-z])[\w.~%+/=-]{8,}"
            ),
        )
        for sign in "?&;"
    ),
    (
        "X-Amz-",
        re.compile(
            r"(X-Amz-(?:Signature|Credential|Security-Token)=)"
            rf"(?!{_UNFILLED})[^&\s\"']+"
        ),
    ),
    ("earer", re.compile(r"([Bb]earer(?:\s|%20))[\w.~+/=-]{16,}")),
    ("uthorization", _AUTHORIZATION),
    ("AUTHORIZATION", _AUTHORIZATION),
    *(
        (sign, re.compile(rf"({sign}){_BASIC}"))
        for sign in ("Basic ", "basic ", '"auth": "')  # the last is docker's
    ),
    ("ookie", _COOKIE),
    *((kind, _CLOUD) for kind in ("AKIA", "ASIA", "LTAI", "AKID")),
    # In a sentence: password "...", invalid API key ..., for token ....
    *(
        (
            word,
            re.compile(
                rf"({word}\s{{1,2}}(?P<quote>[\"'`]))(?!{_UNFILLED})(?!(?i:none|null)\b)"
                r"[^\"'`\n]{1,200}(?=(?P=quote))"
            ),
        )
        for word in ("password", "Password", "passwd", "passphrase")
    ),
    *(
        (
            word,
            re.compile(rf"({word}(?: provided)?:? [\"'`]?){_OPAQUE}"),
        )
        for word in (
            *("token", "Token", "TOKEN", "api key", "API key", "API Key"),
            *("access key", "secret key"),
        )
    ),
    *(
        (
            word,
            re.compile(
                rf"({word}(?:[:\uff1a=]|为|是) ?[\"']?)(?=[^\s\d]{{0,40}}\d)"
                r"[A-Za-z0-9_!@#$%^&.+/=-]{6,}"
            ),
        )
        for word in ("密码", "口令", "密钥")
    ),
    # Options of commands that are shown by set -x.
    (
        "curl ",
        re.compile(
            r"(curl\b[^\n]{0,300}?\s(?:-u|--user)[ =]?[\"']?[^:\s\"']{1,60}:)"
            rf"(?!{_UNFILLED})[^\s\"']{{3,}}"
        ),
    ),
    ("sshpass -p", re.compile(rf"(sshpass -p ?[\"']?)(?!{_UNFILLED})[^\s\"']{{3,}}")),
    (
        "docker login ",
        re.compile(
            r"(docker login\b[^\n]{0,200}?\s(?:-p|--password)[ =]?[\"']?)"
            rf"(?!{_UNFILLED})(?!-)[^\s\"']{{3,}}"
        ),
    ),
    # MySQL's own take a password only without a blank; -P is a port.
    *(
        (
            program,
            re.compile(
                rf"((?<![\w-]){program}\b[^\n]{{0,200}}?\s-p[\"']?)"
                rf"(?!{_UNFILLED})[^\s\"'-][^\s\"']{{2,}}"
            ),
        )
        for program in ("mysql", "mysqldump", "mysqladmin", "mariadb")
    ),
    # A line of .netrc, and an element of XML.
    (
        "login ",
        re.compile(
            r"(machine \S{1,200}\s{1,9}login \S{1,200}\s{1,9}password )"
            rf"(?!{_UNFILLED})(?!\*{{3}})\S+"
        ),
    ),
    (
        "</",
        re.compile(
            r"((?i:<(?P<tag>password|passwd|passphrase|secret|token|api_?key)>))"
            rf"(?!{_UNFILLED})[^<\n]{{3,400}}(?=</(?P=tag)>)"
        ),
    ),
    (
        "jwt=",
        re.compile(r"((?<![\w-])jwt=)(?=[^\d\s]{0,80}\d)[\w.~+/=-]{8,}"),
    ),
    ("wandb.login", re.compile(r"(wandb\.login\((?:key=)?[\"'])[0-9a-f]{40}\b")),
    ("wandb login", re.compile(r"(wandb login (?:--\S+ )?)[0-9a-f]{40}\b")),
)
_GAP = r"(?:\s{0,3}|[ \t]{4,60})"
# Named secrets: NAME=value, name: "value", a['NAME'] = value, --name value, and
# '--name', 'value'; rows of tables, Megatron's name .... value, and Kubernetes'
# {'name': 'NAME', 'value': 'x'}.
_NAMED = re.compile(
    r"(?:(?:secret|passw|passphrase|credential)[\w-]{0,40}|(?:token|key|pass|pwd)\d*)"
    r"(?<=[\w-])(?![\w-])"
    r"(?P<sign>[\"']?,?\s{1,20}[\"']?value[\"']?[:=]\s{0,3}|(?:\\{0,7}[\"']\]?)?"
    rf"(?:{_GAP}(?:=>?|[:\uff1a│┃]|%3d|\.{{3,80}}){_GAP}|\s)(?:\\{{1,7}}(?=[\"']))?"
    r"|[\"'],\s{0,3}(?=b?[\"']))(?=\S)",
    re.IGNORECASE,
)
_PEEK = 400
_VALUE = re.compile(
    rf"[bfru]?\"[^\"\n]{{0,{_PEEK}}}\"|[bfru]?'[^'\n]{{0,{_PEEK}}}'|\S{{1,{_PEEK}}}"
)
# With quotes that a backslash escapes, unless all that is around it is escaped.
_PLAIN_VALUE = re.compile(
    rf"[bfru]?\"(?:[^\"\\\n]|\\.){{0,{_PEEK}}}\"|[bfru]?'(?:[^'\\\n]|\\.){{0,{_PEEK}}}'"
    rf"|{_VALUE.pattern}"
)
_QUOTE = re.compile(r"[bfru]?[\"']")
_QUOTED = re.compile(rf"{_QUOTE.pattern}[^{{]")
_FIRM = re.compile(r"[=:\uff1a]|%3", re.IGNORECASE)
_ROW = re.compile(r"[│┃]|\.{3}")
_PAIR = re.compile(r"[(\[]b?[\"']$")  # of a name and a value: ('token', 'x')
_ESCAPE = re.compile(r"^(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[nrt])")
_REST = re.compile(r"\S*")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRETS = {
    *("secret", "secrets", "password", "passwd", "passphrase"),
    *("credential", "credentials"),
}
# Last words of names that describe a secret rather than hold one.
_ABOUT = {
    *("path", "file", "dir", "name", "names", "id", "ids", "type", "mode", "url"),
    *("length", "len", "size", "count", "provider", "column", "field", "ref", "stdin"),
}
# Owners whose tokens and keys are secrets; a tokenizer's and a table's are not.
_OWNERS = {
    *("hf", "hub", "hugging", "face", "huggingface", "auth", "access", "api"),
    *("bearer", "refresh", "session", "github", "gh", "gitlab", "wandb", "private"),
    *("secret", "registry", "ngc", "bot", "slack", "kaggle", "modelscope", "user"),
    *("vault", "security", "csrf", "subscription"),
    *("encryption", "account", "signing", "license", "ssh", "client", "service"),
    *("openai", "anthropic", "azure", "aws", "storage", "swanlab", "admin", "login"),
}
# Owners of what is called a pass or pwd; others are steps, and folders.
_LOGINS = {"db", "database", "mysql", "pg", "postgres", "redis", "smtp", "ssh", "proxy"}
_HARMLESS = {
    *("max", "min", "num", "pad", "eos", "bos", "unk", "sep", "cls", "mask", "image"),
    *("video", "audio", "stop", "special", "next", "start", "end", "per", "last"),
    *("first", "new", "think", "tool", "prompt", "response", "sort", "primary"),
    *("cache", "data", "column", "public", "fn", "image", "foreign", "dict", "row"),
}
_BLANK = re.compile(
    rf"(?:{'|'.join(map(re.escape, _KINDS))})?(?:\.+|…|[xX]{{3,}})|VALUE\W*"
)
# A shell or make variable, a conversion such as %s, or the next option.
_NO_VALUE = re.compile(
    r"\$(?:[A-Z_][A-Z0-9_]*$|[{(])|%(?:[a-z(]|\w+%)|--?[a-z][a-z-]*(?:=|$)"
)
_NOTHING = {"empty", "none", "null", "true", "false", "unset", "not", "is", "was"}


def text(raw: str) -> str:
    """Lines that are safe to show and keep; tabs and line ends are preserved."""
    return mask(plain(raw))


def line(raw: str) -> str:
    """The text as one line, with single spaces."""
    return mask(" ".join(plain(raw).split()))


def data(value: Any) -> Any:
    """Sanitize every string in lists, tuples and dictionaries (including keys)."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {data(key): _entry(key, one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(data, value)) if type(value) in (list, tuple) else value
    return value


def _entry(name: Any, value: Any) -> Any:
    if isinstance(name, str) and isinstance(value, str):
        return MASK if names_secret(name, value) else data(value)
    return data(value)


def plain(raw: str) -> str:
    """Remove what a terminal or a CI runner would obey; secrets are kept."""
    if not raw.isprintable():
        found = _RETURN.sub("\n", _SEQUENCE.sub("", raw))
        raw = "\n".join(map(_visible, found.split("\n")))
    if "##" in raw:
        raw = _BRACKET_COMMAND.sub("## ", raw)
    return _COMMAND.sub(": :", raw) if "::" in raw else raw


def _visible(one: str) -> str:
    if one.isprintable():
        return one
    return "".join(c if c == "\t" or c.isprintable() else _escaped(c) for c in one)


def _escaped(char: str) -> str:
    if char.isspace() and char > "\x9f" and char not in "\u2028\u2029":
        return " "  # such as a no-break space
    return char.encode("unicode_escape").decode()


# -- secrets -----------------------------------------------------------------------


def mask(raw: str) -> str:
    """Mask all but the kind of each secret; everything else is unchanged."""
    for literal, shape in _SHAPES:
        if literal in raw:
            raw = shape.sub(rf"\1{MASK}", raw)
    for value in _of_environment():
        raw = raw.replace(value, MASK)
    return _mask_named(raw)


@functools.cache
def _of_environment() -> tuple[str, ...]:
    """The secrets in this process's environment, which may appear without a name."""
    return tuple(
        value
        for name, value in os.environ.items()
        if len(value) > 11
        and not value.startswith("/")
        and _CREDENTIAL.fullmatch(value)
        and names_secret(name)
    )


def secrets(raw: str) -> Iterator[tuple[str, str]]:
    """The secrets in a text: what gives each away (``hf_``, HF_TOKEN), and its value.

    One given away twice is listed twice. Those of the environment are left out.
    """
    for sign, begin, end in places(raw):
        yield sign, raw[begin:end]


def places(raw: str) -> Iterator[tuple[str, int, int]]:
    """As ``secrets``: what gives each away, and where its value begins and ends."""
    for literal, shape in _SHAPES:
        if literal in raw:
            for found in shape.finditer(raw):
                yield found[1], found.end(1), found.end()
    yield from _named(raw)


def _mask_named(raw: str) -> str:
    parts = []
    done = 0
    for _, begin, end in _named(raw):
        parts += [raw[done:begin], MASK]
        done = end
    return "".join([*parts, raw[done:]]) if parts else raw


def _named(raw: str) -> Iterator[tuple[str, int, int]]:
    """Each named secret: its name, and its start and end."""
    done = 0
    for found in _NAMED.finditer(raw):
        low = found.start()
        while low > max(done, found.start() - 60) and _in_name(raw[low - 1]):
            low -= 1
        name = raw[low : found.start("sign")]
        if low and raw[low - 1] == "\\":
            name = _ESCAPE.sub("", name)
        is_given = name.startswith("-") or _FIRM.search(found["sign"]) is not None
        is_pair = found["sign"][1:2] == "," and _PAIR.search(raw, max(0, low - 3), low)
        if low < done or not (is_given or is_pair or _ROW.search(found["sign"])):
            continue
        is_escaped = "\\" in found["sign"]
        value = (_VALUE if is_escaped else _PLAIN_VALUE).match(raw, found.end())
        if value is None:
            continue
        begin, end = _cut(name, value[0])
        secret = value[0][begin:end]
        if not names_secret(name, secret):
            continue
        if "]" in found["sign"] and not _QUOTED.match(value[0]):
            continue  # code: another name, a call, or values filled in
        if not is_given and not _CREDENTIAL.fullmatch(secret):
            continue  # a list or a table of names
        done = value.start() + end
        if end == _PEEK:
            rest = _REST.match(raw, done)
            done = rest.end() if rest else done
        yield name, value.start() + begin, done


def _in_name(char: str) -> bool:
    return char.isalnum() or char in "_.-"


def _cut(name: str, value: str) -> tuple[int, int]:
    """Where the secret begins and ends within the value."""
    quote = _QUOTE.match(value)
    if (
        quote is not None
        and value.endswith(quote[0][-1])
        and len(value) > len(quote[0])
    ):
        return quote.end(), max(quote.end(), len(value[:-1].rstrip("\\")))
    if not name.isupper() and not name.startswith("-"):
        value = re.split(r"[,;&)\]}]|%26", value)[0] or value
    return 0, len(value.rstrip("\"',;)]}")) or len(value)


def names_secret(name: str, value: str | None = None) -> bool:
    """Whether this name denotes a secret: HF_TOKEN, --api-key, db.password.

    Without ``value``, judged by the name alone. ``max_token``, ``--pad-token`` and
    ``prompt_key`` are not secrets, nor are values such as None, 5 or <eos>, nor
    placeholders: ``...``, ``hf_xxx``, $TOKEN, VALUE (as in KEY=VALUE).
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or words[-1] in _ABOUT:
        return False
    bare = "" if value is None else value.strip("b\"',;)")
    if value is not None and (
        bare.lower() in {*_NOTHING, ""}
        or _BLANK.fullmatch(bare)
        or bare[0] in "<[{(*"
        or _NO_VALUE.match(bare)
        or re.fullmatch(r"[\w:/.-]*\*{3}.{0,2}", bare)
    ):
        return False
    if not _SECRETS.isdisjoint(words) or words[-1].endswith(("apikey", "password")):
        return True
    owner = words[-2] if len(words) > 1 else ""
    if words[-1] in ("pass", "pwd"):
        return owner in _LOGINS and (value is None or bare[0].isalnum())
    if words[-1] not in ("token", "key"):
        return False
    if owner in _HARMLESS:
        return False
    flag, loud = name.startswith("-"), name.isupper()
    if owner in _OWNERS or (owner and loud) or (flag and words[-1] == "token"):
        return True
    credential = value is not None and _CREDENTIAL.fullmatch(bare) is not None
    return not owner and (loud or (words[-1] == "token" and credential))
