"""No advice names a knob that does not exist: each is proven in what reads it.

Packages that are installed are read; for the others tests/knobs/recorded.json says in
which file of which release each name was found (tests/knobs/record.py made it).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import mmap
import re
import sysconfig
from pathlib import Path

import pytest

from pytest_gkd import options
from pytest_gkd.diagnosis import catalogue

RECORDED = json.loads((Path(__file__).parent / "knobs" / "recorded.json").read_text())
KNOBS = sorted(
    {
        knob
        for rule in catalogue.load().values()
        for fix in rule.fixes
        for knob in fix.knobs
    }
)


@pytest.mark.parametrize("rule", catalogue.load().values(), ids=lambda r: r.id)
def test_our_own_options_have_their_value_after_an_equals_sign(
    rule: catalogue.Rule,
) -> None:
    """After a space pytest takes a path for the place to look for its ini file."""
    flags = {option.flag for option in options.OPTIONS if option.kind != "flag"}
    flags |= {"--gkd-timeout", "--gkd-report"}
    for fix in rule.fixes:
        assert not flags & set(fix.run.split()), fix.run


def of(*kinds: str) -> list[str]:
    return [knob for knob in KNOBS if knob.partition(":")[0] in kinds]


# Who reads each variable: a file of an installed package that must hold its name.
READERS = {
    "CC": "triton/runtime/build.py",
    "CUDA_LAUNCH_BLOCKING": "torch/cuda/_pin_memory_utils.py",
    "CUDA_VISIBLE_DEVICES": "ray/_private/accelerators/nvidia_gpu.py",
    "GLOO_SOCKET_IFNAME": "torch/lib/libtorch_cpu.so",
    "GRPC_ENABLE_FORK_SUPPORT": (
        "grpc/_cython/cygrpc" + sysconfig.get_config_var("EXT_SUFFIX")
    ),
    "HF_DATASETS_CACHE": "datasets/config.py",
    "HF_ENDPOINT": "huggingface_hub/constants.py",
    "HF_HOME": "huggingface_hub/constants.py",
    "HF_HUB_DOWNLOAD_TIMEOUT": "huggingface_hub/constants.py",
    "HF_HUB_ETAG_TIMEOUT": "huggingface_hub/constants.py",
    "HF_HUB_OFFLINE": "huggingface_hub/constants.py",
    "HF_TOKEN": "huggingface_hub/utils/_auth.py",
    "LOCAL_RANK": "torch/distributed/run.py",
    "MASTER_ADDR": "torch/distributed/rendezvous.py",
    "MASTER_PORT": "torch/distributed/rendezvous.py",
    "MAX_JOBS": "torch/utils/cpp_extension.py",
    "PYTORCH_ALLOC_CONF": "torch/lib/libc10.so",
    "PYTORCH_CUDA_ALLOC_CONF": "torch/lib/libc10.so",
    "RANK": "torch/distributed/rendezvous.py",
    "RAY_ADDRESS": "ray/_private/ray_constants.py",
    "RAY_AUTH_MODE": "ray/_raylet.so",
    "RAY_CGRAPH_get_timeout": "ray/dag/context.py",
    "RAY_DEDUP_LOGS": "ray/_private/ray_constants.py",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": (
        "ray/_private/accelerators/nvidia_gpu.py"
    ),
    "RAY_TMPDIR": "ray/_common/utils.py",
    "RAY_memory_usage_threshold": "ray/core/src/ray/raylet/raylet",
    "RAY_worker_maximum_startup_concurrency": "ray/core/src/ray/raylet/raylet",
    "RAY_worker_register_timeout_seconds": "ray/core/src/ray/raylet/raylet",
    "TORCH_CPP_LOG_LEVEL": "torch/lib/libc10.so",
    "TORCH_CUDA_ARCH_LIST": "torch/utils/cpp_extension.py",
    "TORCH_DISTRIBUTED_DEBUG": "torch/distributed/distributed_c10d.py",
    "SWANLAB_API_KEY": "transformers/integrations/integration_utils.py",
    "SWANLAB_MODE": "transformers/integrations/integration_utils.py",
    "TRITON_CACHE_DIR": "triton/knobs.py",
    "WANDB_API_KEY": "ray/air/integrations/wandb.py",
    "WANDB_MODE": "ray/air/integrations/wandb.py",
    "WANDB_PROJECT": "transformers/integrations/integration_utils.py",
    "WORLD_SIZE": "torch/distributed/rendezvous.py",
}
# Read by the C library, the shell or an HTTP client, whatever is installed.
SYSTEM = ("HTTPS_PROXY", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR")
# Programs of the system or of a package that the advice says to install.
PROGRAMS = [
    "apt-get", "chmod", "compute-sanitizer", "curl", "dcgmi", "df", "dmesg", "docker",
    "du", "free", "getent", "git", "gkd", "grep", "head", "ibv_devinfo", "id", "ip",
    "kill", "ls", "nc", "nvidia-smi", "pip", "ps", "py-spy", "python", "quota", "rm",
    "sed", "sha256sum", "ss", "systemctl", "tail", "tar", "ulimit", "uv", "zcat",
]  # fmt: skip


def package_file(path: str) -> Path:
    name = path.partition("/")[0]
    found = importlib.util.find_spec(name)
    assert found is not None, f"{'gkd', name}, of the lock, is not installed"
    assert found.submodule_search_locations
    return Path(next(iter(found.submodule_search_locations))).parent / path


def holds(path: Path, name: str) -> bool:
    with path.open("rb") as stream:
        text = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return text.find(name.encode()) >= 0


@pytest.mark.parametrize("knob", of("env"))
def test_a_variable_is_read_by_somebody(knob: str) -> None:
    name = knob.removeprefix("env:")
    if name in SYSTEM:
        return
    if name.startswith("NCCL_"):
        assert name in RECORDED["nccl"]["names"]
    elif name.startswith("VLLM_"):
        text = package_file("vllm/envs.py").read_text()
        assert re.search(rf'^    "{name}": ', text, re.MULTILINE), name
    else:
        assert name in READERS, f"nobody is known to read {name}"
        short = name.removeprefix("RAY_") if "raylet/raylet" in READERS[name] else name
        assert holds(package_file(READERS[name]), short)


@pytest.mark.parametrize(
    "knob", of("verl", "trl", "lightrft", "deepspeed", "peft", "sglang")
)
def test_a_trainers_key_is_recorded_with_its_release(knob: str) -> None:
    kind, _, name = knob.partition(":")
    if name.startswith("recipe:"):
        kind, name = "recipe", name.removeprefix("recipe:")
    if name in RECORDED[kind]["names"]:
        return
    assert kind == "trl", f"{knob} is in no release that was recorded"
    package_file("transformers/__init__.py")
    from transformers import TrainingArguments

    assert name in {field.name for field in dataclasses.fields(TrainingArguments)}


@functools.cache
def engine_arguments() -> frozenset[str]:
    tree = ast.parse(package_file("vllm/engine/arg_utils.py").read_text())
    engine = next(
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    )
    return frozenset(
        node.target.id
        for node in engine.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )


@pytest.mark.parametrize("knob", of("vllm"))
def test_an_engine_argument_exists(knob: str) -> None:
    name = knob.removeprefix("vllm:")
    if name.startswith("--"):
        field = name.removeprefix("--").replace("-", "_")
        sources = package_file("vllm/entrypoints").glob("**/cli_args.py")
        line = re.compile(rf"^    {field}: ", re.MULTILINE)
        assert any(line.search(path.read_text()) for path in sources), name
    elif "." in name:
        owner, _, method = name.partition(".")
        home = {
            "LLM": "vllm/entrypoints",
            "ModelRegistry": "vllm/model_executor/models",
        }
        sources = package_file(home[owner]).glob("**/*.py")
        assert any(f"def {method}(" in path.read_text() for path in sources)
    else:
        assert name in engine_arguments()


def attribute(path: str) -> object:
    """``torch.load.weights_only`` as the function's parameter, or the attribute."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
            break
        except ModuleNotFoundError:
            continue
    for part in parts[cut:]:
        if hasattr(found, part):
            found = getattr(found, part)
        else:
            assert callable(found), path
            return inspect.signature(found).parameters[part]
    return found


