"""Finds environment variables that do not do what the user thinks they do."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping

from pytest_gkd.near_names import SLIP, near_names
from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.variable_table import (
    GONE_FROM_VLLM,
    KNOWN,
    VARIABLES,
    Variable,
)
from pytest_gkd.workload.environment.variable_names import PLACES


def judge_variables(
    environ: Mapping[str, str],
    *,
    gpus: int,
    interfaces: Collection[str],
    vllm_source: str | None = None,
    vllm_version: str = "",
    real_names: Callable[[str], frozenset[str]] = lambda prefix: frozenset(),
) -> list[StageFault | Note]:
    """The variables in the environment that mislead.

    ``vllm_source`` is the text of the installed vllm/envs.py, None without it.
    ``real_names`` gives the names with a prefix (``NCCL_``, ``RAY_``, ``TORCH_NCCL_``)
    that the installed package contains, empty if unknown. Only a value that ends the
    job at its start is a fault.
    """
    items: list[StageFault | Note] = []
    for row in VARIABLES:
        if row.name in environ:
            items += _judge_row(row, environ[row.name], gpus=gpus)
    if vllm_source is not None:
        items += _judge_vllm(environ, vllm_source, vllm_version)
    for prefix in ("TORCH_NCCL_", "NCCL_", "RAY_"):
        items += _judge_spelling(environ, prefix, real_names)
    items += _judge_interface(environ, "GLOO_SOCKET_IFNAME", interfaces, ends_job=True)
    items += _judge_interface(
        environ, "NCCL_SOCKET_IFNAME", interfaces, ends_job=gpus > 1
    )
    items += _judge_ray(environ)
    items += _judge_ranks(environ)
    return items


def _judge_row(row: Variable, value: str, *, gpus: int) -> list[StageFault | Note]:
    items: list[StageFault | Note] = []
    for kind, text, ends_job in row.remarks(value, gpus=gpus > 0):
        if ends_job:
            items.append(_invalid(row.name, value, text))
        else:
            items.append(Note(f"variable.{kind}", text))
    return items


def _invalid(name: str, value: str, text: str) -> StageFault:
    evidence = (("environment", None, f"{name}={value}"),)
    facts = {"variable": name, "value": value}
    return StageFault("env.variable-invalid", text, facts, evidence)


def vllm_names(source: str) -> frozenset[str]:
    """Every name that vllm/envs.py mentions as a string."""
    return frozenset(re.findall(r"""["'](VLLM_[A-Z0-9_]+)["']""", source))


def vllm_choices(source: str) -> dict[str, tuple[tuple[str, ...], bool]]:
    """The variables that vllm/envs.py restricts to a list: (values, case-sensitive)."""
    call = re.compile(
        r"env_with_choices\(\s*[\"'](VLLM_\w+)[\"']\s*,[^\[\]()]*\[([^\[\]]*)\]"
        r"([^()]*)\)"
    )
    return {
        name: (
            tuple(re.findall(r"[\"']([^\"']*)[\"']", values)),
            "case_sensitive=False" not in rest.replace(" ", ""),
        )
        for name, values, rest in call.findall(source)
    }


# Read at every start; vLLM raises ValueError for any other value. Others are read only
# by the feature they belong to.
READ_AT_START = frozenset({"VLLM_WORKER_MULTIPROC_METHOD"})


def _judge_vllm(
    environ: Mapping[str, str], source: str, version: str
) -> list[StageFault | Note]:
    items: list[StageFault | Note] = []
    names = vllm_names(source)
    for name in sorted(n for n in environ if n.startswith("VLLM_") and n not in names):
        text = f"{name} is not known to the installed vllm {version} (vllm/envs.py)"
        gone = GONE_FROM_VLLM.get(name)
        text += f": {gone}." if gone else f"{_near(name, names)}."
        items.append(Note("variable.unknown", text))
    for name, (values, case_matters) in vllm_choices(source).items():
        if name not in environ:
            continue
        value = environ[name]
        lowered = [choice.lower() for choice in values]
        if value in values or (not case_matters and value.lower() in lowered):
            continue
        text = f"{name}={value}: expected {' or '.join(values)}"
        if name in READ_AT_START:
            text += "; vLLM raises ValueError when it starts its workers."
            items.append(_invalid(name, value, text))
        else:
            items.append(Note("variable.value", text + "."))
    return items


def _near(name: str, names: Iterable[str]) -> str:
    near = near_names(name, sorted(names), cutoff=SLIP)
    return f"; near names: {', '.join(near)}" if near else ""


def _judge_spelling(
    environ: Mapping[str, str],
    prefix: str,
    real_names: Callable[[str], frozenset[str]],
) -> list[Note]:
    """Names that nothing is known to read and that are one typo from a real one.

    Anyone may invent a variable with such a prefix, so an unknown name alone means
    nothing. Without the package's own names nothing is reported either.
    """
    suspects = [n for n in environ if n.startswith(prefix) and n not in KNOWN]
    real = real_names(prefix) if suspects else frozenset()
    if not real:
        return []
    right = real.union(name for name in KNOWN if name.startswith(prefix))
    return [
        Note("variable.spelling", f"{name} is not in {PLACES[prefix]}{near}.")
        for name in sorted(suspects)
        if name not in real and (near := _near(name, right))
    ]


def _judge_interface(
    environ: Mapping[str, str],
    name: str,
    interfaces: Collection[str],
    *,
    ends_job: bool,
) -> list[StageFault | Note]:
    """gloo takes one exact interface (or several, comma-separated); NCCL takes
    prefixes, with ``=`` in front for exact names and ``^`` for exclusions."""
    value = environ.get(name, "")
    if not value:
        return []
    if name.startswith("NCCL"):
        exact = value.removeprefix("^").startswith("=")
        # A port may follow the name after a colon.
        words = [w.partition(":")[0] for w in value.lstrip("^=").split(",") if w]

        def hit(interface: str) -> bool:
            return interface in words if exact else interface.startswith((*words,))

        fits = any(hit(i) != value.startswith("^") for i in interfaces)
    else:
        fits = set(value.split(",")) <= {*interfaces}
    if fits:
        return []
    text = f"{name}={value} names no network interface of this machine; it has "
    text += f"{', '.join(interfaces)}."
    if not ends_job:
        return [Note("variable.value", text)]
    facts = {"variable": name, "value": value, "interfaces": list(interfaces)}
    evidence = (("environment", None, f"{name}={value}"),)
    return [StageFault("comm.interface", text, facts, evidence)]


# A UNIX socket's path holds 107 bytes, of which Ray uses up to 64 below its directory
# ("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store").
RAY_DIRECTORY_BYTES = 107 - 64


def _judge_ray(environ: Mapping[str, str]) -> list[Note]:
    notes = []
    if address := environ.get("RAY_ADDRESS"):
        text = f"RAY_ADDRESS={address}: ray.init() joins that cluster, whose workers "
        text += "do not see variables exported in this shell."
        notes.append(Note("ray.address", text))
    directory = environ.get("RAY_TMPDIR", "")
    if (size := len(directory.encode())) > RAY_DIRECTORY_BYTES:
        text = f"RAY_TMPDIR={directory} has {size} bytes; Ray's "
        text += f"sockets need it at {RAY_DIRECTORY_BYTES} or fewer."
        notes.append(Note("ray.long-path", text))
    return notes


def _judge_ranks(environ: Mapping[str, str]) -> list[Note]:
    """RANK and the like, set in the shell, are inherited by all that it starts."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    said = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))
    text = f"{said} in the environment: launchers set these for each rank themselves."
    return [Note("variable.rank", text)] if said else []
