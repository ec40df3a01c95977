"""The environment of a job: variables never read, refused, or not passed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_gkd.job import check, environment
from pytest_gkd.job.findings import Finding

BATCH = "actor_rollout_ref.actor.use_dynamic_bsz=True"
START = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm {BATCH}"
SLIME = "python3 train.py --hf-checkpoint /root/m --rollout-batch-size 8"


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], None]]:
    """Puts a package's metadata before all others; one without a release is none."""

    def put(name: str, release: str) -> None:
        place = tmp_path / f"installed-{release}"
        folder = place / f"{name}-{release or 0}.dist-info"
        folder.mkdir(parents=True)
        version = f"Version: {release}\n" if release else ""
        (folder / "METADATA").write_text(f"Name: {name}\n{version}")
        monkeypatch.syspath_prepend(str(place))
        environment.installed.cache_clear()

    yield put
    environment.installed.cache_clear()


def told(folder: Path, script: str) -> list[Finding]:
    path = folder / "run.sh"
    path.write_text(script)
    return [one for one in check.check(path).findings if one.key.isupper()]


def short(found: list[Finding]) -> list[str]:
    return [f"{one.level} {one.key} {one.line}" for one in found]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        # read by nobody, or no longer
        ("export NCCL_TIMEOUT=600\nSTART", ["warning NCCL_TIMEOUT 1"]),
        ("export VLLM_USE_V1=0\nSTART", ["warning VLLM_USE_V1 1"]),
        ("export VLLM_USE_V1=ture\nSTART", ["warning VLLM_USE_V1 1"]),
        ("export VLLM_USE_V1=1\nSTART", ["note VLLM_USE_V1 1"]),
        ("VLLM_ATTENTION_BACKEND=X START", ["warning VLLM_ATTENTION_BACKEND 1"]),
        ("env NCCL_DEBUGG=INFO START", ["warning NCCL_DEBUGG 1"]),
        ("export HF_HUB_OFLINE=1\nSTART", ["warning HF_HUB_OFLINE 1"]),
        ("export VLLM_MINE=$X\nSTART", ["warning VLLM_MINE 1"]),
        (
            "export NCCL_ASYNC_ERROR_HANDLING=1\nSTART",
            ["warning NCCL_ASYNC_ERROR_HANDLING 1"],
        ),
        # the user's own, a plugin's, what commands do not see, or what the script uses
        ("export MY_TIMEOUT=1 HF_MODEL_PATH=/m RAY_DATA_HOME=/d\nSTART", []),
        ("export VLLM_ASCEND_ENABLE_NZ=0 NCCL_IBEXT_DISABLE=1\nSTART", []),
        ("export PYTORCH_NPU_ALLOC_CONF=x VLLM_VERSION=0.13.0\nSTART", []),
        ("NCCL_TIMEOUT=600\nVLLM_MINE=1\nSTART", []),
        ("export VLLM_HTTP=8000\nSTART trainer.nnodes=$VLLM_HTTP", []),
        # values
        (
            "export TORCH_DISTRIBUTED_DEBUG=verbose\nSTART",
            ["error TORCH_DISTRIBUTED_DEBUG 1"],
        ),
        ("export NCCL_DEBUG=LOUD\nSTART", ["warning NCCL_DEBUG 1"]),
        (
            "export VLLM_ENGINE_READY_TIMEOUT_S=10m\nSTART",
            ["error VLLM_ENGINE_READY_TIMEOUT_S 1"],
        ),
        (
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments=True\nSTART",
            ["error PYTORCH_CUDA_ALLOC_CONF 1"],
        ),
        (
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:true\nSTART",
            ["error PYTORCH_CUDA_ALLOC_CONF 1"],
        ),
        (
            "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512,backend:native START",
            [],
        ),
        # settings for debugging
        ("export CUDA_LAUNCH_BLOCKING=1\nSTART", ["warning CUDA_LAUNCH_BLOCKING 1"]),
        ("export CUDA_LAUNCH_BLOCKING=0 NCCL_DEBUG=INFO\nSTART", []),
        ("NCCL_DEBUG=TRACE START", ["warning NCCL_DEBUG 1"]),
        ("export NCCL_IB_DISABLE=1\nSTART trainer.nnodes=1", []),
        (
            "export NCCL_IB_DISABLE=1\nSTART trainer.nnodes=2",
            ["warning NCCL_IB_DISABLE 1"],
        ),
        ("export VLLM_LOGGING_LEVEL=DEBUG\nSTART", ["note VLLM_LOGGING_LEVEL 1"]),
        # on one way through the script only
        (
            'if [ -n "$D" ]; then export CUDA_LAUNCH_BLOCKING=1; fi\nSTART',
            ["warning CUDA_LAUNCH_BLOCKING 1"],
        ),
    ],
)
def test_variables_are_judged_by_who_reads_them(
    tmp_path: Path, script: str, expected: list[str]
) -> None:
    assert short(told(tmp_path, script.replace("START", START))) == expected