@pytest.mark.parametrize("knob", of("torch"))
def test_a_torch_name_exists(knob: str) -> None:
    package_file("torch/__init__.py")
    attribute("torch." + knob.removeprefix("torch:"))


@pytest.mark.parametrize("knob", of("hf"))
def test_a_hugging_face_name_exists(knob: str) -> None:
    path = knob.removeprefix("hf:")
    package, _, rest = path.partition(".")
    name = rest.rpartition(".")[2]
    root = package_file(package)
    assert any(
        re.search(rf"\b{name}\b", source.read_text(errors="replace"))
        for source in root.glob("**/*.py")
    )


@pytest.mark.parametrize("knob", of("gkd"))
def test_an_option_of_ours_exists(knob: str) -> None:
    known = {option.flag for option in options.OPTIONS}
    known |= {"--gkd-stages", "--gkd-timeout", "--gkd-report"}
    assert knob.removeprefix("gkd:") in known


@pytest.mark.parametrize("knob", of("ray"))
def test_a_ray_argument_exists(knob: str) -> None:
    name = knob.removeprefix("ray:")
    assert holds(package_file("ray/_common/ray_option_utils.py"), f'"{name}"')


@pytest.mark.parametrize("knob", of("cmd"))
def test_a_command_exists(knob: str) -> None:
    words = knob.removeprefix("cmd:").split()
    if words[0] == "ray":
        text = package_file("ray/scripts/scripts.py").read_text()
        text += package_file("ray/util/state/state_cli.py").read_text()
        option = words[-1] if words[-1].startswith("--") else ""
        assert re.search(rf'def {words[1]}\(|name="{words[1]}"|"{words[1]}"', text)
        assert option in text
    elif words[0] == "vllm":
        assert package_file(f"vllm/entrypoints/cli/{words[1]}.py").exists()
    elif words[0] in ("torchrun", "torchfrtrace"):
        assert holds(package_file("torch/__init__.py").parent / RUNS[words[0]], "main")
    elif words[0] in ("hf", "accelerate"):
        package_file(f"{'huggingface_hub' if words[0] == 'hf' else 'accelerate'}/x")
    else:
        assert words[0] in PROGRAMS, f"{words[0]} is not a known program"


