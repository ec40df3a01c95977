"""Judges whether the GPUs, driver, CUDA and the job's builds are compatible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packaging.version import Version

from pytest_gkd.processes import gpus
from pytest_gkd.stage_api import Note, StageFault
from pytest_gkd.workload.environment.gpu import Gpu, Machine, TorchBuild

# The oldest Linux driver that runs any release of a CUDA major version: "CUDA Toolkit
# and Minimum Required Driver Version for CUDA Minor Version Compatibility" in the CUDA
# Toolkit Release Notes. Datacenter GPUs may go below it with the cuda-compat package,
# so this explains why CUDA does not initialize but is no fault by itself.
MINIMUM_DRIVER: dict[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


BUSY_NOTE_MIB = 1024
UUIDS_SINCE = Version("0.24.0")


def chosen_gpus(value: str | None, listed: Sequence[Gpu]) -> tuple[list[Gpu], str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, and what is wrong with it.

    nvidia-smi's list of GPUs does not include MIG devices: their names are taken on
    trust.
    """

    def find(word: str) -> Sequence[Gpu | str]:
        if word.startswith("MIG-"):
            return [word]
        return [gpu for gpu in listed if gpus.names(word, gpu.index, gpu.uuid)][:1]

    if value is None:
        return list(listed), ""
    chosen, wrong = gpus.select(value, find)
    return [gpu for gpu in chosen if isinstance(gpu, Gpu)], wrong


def judge_gpus(
    machine: Machine,
    torch: TorchBuild | None,
    *,
    visible: str | None,
    vllm_for_cuda: bool,
    memory_fraction: float,
    engine_gpus: int = 1,
    own_pids: frozenset[int] = frozenset(),
) -> list[StageFault | Note]:
    """Judge everything about the GPUs.

    ``visible`` is CUDA_VISIBLE_DEVICES; ``memory_fraction`` is the share of its GPUs'
    memory, on the first ``engine_gpus``, that the rollout engine will request;
    ``own_pids`` are this run's own processes, whose memory does not count against it.
    ``torch`` is None if torch did not import.
    """
    items: list[StageFault | Note] = []
    if machine.error:
        text = f"nvidia-smi failed: {machine.error}"
        if not vllm_for_cuda:
            return [Note("gpu.nvidia-smi", text)]
        # The kernel module and the user-space libraries are from different releases.
        mismatch = "version mismatch" in machine.error
        cause = "env.driver-too-old" if mismatch else "env.no-gpu"
        evidence = (("nvidia-smi", None, machine.error),)
        return [StageFault(cause, text, {"nvidia_smi": machine.error}, evidence)]
    chosen, wrong = chosen_gpus(visible, machine.gpus)
    if machine.gpus and wrong:
        said = f"CUDA_VISIBLE_DEVICES={visible}"
        text = f"{said}: {wrong}; this machine has GPUs "
        text += f"{', '.join(str(gpu.index) for gpu in machine.gpus)}, and "
        text += f"{len(chosen)} stay(s) visible."
        facts = {"visible": visible, "gpus": len(machine.gpus)}
        evidence = (("environment", None, said),)
        items.append(StageFault("env.no-gpu", text, facts, evidence))
    if torch is not None:
        items += _judge_torch(machine, chosen, torch, visible, vllm_for_cuda, wrong)
    if vllm_for_cuda:
        engines = {gpu.uuid for gpu in chosen[:engine_gpus]}
        items += _judge_memory(machine, chosen, engines, memory_fraction, own_pids)
    return items