@pytest.mark.parametrize(
    ("installed", "level"), [("0.11.0", ["error"]), ("0.20.2", []), ("", ["note"])]
)
def test_expandable_segments_are_refused_by_old_sleep_modes(
    tmp_path: Path,
    install: Callable[[str, str], None],
    installed: str,
    level: list[str],
) -> None:
    install("vllm", installed)
    script = f"export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n{START}"
    assert [one.level for one in told(tmp_path, script)] == level
    keeps = "actor_rollout_ref.rollout.free_cache_engine=False"
    assert told(tmp_path, f"{script} {keeps}") == []


def test_a_near_name_and_what_took_its_place_are_said(tmp_path: Path) -> None:
    script = f"export VLLM_LOGING_LEVEL=INFO VLLM_ATTENTION_BACKEND=X\n{START}"
    gone, slip = (one.message for one in told(tmp_path, script))
    assert "0.15.1 does not read" in gone
    assert "--attention-backend" in gone
    assert "near names: VLLM_LOGGING_LEVEL" in slip


def test_what_is_set_for_the_check_is_not_the_scripts(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(START)
    found = check.check(path, given={"NCCL_TIMEOUT": "600"}).findings
    assert not [one for one in found if one.key == "NCCL_TIMEOUT"]


def test_an_installed_release_that_reads_a_variable_counts(
    install: Callable[[str, str], None],
) -> None:
    install("vllm", "")
    assert "does not read" in environment.unread("VLLM_USE_V1")
    install("vllm", "0.10.2")
    assert environment.unread("VLLM_USE_V1") == ""


JSON = """--runtime-env-json='{"env_vars": {"NCCL_DEBUG": "INFO"}}'"""
SUBMIT = f"ray job submit {JSON} -- {START}"
START_RAY = "ray start --head"
OWN = "+ray_kwargs.ray_init.runtime_env.env_vars"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        # exported where the job is submitted
        ("export HF_HOME=/d\nSUBMIT", ["warning HF_HOME 1"]),
        ("export NCCL_DEBUG=INFO MINE=1\nSUBMIT", []),
        ("export HF_HOME=/d\nray start --head\nSUBMIT", []),
        ("ray start --head\nexport HF_HOME=/d\nSUBMIT", ["warning HF_HOME 2"]),
        ("ray job submit -- env HF_HOME=/d START", []),
        ("export HF_HOME=/d\nSUBMIT +x=$HF_HOME", []),
        ("export HF_HOME=/d\nray job submit --runtime-env=$E -- START", []),
        ("export HF_HOME=/d\nray job submit --runtime-env=env.yaml -- START", []),
        ("export RAY_ADDRESS=http://h:8265\nSUBMIT", []),
        # exported between ray start and the driver
        ("export NCCL_ALGO=Ring HF_HOME=/d\nray start --head\nSTART", []),
        (
            "ray start --head\nexport NCCL_NVLS_ENABLE=0 HF_HOME=/d\nSTART",
            ["warning NCCL_NVLS_ENABLE 2"],
        ),
        ("ray start --head\nexport NCCL_ALGO=Ring\nSTART", []),
        ("ray start --head\nNCCL_NVLS_ENABLE=0 START OWN.NCCL_NVLS_ENABLE=\\'0\\'", []),
        ("ray start --head\nray stop\nexport NCCL_NVLS_ENABLE=0\nSTART", []),
        ("export NCCL_NVLS_ENABLE=0\nSTART", []),
        # what Ray refuses
        ("START OWN.NVTE_X=0", ["error NVTE_X 1"]),
        ("START OWN.NVTE_X=\\'0\\'", []),
        (
            'ray job submit --runtime-env-json \'{"env_vars": {"A_B": 1}}\' -- START',
            ["error A_B 1"],
        ),
        (
            'ray job submit --runtime-env-json \'{"env_vars": {"NCCL_ALGO": "Ring"}}\''
            " -- START",
            ["error NCCL_ALGO 1"],
        ),
        ("SUBMIT OWN.NCCL_DEBUG=WARN", ["error NCCL_DEBUG 1"]),
        # GPUs
        (
            "export CUDA_VISIBLE_DEVICES=0,1\nSTART trainer.n_gpus_per_node=4",
            ["warning CUDA_VISIBLE_DEVICES 1"],
        ),
        ("export CUDA_VISIBLE_DEVICES=0,1\nSTART trainer.n_gpus_per_node=2", []),
        (
            "export CUDA_VISIBLE_DEVICES=0,1\nray start --head --num-gpus=4\nSTART",
            ["error CUDA_VISIBLE_DEVICES 1"],
        ),
    ],
)
def test_what_reaches_the_workers_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: list[str]
) -> None:
    (tmp_path / "env.yaml").write_text('env_vars: {HF_HOME: "/d"}\n')
    monkeypatch.chdir(tmp_path)
    script = script.replace("SUBMIT", SUBMIT).replace("OWN", OWN)
    assert short(told(tmp_path, script.replace("START", START))) == expected


