"""Which environment variables mislead: one row per variable, with who reads it.

Rows are facts about released software (looked up in torch 2.11 to 2.15, NCCL 2.27 to
2.32, vLLM 0.21 to 0.33 and Ray 2.60). Names that an installed package defines itself
are not listed here: the environment stage reads them from it, and ``gkd check`` from
what tools/record_variables.py wrote down.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# High enough that NCCL_P2P_LEVEL and NCCL_P2P_DISABLE are not taken for one another.
NEAR = 0.86


class Remark(NamedTuple):
    """What is said of a variable: ``kind`` is value (a bad one), misread or setting.

    ``ends_job`` is what its reader does with a bad value, where it stops at that.
    """

    kind: str
    text: str
    ends_job: str = ""


@dataclass(frozen=True)
class Variable:
    """What to say about one variable.

    ``always`` is said whenever it is set; ``when`` maps a value to what is said then.
    ``valid`` is a regular expression for good values (all of the value, upper and
    lower case alike) and ``expected`` the same in words. ``ends_job`` is what the
    program that reads it does with any other value, where it stops at the start;
    ``gpu_only`` restricts that to jobs on GPUs. ``is_choice`` is for what is said by
    value that may well be meant, ``is_hint`` for what is said always of a variable that
    does work.
    """

    name: str
    always: str = ""
    when: Mapping[str, str] = field(default_factory=dict)
    valid: str = ""
    expected: str = ""
    ends_job: str = ""
    gpu_only: bool = False
    is_choice: bool = False
    is_hint: bool = False

    def remarks(self, value: str, *, gpus: bool) -> list[Remark]:
        """What its value deserves to be told; ``gpus`` is whether the job has any."""
        said = f"{self.name}={value}"
        if self.valid and not re.fullmatch(self.valid, value, re.IGNORECASE):
            ends_job = self.ends_job if gpus or not self.gpu_only else ""
            text = f"{said}: expected {self.expected}"
            return [
                Remark(
                    "value",
                    f"{text}; {ends_job}." if ends_job else f"{text}.",
                    ends_job,
                )
            ]
        found = []
        if self.always:
            found.append(Remark("misread", f"{self.name} {self.always}"))
        if text := self.when.get(value.upper(), ""):
            found.append(Remark("setting", f"{said} {text}"))
        return found


def near_names(name: str, names: Iterable[str]) -> list[str]:
    """Up to three names that ``name`` may be a slip of, the nearest first."""
    return difflib.get_close_matches(name, sorted(names), n=3, cutoff=NEAR)


FLAG = r"y|yes|1|t|true|n|no|0|f|false"
# Nothing, and the words by which launchers hide every GPU on purpose.
DEVICE = r"\s*(-?\d+|(gpu|mig)-[\w/-]+)\s*"
VISIBLE = rf"|none|void|nodevfiles|{DEVICE}(,{DEVICE})*"
# What C++'s stoi takes: digits first, anything after them.
NUMBER = r"\s*[+-]?\d+.*"
TORCH_STOPS = "torch raises 'Invalid value for environment variable' when it makes an "
TORCH_STOPS += "NCCL process group"


def _alias(old: str) -> Variable:
    return Variable(
        old,
        always=f"is the old name; torch reads TORCH_{old} first and warns about this "
        "one.",
    )


def _torch_flag(name: str, **options: Any) -> Variable:
    return Variable(
        name,
        valid=FLAG,
        expected="0 or 1",
        ends_job=TORCH_STOPS,
        gpu_only=True,
        **options,
    )


def _allocator(name: str) -> Variable:
    """KEY:VALUE with commas between (texts of torch 2.9 and 2.15, libc10.so)."""
    return Variable(
        name,
        valid=r"|(?!.*expandable_segments\s*:(?!\s*(?-i:True|False)\b))\s*\w+\s*:[^=;]*",
        expected="key:value with commas between, such as expandable_segments:True "
        "(True and False with a capital)",
        ends_job="torch raises when it first uses a GPU",
        gpu_only=True,
    )


VARIABLES: tuple[Variable, ...] = (
    # -- read by nobody -------------------------------------------------------------
    Variable(
        "NCCL_TIMEOUT",
        always="is read by neither NCCL nor torch: the time limit of a collective is "
        "the timeout given to init_process_group (10 minutes by default with the "
        "nccl backend).",
    ),
    Variable(
        "NCCL_BACKEND",
        always="is read by neither NCCL nor torch: the backend is an argument of "
        "init_process_group.",
    ),
    Variable(
        "RAY_num_prestart_python_workers",
        always="is not read by Ray: the raylet gets this number from num_cpus.",
    ),
    # -- renamed or retired ----------------------------------------------------------
    _alias("NCCL_ASYNC_ERROR_HANDLING"),
    _alias("NCCL_BLOCKING_WAIT"),
    _alias("NCCL_DESYNC_DEBUG"),
    _alias("NCCL_ENABLE_TIMING"),
    Variable(
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        always="is without effect since torch 2.8, which made it the default; torch "
        "2.15 no longer has it.",
    ),
    Variable(
        "HF_HUB_ENABLE_HF_TRANSFER",
        always="is deprecated; HF_XET_HIGH_PERFORMANCE took its place.",
    ),
    # -- values ----------------------------------------------------------------------
    Variable(
        "CUDA_VISIBLE_DEVICES",
        valid=VISIBLE,
        expected="numbers or UUIDs of GPUs with commas between; at any other word CUDA "
        "stops reading, and the GPUs from there on are hidden",
    ),
    Variable(
        "TORCH_DISTRIBUTED_DEBUG",
        when={
            "DETAIL": "checks every collective over an extra gloo group, which is slow."
        },
        valid="OFF|INFO|DETAIL",
        expected="OFF, INFO or DETAIL",
        ends_job="torch.distributed does not import",
    ),
    Variable(
        "NCCL_DEBUG",
        when={
            "TRACE": "prints no more than INFO in the released NCCL builds, which "
            "leave tracing out."
        },
        valid="VERSION|WARN|INFO|ABORT|TRACE",
        expected="VERSION, WARN, INFO or TRACE",
    ),
    Variable(
        "NCCL_IB_TIMEOUT",
        valid=r"0*([1-9]|1\d|2[0-2])",
        expected="an exponent from 1 to 22 (each try lasts 4.096 us * 2^n), not "
        "seconds",
    ),
    _torch_flag(
        "TORCH_NCCL_BLOCKING_WAIT",
        when={"1": "makes waits block and turns the watchdog's error handling off."},
    ),
    _torch_flag(
        "TORCH_NCCL_ENABLE_MONITORING",
        when={
            "0": "turns off the monitor that ends a process whose watchdog thread is "
            "stuck."
        },
    ),
    _torch_flag("TORCH_NCCL_DUMP_ON_TIMEOUT"),
    _torch_flag("TORCH_NCCL_DESYNC_DEBUG"),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        when={
            "0": "turns off the watchdog's abort: a collective that no peer joins "
            "waits for ever."
        },
        valid=NUMBER,
        expected="0, 1, 2 or 3",
        ends_job=TORCH_STOPS,
        gpu_only=True,
    ),
    Variable(
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        always="bounds a stuck watchdog thread, not a collective.",
        is_hint=True,
        valid=NUMBER,
        expected="a whole number of seconds",
        ends_job=TORCH_STOPS,
        gpu_only=True,
    ),
    Variable(
        "VLLM_PORT",
        valid=r"\s*\d+\s*",
        expected="a port number (a Kubernetes service named vllm sets a URI)",
        ends_job="vLLM raises ValueError when it looks for a port",
    ),
    Variable(
        "VLLM_LOGGING_LEVEL",
        when={"DEBUG": "writes the debug lines of every engine process."},
        is_choice=True,
        valid="DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|NOTSET|\\d+",
        expected="DEBUG, INFO, WARNING or ERROR",
    ),
    _allocator("PYTORCH_ALLOC_CONF"),
    _allocator("PYTORCH_CUDA_ALLOC_CONF"),
    # -- diagnostics that stay switched on -------------------------------------------
    Variable(
        "VLLM_TRACE_FUNCTION",
        when={
            "1": "writes down every function that Python calls; vLLM says that it "
            "slows the code down and is for hangs and crashes only."
        },
    ),
    Variable(
        "CUDA_LAUNCH_BLOCKING",
        when={"1": "waits after every kernel, which is slow and hides races."},
    ),
    Variable(
        "NCCL_IB_DISABLE",
        when={
            "1": "takes InfiniBand and RoCE away: nodes talk over sockets. It changes "
            "nothing on a single node."
        },
    ),
    Variable(
        "NCCL_P2P_DISABLE",
        when={"1": "takes NVLink and PCIe peer access away between GPUs of a node."},
    ),
    Variable(
        "NCCL_SHM_DISABLE",
        when={"1": "takes shared memory away as a path between GPUs of a node."},
    ),
    Variable(
        "RAY_IGNORE_UNHANDLED_ERRORS",
        always="silences errors of tasks and actors whose result nobody asks for, "
        "often their only trace.",
    ),
    Variable(
        "RAY_memory_monitor_refresh_ms",
        is_choice=True,
        when={
            "0": "turns Ray's memory monitor off: the kernel then picks which process "
            "to kill."
        },
    ),
    Variable(
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        is_choice=True,
        when={
            "1": "leaves every Ray worker with all GPUs visible; each has to choose "
            "its own."
        },
    ),
    Variable(
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        is_choice=True,
        when={
            "1": "lets max_model_len exceed what the model was made for, where its "
            "output may be NaN."
        },
    ),
)

# Variables of vLLM that are gone, and what took their place; said only where the
# installed vLLM does not define them.
GONE_FROM_VLLM: dict[str, str] = {
    "VLLM_ATTENTION_BACKEND": "the engine argument attention_backend (on the command "
    "line --attention-backend) took its place",
    "VLLM_USE_V1": "there is only the V1 engine now",
    "VLLM_USE_TRITON_FLASH_ATTN": "the engine argument attention_backend chooses the "
    "kernel",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "vLLM 0.33 no longer has it",
}

# What is gone, and asked for what is now the only way.
AS_IT_IS = frozenset({("VLLM_USE_V1", "1")})

# Names that are right, so that a near miss of one can be told from another real name
# and most environments need no look into the installed packages.
KNOWN: frozenset[str] = frozenset(
    {
        *(row.name for row in VARIABLES),
        "NCCL_ALGO",
        "NCCL_CONF_FILE",
        "NCCL_CUMEM_ENABLE",
        "NCCL_CUMEM_HOST_ENABLE",
        "NCCL_DEBUG_FILE",
        "NCCL_DEBUG_SUBSYS",
        "NCCL_IB_GID_INDEX",
        "NCCL_IB_HCA",
        "NCCL_IB_RETRY_CNT",
        "NCCL_MNNVL_ENABLE",
        "NCCL_NVLS_ENABLE",
        "NCCL_P2P_LEVEL",
        "NCCL_PROTO",
        "NCCL_RAS_ENABLE",
        "NCCL_SOCKET_IFNAME",
        "NCCL_SOCKET_RETRY_CNT",
        "NCCL_SOCKET_RETRY_SLEEP_MSEC",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
        "RAY_ADDRESS",
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
        "RAY_CGRAPH_get_timeout",
        "RAY_DEBUG",
        "RAY_DEDUP_LOGS",
        "RAY_RUNTIME_ENV",
        "RAY_TMPDIR",
        "RAY_USAGE_STATS_ENABLED",
        "RAY_enable_worker_prestart",
        "RAY_memory_usage_threshold",
        "RAY_worker_maximum_startup_concurrency",
        "RAY_worker_register_timeout_seconds",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
    }
)