def judge_names(
    visible: str | None, listed: Sequence[Gpu], vllm: str
) -> list[StageFault | Note]:
    """Whether this vLLM version can parse the GPU names in CUDA_VISIBLE_DEVICES.

    Releases before 0.24 parse every entry as a number (vllm/platforms/interface.py,
    device_id_to_physical_device_id) and fail while they inspect the model.
    """
    words = [word.strip() for word in (visible or "").split(",")]
    if not any(word.startswith(("GPU-", "MIG-")) for word in words):
        return []
    # A build from a checkout without tags is 0.1.dev, which tells nothing.
    if Version(vllm) >= UUIDS_SINCE or Version(vllm).is_devrelease:
        return []
    text = f"CUDA_VISIBLE_DEVICES={visible} names GPUs by UUID, which vLLM {vllm} "
    text += f"takes for indices; {UUIDS_SINCE} is the first release that does not."
    chosen, wrong = chosen_gpus(visible, listed)
    if len(chosen) == len(words) and not wrong:
        numbers = ",".join(str(gpu.index) for gpu in chosen)
        text += f" CUDA_VISIBLE_DEVICES={numbers} names the same ones."
    facts = {"variable": "CUDA_VISIBLE_DEVICES", "value": visible, "vllm": vllm}
    return [StageFault("env.variable-invalid", text, facts)]


def _judge_torch(
    machine: Machine,
    chosen: Sequence[Gpu],
    torch: TorchBuild,
    visible: str | None,
    vllm_for_cuda: bool,
    wrong: str,
) -> list[StageFault | Note]:
    if torch.hip is not None:
        return []
    if torch.cuda is None:
        if not chosen:
            return []
        text = f"torch {torch.version} is a build without CUDA, and nvidia-smi lists "
        text += f"{len(chosen)} visible GPU(s)"
        if not vllm_for_cuda:
            return [Note("gpu.unused", f"{text}, which vLLM is not built for either.")]
        return [StageFault("env.no-gpu", f"{text}.", {"torch": torch.version})]
    if not torch.available:
        return _judge_no_cuda(machine, chosen, torch, visible, vllm_for_cuda, wrong)
    items: list[StageFault | Note] = [
        StageFault(
            "env.cuda-arch-mismatch",
            f"GPU {gpu.index} ({gpu.name}) has compute capability {gpu.capability}; "
            f"torch {torch.version} holds kernels for {', '.join(torch.archs)}.",
            {"capability": gpu.capability, "archs": list(torch.archs)},
        )
        for gpu in chosen
        if not has_kernel(gpu.capability, torch.archs)
    ]
    if chosen and torch.devices != len(chosen) and not wrong:
        text = f"torch counts {torch.devices} CUDA device(s), nvidia-smi lists "
        text += f"{len(chosen)} visible."
        items.append(Note("gpu.count", text))
    return items


def _judge_no_cuda(
    machine: Machine,
    chosen: Sequence[Gpu],
    torch: TorchBuild,
    visible: str | None,
    vllm_for_cuda: bool,
    wrong: str,
) -> list[StageFault | Note]:
    said = " ".join(torch.complaints)
    evidence = tuple(
        ("torch.cuda.is_available()", None, line) for line in torch.complaints
    )
    facts: dict[str, Any] = {"torch": torch.version, "torch_cuda": torch.cuda}
    driver = machine.gpus[0].driver if machine.gpus else ""
    minimum = MINIMUM_DRIVER.get(int(str(torch.cuda).partition(".")[0]), "")
    if _too_old(driver, minimum) or ("driver" in said and "too old" in said):
        text = f"the NVIDIA driver {driver or '(version unknown)'} does not run CUDA "
        text += f"{torch.cuda}, which torch {torch.version} was built with"
        text += f"; {minimum} or newer is expected." if minimum else "."
        facts |= {"driver": driver, "minimum": minimum}
        return [StageFault("env.driver-too-old", text, facts, evidence)]
    if "Error 802" in said:
        text = f"CUDA does not start on this machine: {said}"
        return [StageFault("env.gpu-hardware", text, facts, evidence)]
    if wrong:
        return []
    if "MIG-" in (visible or ""):
        text = f"CUDA_VISIBLE_DEVICES={visible}: torch sees no device of that name."
        return [StageFault("env.no-gpu", text, facts, evidence)]
    if chosen:
        text = f"nvidia-smi lists {len(chosen)} visible GPU(s), and torch "
        text += f"{torch.version} finds none: {said or 'without giving a reason'}"
        return [StageFault("env.no-gpu", text, facts, evidence)]
    if not vllm_for_cuda:
        return []
    if machine.gpus:
        text = f"CUDA_VISIBLE_DEVICES={visible!r} hides all {len(machine.gpus)} GPU(s)"
    elif machine.driver_loaded:
        text = "the NVIDIA driver is loaded and nvidia-smi lists no GPU"
    else:
        text = "no NVIDIA driver was found on this machine"
    text += f", and the installed vLLM and torch {torch.version} are builds for CUDA."
    return [StageFault("env.no-gpu", text, facts, evidence)]