def test_a_runtime_environment_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"ray job submit --runtime-env-json='{{a,}}' -- {START}")
    found = [one for one in check.check(path).findings if one.key == "env_vars"]
    assert [one.level for one in found] == ["error"]


def test_a_job_of_slime_is_told_what_stays_behind(tmp_path: Path) -> None:
    script = f"ray start --head\nexport NCCL_NVLS_ENABLE=0\nray job submit -- {SLIME}"
    (one,) = told(tmp_path, script)
    assert "NCCL_NVLS_ENABLE will not reach the workers" in one.message
    assert "--runtime-env-json" in one.message


TRAIN = f"{SLIME} --train-env-vars"


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (f'{TRAIN} \'{{"NCCL_DEBUGG": "INFO"}}\'', ["warning NCCL_DEBUGG 1"]),
        (f'{TRAIN} \'{{"MINE": "1"}}\'', []),
        (
            f"true\n{TRAIN} '{{\"NCCL_NVLS_ENABLE\": 0}}'",
            ["error NCCL_NVLS_ENABLE 2"],
        ),
        # It reaches the trainer this way.
        (
            "ray start --head\nexport NCCL_NVLS_ENABLE=0\n"
            f'ray job submit -- {TRAIN} \'{{"NCCL_NVLS_ENABLE": "0"}}\'',
            [],
        ),
        (f"{TRAIN} '[1]'", ["error train_env_vars 1"]),
        (f"{TRAIN} '{{a}}'", ["error train_env_vars 1"]),
        (f'{TRAIN} "$ANY"', []),
    ],
)
@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_what_slime_gives_to_its_trainer(
    job: str, expected: list[str], framework: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(job)
    found = [
        one._replace(key=one.key.lstrip("-").replace("-", "_"))
        for one in check.check(path, framework=framework).findings
    ]
    ours = [one for one in found if one.key.isupper() or one.key == "train_env_vars"]
    assert short(ours) == expected


NEMO = """\
defaults: grpo_math_1B.yaml
policy:
  dtensor_cfg:
    enabled: ON
    env_vars:
      NCCL_DEBUGG: INFO
      NCCL_NVLS_ENABLE: 0
      MINE: "1"
  generation:
    vllm_cfg:
      env_vars:
        VLLM_USE_V1: 0
        VLLM_ENGINE_READY_TIMEOUT_S: ${.mine}
        mine: 10m
"""


@pytest.mark.parametrize(
    ("is_on", "expected"),
    [
        ("true", ["warning NCCL_DEBUGG 6", "error NCCL_NVLS_ENABLE 7"]),
        ("false", []),
    ],
)
def test_what_nemo_rl_gives_to_its_workers(
    is_on: str, expected: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(NEMO.replace("ON", is_on))
    found = [one for one in check.check(path).findings if one.key.isupper()]
    # vLLM's become texts, whatever they are.
    engine = ["warning VLLM_USE_V1 12", "error VLLM_ENGINE_READY_TIMEOUT_S 13"]
    assert sorted(short(found)) == sorted([*expected, *engine])
