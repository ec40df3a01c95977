"""Replaces names of users, hosts and homes, and addresses, each by a word of its own.

For ``gkd bundle --anonymous``. What is replaced is found in the texts themselves, since
a log may come from another machine: NCCL's line prefixes, Ray's ``ip=``, home paths.
"""

from __future__ import annotations

import getpass
import ipaddress
import os
import re
import socket
from collections.abc import Iterable

_HOME = re.compile(
    r"(?<![\w.-])/(?:home|Users|mnt/home|data/home)/(?P<name>[\w.-]{2,64})"
)
_HOSTS = (
    # NCCL: host:pid:tid [gpu] NCCL INFO (its user guide, NCCL_DEBUG).
    re.compile(r"(?m)^(?:\([^)]*\) ?)?(?P<name>[\w.-]{3,64}):\d+:\d+ \[\d+\] NCCL "),
    # Slurm's and torchrun's own words.
    re.compile(r"STEP \S+ ON (?P<name>[\w.-]{3,64}) "),
    re.compile(r"\bhost ?: (?P<name>[A-Za-z][\w.-]{2,63})"),
    re.compile(
        r"\b(?:HOSTNAME|SLURMD_NODENAME|MASTER_ADDR)=(?P<name>[A-Za-z][\w.-]{2,63})"
    ),
    re.compile(
        r"(?<=[@/])(?P<name>[a-z][\w-]*(?:\.[\w-]+)*\.(?:internal|local|corp|lan|cluster))\b"
    ),
)
_USERS = (
    re.compile(r"\b(?:USER|LOGNAME|SUDO_USER)=(?P<name>[\w.-]{2,64})"),
    re.compile(r"\"user(?:name)?\": \"(?P<name>[\w.-]{2,64})\""),
)
_MAIL = re.compile(r"[\w.+-]{1,64}@(?=[\w-]{1,63}\.[a-z])[\w.-]{1,120}")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)")
_IPV6 = re.compile(
    r"(?<![\w:.])(?:[0-9a-f]{1,4}:){2,7}(?::?[0-9a-f]{1,4}){1,6}(?![\w:])"
)
_NO_NAMES = {"localhost", "root", "none", "null", "user", "shared"}


class Anonymity:
    """Words in place of names: user-1, host-2, ip-3; the same in every text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._words: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        here = [socket.gethostname(), socket.gethostname().partition(".")[0]]
        self._know("host", here)
        self._know("user", [_own_name(), os.environ.get("SUDO_USER", "")])
        for text in texts:
            for kind, patterns in (("host", _HOSTS), ("user", (_HOME, *_USERS))):
                for pattern in patterns:
                    self._know(kind, (m["name"] for m in pattern.finditer(text)))
        names = sorted(self._words, key=len, reverse=True)
        either = "|".join(map(re.escape, names)) or r"(?!)"
        self._names = re.compile(rf"(?<![A-Za-z0-9])(?:{either})(?![A-Za-z0-9])")

    def _know(self, kind: str, names: Iterable[str]) -> None:
        for name in names:
            plain = name.rstrip(".")
            if len(plain) > 1 and not plain.isdigit() and plain not in _NO_NAMES:
                self._word(kind, plain)

    def _word(self, kind: str, name: str) -> str:
        if name not in self._words:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._words[name] = f"{kind}-{self._counts[kind]}"
        return self._words[name]

    def text(self, raw: str) -> str:
        """A text with words in place of names and addresses."""
        raw = _MAIL.sub(lambda m: self._word("mail", m[0]), raw)
        raw = self._names.sub(lambda m: self._words[m[0]], raw)
        return _IPV6.sub(self._address, _IPV4.sub(self._address, raw))

    def _address(self, found: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(found[0])
        except ValueError:
            return found[0]  # a version or a time
        plain = address.is_loopback or address.is_unspecified
        return found[0] if plain else self._word("ip", found[0])


def _own_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""  # a user without a name, as in a container
