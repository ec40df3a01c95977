"""``gkd check`` on a configuration in its own names."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd.job import check, frameworks
from pytest_gkd.job.check import Checked
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.frameworks import plain

JOB = """\
student = "some/model"
teacher = ["a/teacher", "another/teacher"]
max_prompt_length = 1024
nodes = 2
gpus_per_node = 8
"""
LENGTHS = 'student = "m"\nmax_prompt_length = 512\nmax_response_length = 512\n'
GPUS = 'student = "m"\ntotal_gpus = 8\n'


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return tmp_path / "job.toml"


def checked(path: Path, text: str, *overrides: str, framework: str = "") -> Checked:
    path.write_text(text)
    return check.check(path, overrides, framework)


def faults(found: Checked) -> list[tuple[str, str, str]]:
    return [(f.level, f.key, f.cause) for f in found.findings if f.level != "note"]


def test_values_are_as_written_with_their_lines(job: Path) -> None:
    found = checked(job, JOB)
    assert (found.framework, faults(found)) == ("gkd", [])
    told = {n: (v.value, v.source, v.line) for n, v in found.values.items()}
    assert told == {
        "student": ("some/model", "user", 1),
        "teacher": (["a/teacher", "another/teacher"], "user", 2),
        "max_prompt_length": (1024, "user", 3),
        "nodes": (2, "user", 4),
        "gpus_per_node": (8, "user", 5),
        "total_gpus": (16, "user", 0),
    }


def test_a_table_leaves_the_others_to_somebody_else(job: Path) -> None:
    text = 'lr = 1\n[gkd]\nstudent = "m"\n[gkd.chat_template_kwargs]\nthinking = true\n'
    found = checked(job, text)
    told = {name: value.value for name, value in found.values.items()}
    assert told == {"student": "m", "chat_template_kwargs": {"thinking": True}}
    assert faults(found) == []
    assert faults(checked(job, text.replace("[gkd]\n", '[gkd]\nlr = "1"\n'))) == [
        ("error", "lr", "config.unknown-option")
    ]


def test_a_job_that_names_no_student_is_told_by_the_framework(job: Path) -> None:
    with pytest.raises(CheckError, match="--framework=NAME"):
        checked(job, "max_model_len = 8\n")
    found = checked(job, "max_model_len = 8\n", framework="gkd")
    assert found.values["max_model_len"].value == 8


def test_a_script_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="is for a configuration file"):
        checked(tmp_path / "run.sh", "python train.py --x 1\n", framework="gkd")


def test_yaml_and_further_settings_count_too(tmp_path: Path) -> None:
    found = checked(tmp_path / "job.yaml", "student: m\nnodes: 1\n", "nodes=2")
    assert found.values["nodes"].value == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("max_lenght = 8", "no value max_lenght; did you mean 'max_length'"),
        ("[rollout]\ntemprature = 1", "rollout.temprature; did you mean 'temperature'"),
        ('tensor_parallel_size = "4"', "'4' is not an integer, 1 or more"),
        ("nodes = true", "True is not an integer"),
        ("teacher_gpus = -1", "-1 is not an integer, 0 or more"),
        ("fsdp_size = 1.5", "1.5 is not an integer"),
        ("gpu_memory_utilization = 1.2", "1.2 is not a number above 0 and up to 1"),
        ("learning_rate = -1", "-1 is not a number, 0 or more"),
        ("learning_rate = inf", "inf is not a number"),
        ("offload_param = 1", "1 is not true or false"),
        ("prompt_column = 1", "1 is not a text"),
        ("train_files = [1]", "[1] is not a string or a list of strings"),
        ('placement = "apart"', "'apart' is not colocated or split"),
        ("chat_template_kwargs = 1", "1 is not a table"),
    ],
)
def test_names_and_kinds(line: str, says: str, job: Path) -> None:
    found = checked(job, f'student = "m"\n{line}\n')
    (fault,) = found.findings
    assert (fault.level, fault.cause) == ("error", "config.unknown-option")
    assert says in fault.message
    assert fault.line == line.count("\n") + 2


CONFLICT, LENGTH = "config.invalid-combination", "vllm.max-model-len"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{LENGTHS}max_model_len = 1024", []),
        (f"{LENGTHS}max_model_len = 1023", [("warning", "max_model_len", LENGTH)]),
        (f"{LENGTHS}max_model_len = 512", [("error", "max_model_len", LENGTH)]),
        (f"{LENGTHS}max_length = 1023", [("warning", "max_length", CONFLICT)]),
        (f"{LENGTHS}max_length = 1024", []),
        (f"{LENGTHS}teacher_max_model_len = 1025", []),
        (
            f"{LENGTHS}teacher_max_model_len = 1024",
            [("error", "teacher_max_model_len", LENGTH)],
        ),
        (f"{GPUS}trainer_gpus = 8\nrollout_gpus = 8", []),
        (f"{GPUS}teacher_gpus = 9", [("error", "teacher_gpus", CONFLICT)]),
        (
            f'{GPUS}trainer_gpus = 4\nrollout_gpus = 5\nplacement = "split"',
            [("error", "placement", CONFLICT)],
        ),
        (f'{GPUS}trainer_gpus = 4\nrollout_gpus = 4\nplacement = "split"', []),
        (f"{GPUS}tensor_parallel_size = 8", []),
        (
            f"{GPUS}tensor_parallel_size = 8\npipeline_parallel_size = 2",
            [("error", "tensor_parallel_size", CONFLICT)],
        ),
        (
            f"{GPUS}rollout_gpus = 6\ntensor_parallel_size = 4",
            [("error", "tensor_parallel_size", CONFLICT)],
        ),
        (
            f"{GPUS}teacher_gpus = 2\nteacher_tensor_parallel_size = 4",
            [("error", "teacher_tensor_parallel_size", CONFLICT)],
        ),
        (
            f"{GPUS}trainer_gpus = 8\ncontext_parallel_size = 3",
            [("error", "context_parallel_size", CONFLICT)],
        ),
        ('student = "/no/model"', [("warning", "student", "checkpoint.missing")]),
        (
            'student = "m"\ntrain_files = ["no.parquet", "some/dataset", "*.json"]',
            [("warning", "train_files", "data.file-missing")],
        ),
        ('student = "\\u0000/config"\ntrain_files = "/\\u0000.json"', []),
    ],
)
def test_rules_that_hold_for_every_framework(
    text: str, expected: list[tuple[str, str, str]], job: Path
) -> None:
    assert faults(checked(job, text)) == expected


def models(folder: Path, **sizes: int) -> None:
    for name, vocabulary in sizes.items():
        (folder / name).mkdir()
        config = {"num_attention_heads": 12, "max_position_embeddings": 4096}
        told = {"text_config": {**config, "vocab_size": vocabulary}}
        (folder / name / "config.json").write_text(json.dumps(told))


def test_models_that_lie_beside_it_are_read(job: Path) -> None:
    models(job.parent, small=32000, large=32064, same=32000)
    text = 'student = "small"\nteacher = "{}"\ntensor_parallel_size = {}\n'
    found = checked(job, text.format("large", 4))
    assert found.values["student"].value == str(job.parent / "small")
    assert faults(found) == [("warning", "teacher", "tokenizer.vocab-mismatch")]
    assert "have 32000 and 32064 entries" in found.findings[0].message
    assert faults(checked(job, text.format("same", 4))) == []
    assert faults(checked(job, text.format("same", 8))) == [
        ("error", "tensor_parallel_size", "vllm.tp-divisibility")
    ]


def test_a_model_has_so_many_positions(job: Path) -> None:
    models(job.parent, small=32000)
    text = 'student = "small"\nmax_model_len = 4097\n'
    assert faults(checked(job, text)) == [("warning", "max_model_len", LENGTH)]
    sure = faults(checked(job, f'{text}rollout_engine = "vllm"\n'))
    assert sure == [("error", "max_model_len", LENGTH)]
    assert faults(checked(job, text.replace("4097", "4096"))) == []
    config = job.parent / "small/config.json"
    told = json.loads(config.read_text())
    told["text_config"]["rope_scaling"] = {"rope_type": "yarn", "factor": 4}
    config.write_text(json.dumps(told))
    assert faults(checked(job, text)) == []


def test_every_value_of_a_framework_has_a_kind() -> None:
    folder = Path(frameworks.__file__).parent
    table = tomllib.loads((folder / "names.toml").read_text())
    names = {name for group in table.values() for name in group}
    # And those that a reader derives.
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                names |= {
                    key.value
                    for key in node.keys
                    if isinstance(key, ast.Constant)
                    and isinstance(key.value, str)
                    and key.value.startswith(("teacher_", "trainer_", "rollout_"))
                    and key.value.endswith(("_gpus", "_ip", "_port"))
                }
    assert names - plain.kinds().keys() == set()
    assert set(plain.kinds().values()) <= plain.KINDS.keys()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'student = "m"\n' + b"# x\n" * 2_500_000, "10.0 MB"),
        (b"student = " + b"[" * 100_000, "nested deeper"),
        (b'student = "m"\nx' + b".a" * 50_000 + b" = 1\n", "nested deeper"),
        ("student = 'm\xe9'\n".encode("utf-16"), "binary"),
        (b"student = \x00\n", "binary"),
        (b"student = 1\nstudent = 2\n", "is not valid TOML"),
    ],
)
def test_hostile_files_are_refused_by_name(raw: bytes, says: str, job: Path) -> None:
    job.write_bytes(raw)
    with pytest.raises(CheckError, match=r"job\.toml") as caught:
        check.check(job)
    assert says in str(caught.value)


def test_a_text_in_another_encoding_is_shown_as_far_as_it_is_one(job: Path) -> None:
    job.write_bytes(b'student = "caf\xe9"\n')
    found = check.check(job)
    assert found.values["student"].value == "caf\ufffd"


def test_what_it_says_is_escaped(job: Path) -> None:
    text: Any = checked(
        job,
        'student = "a\\u001b[31mb"\nlr_\u202e = 1\n'.replace(
            "lr_\u202e", '"lr_\\u001b"'
        ),
    )
    assert "\x1b" not in check.text(text)