RUNS = {
    "torchrun": "distributed/run.py",
    "torchfrtrace": "distributed/flight_recorder/fr_trace.py",
}


@pytest.mark.parametrize("knob", of("hydra"))
def test_a_hydra_form_is_one_of_those_checked(knob: str) -> None:
    assert knob in ("hydra:+key=value", "hydra:--cfg", "hydra:--resolve")


def test_every_kind_of_knob_has_its_check() -> None:
    checked = {
        "env", "verl", "trl", "lightrft", "deepspeed", "peft", "vllm", "torch", "hf",
        "gkd", "sglang",
        "ray", "cmd", "hydra",
    }  # fmt: skip
    assert {knob.partition(":")[0] for knob in KNOBS} <= checked


# How each framework writes a setting in a command, and how its knob is spelt.
SETTINGS = {
    "verl": (r"(?:^| )\+?([a-z_]+(?:\.\w+)+)=", "verl:{}"),
    "trl": (r"(?:^|, )(\w+)=", "trl:{}"),
    "lightrft": (r"(--\w+)", "lightrft:{}"),
    "vllm": (r"--(?!gkd-)([\w-]+)", "vllm:{}"),
    "sglang": (r"--([\w-]+)", "sglang:{}"),
}


def test_a_fix_names_the_variables_it_sets() -> None:
    """``export X=1`` without ``env:X`` among its knobs would escape the checks."""
    for rule in catalogue.load().values():
        for fix in rule.fixes:
            for name in re.findall(r"\b([A-Z][A-Z_]{3,}\w*)=", fix.run):
                assert f"env:{name}" in fix.knobs, (rule.id, name)


@pytest.mark.parametrize("framework", SETTINGS)
def test_a_fix_names_the_settings_it_changes(framework: str) -> None:
    pattern, knob = SETTINGS[framework]
    for rule in catalogue.load().values():
        for fix in rule.fixes:
            if fix.framework != framework or fix.run.endswith(("--help", "--help=all")):
                continue
            for name in re.findall(pattern, fix.run):
                is_flag = framework in ("vllm", "sglang")
                plain = name.replace("-", "_") if is_flag else name
                known = {knob.format(plain), f"vllm:--{name}", f"verl:recipe:{name}"}
                parents = {k for k in fix.knobs if name.startswith(k.partition(":")[2])}
                assert known & set(fix.knobs) or parents, (rule.id, name)


def test_no_text_writes_an_option_of_ours_with_a_space() -> None:
    """pytest would take a path behind a space for the place to look for its ini."""
    root = Path(__file__).parent.parent
    texts = [fix.run for rule in catalogue.load().values() for fix in rule.fixes]
    texts += [path.read_text() for path in (root / ".github/workflows").iterdir()]
    pages = [root / "README.md", root / "README.zh.md", *root.glob("docs/**/*.md")]
    for page in pages:
        texts += re.findall(r"^(?:pytest| {7,}--gkd).*", page.read_text(), re.M)
    valued = [option.flag for option in options.OPTIONS if option.kind != "flag"]
    spaced = re.compile(
        rf"(?:{'|'.join([*valued, '--gkd-report', '--gkd-timeout'])}) (?!-)"
    )
    assert [text for text in texts if spaced.search(text)] == []