def _too_old(driver: str, minimum: str) -> bool:
    def numbers(version: str) -> list[int]:
        return [int(part) for part in version.split(".") if part.isdigit()]

    return bool(driver and minimum) and numbers(driver) < numbers(minimum)


def has_kernel(capability: str, archs: Sequence[str]) -> bool:
    """Whether code built for ``archs`` runs on a GPU of ``capability`` (``9.0``).

    Binary code (``sm_XY``) runs on the same major version from its own minor version
    up; PTX (``compute_XY``) is compiled for anything newer. A letter ties code to
    exactly one capability (a) or its family (f). Unknown capabilities and an empty
    list are given the benefit of the doubt.
    """
    major, _, minor = capability.partition(".")
    if not archs or not (major.isdigit() and minor.isdigit()):
        return True
    device = (int(major), int(minor))
    for arch in archs:
        kind, _, code = arch.partition("_")
        digits = code.rstrip("af")
        if len(digits) < 2 or not digits.isdigit():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if code.endswith("a"):
            fits = built == device
        elif kind == "compute" and not code.endswith("f"):
            fits = built <= device
        else:
            fits = built[0] == device[0] and built <= device
        if fits:
            return True
    return False


def _judge_memory(
    machine: Machine,
    chosen: Sequence[Gpu],
    engines: set[str],
    memory_fraction: float,
    own_pids: frozenset[int],
) -> list[StageFault | Note]:
    items: list[StageFault | Note] = []
    for gpu in chosen:
        users = [one for one in machine.processes if one.gpu_uuid == gpu.uuid]
        theirs = [one for one in users if one.pid not in own_pids]
        held = sum(process.used_mib for process in theirs)
        # No process is visible from inside a container: count all of it, as a note.
        if not users and gpu.used_mib > BUSY_NOTE_MIB:
            text = f"GPU {gpu.index} has {gpu.used_mib} MiB of {gpu.total_mib} MiB "
            text += "in use, by no process that is visible from here."
            items.append(Note("gpu.in-use", text))
        if held <= BUSY_NOTE_MIB:
            continue
        text = f"GPU {gpu.index} has {held} of {gpu.total_mib} MiB taken by "
        text += ", ".join(
            f"pid {p.pid} ({p.name or 'not visible from here'}, user "
            f"{p.user or 'unknown'}, {p.used_mib} MiB)"
            for p in theirs
        )
        asked = memory_fraction * gpu.total_mib
        if gpu.uuid not in engines or gpu.total_mib - held >= asked:
            items.append(Note("gpu.in-use", text + "."))
            continue
        text += f"; the rollout engine asks for {round(asked)} MiB "
        text += f"(gpu_memory_utilization {memory_fraction})."
        pids = [process.pid for process in theirs]
        facts = {"gpu": gpu.index, "held_mib": held, "pids": pids}
        items.append(StageFault("env.gpu-busy", text, facts))
    return items


def built_for_cuda(versions: Mapping[str, str]) -> bool:
    """Whether the installed vLLM is the CUDA build."""
    return "vllm" in versions and gpus.builds_for_cuda(versions["vllm"])
