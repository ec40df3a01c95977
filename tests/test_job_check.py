"""``gkd check``: the values of a launch script of verl, and what is wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_gkd import __main__
from pytest_gkd.job import check
from pytest_gkd.job.check import Checked
from pytest_gkd.job.findings import CheckError, Finding

SCRIPT = """\
#!/usr/bin/env bash
set -xeuo pipefail
MODEL=${MODEL:-Qwen/Qwen3-8B}
PROMPT=1024 R=actor_rollout_ref
RESPONSE=2048 D=$R.actor.use_dynamic_bsz=True
files="['$HOME/a.parquet', '$HOME/b.parquet']"
case "$MODEL" in
  *8B) TP=2 ;;
  *) TP=1 ;;
esac
DATA=(
  data.train_files="$files"
  data.max_prompt_length=${PROMPT}
  data.max_response_length=${RESPONSE}
)
ARGS=(
  actor_rollout_ref.model.path="$MODEL"
  actor_rollout_ref.actor.optim.lr=1e-6 $D $R.rollout.name=vllm
  actor_rollout_ref.rollout.tensor_model_parallel_size=$TP
  actor_rollout_ref.rollout.max_model_len=$((PROMPT + RESPONSE + 1))
)
ARGS+=(
  distillation.enabled=True
  distillation.n_gpus_per_node=4
  distillation.nnodes=1
  distillation.teacher_models.teacher_model.model_path=Qwen/Qwen3-32B
)
export NCCL_DEBUG=INFO
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ]; then LAUNCH=(uv run --frozen python3); fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \\
  "${DATA[@]}" \\
  "${ARGS[@]}" \\
  "$@"
"""
RELEASE = "verl==0.9.1"
SIZES = (
    "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.rollout.name=vllm"
)
START = f"python3 -m verl.trainer.main_ppo {SIZES}"


def checked(path: Path, text: str, *overrides: str, **given: str) -> Checked:
    path.write_bytes(text.encode())
    return check.check(path, overrides, RELEASE, {"HOME": "her", **given})


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "run.sh"


def values(found: Checked) -> dict[str, Any]:
    return {name: value.value for name, value in found.values.items()}


def errors(found: Checked) -> list[Finding]:
    return [finding for finding in found.findings if finding.level != "note"]


def test_values_come_with_the_lines_they_stand_in(script: Path) -> None:
    found = checked(script, SCRIPT)
    assert not found.findings
    assert found.lines == [31]
    expected = {
        "student": ("Qwen/Qwen3-8B", 17),
        "teacher": ("Qwen/Qwen3-32B", 26),
        "train_files": (["her/a.parquet", "her/b.parquet"], 12),
        "max_prompt_length": (1024, 13),
        "max_model_len": (3073, 20),
        "learning_rate": (1e-6, 18),
        "tensor_parallel_size": (2, 19),
    }
    told = {n: (v.value, v.line) for n, v in found.values.items() if n in expected}
    assert told == expected
    assert {found.values[name].source for name in expected} == {"user"}
    value = found.values["max_model_len"]
    assert value.expression.endswith("max_model_len=$((PROMPT + RESPONSE + 1))")


def test_what_is_not_given_has_the_releases_default(script: Path) -> None:
    found = checked(script, SCRIPT.replace(" $D ", " "))
    batch = found.values["train_batch_size"]
    assert (batch.value, batch.source) == (1024, "default")
    # Its default refers to another key: actor_rollout_ref.rollout.dtype and the like.
    assert values(found)["use_dynamic_bsz"] is False


def test_gpus_are_summed_by_role(script: Path) -> None:
    """The pool of the teacher is beside that of trainer and rollout."""
    told = values(checked(script, SCRIPT))
    names = ("trainer_gpus", "rollout_gpus", "teacher_gpus", "total_gpus", "placement")
    assert [told[name] for name in names] == [8, 8, 4, 12, "colocated"]


def test_several_teachers_are_a_list(script: Path) -> None:
    second = "+distillation.teacher_models.math.model_path=other"
    teacher = checked(script, SCRIPT, second).values["teacher"]
    assert (teacher.value, teacher.source) == (["Qwen/Qwen3-32B", "other"], "user")


def test_the_scripts_own_arguments_win(script: Path) -> None:
    found = checked(script, SCRIPT, "actor_rollout_ref.model.path=mine")
    assert found.values["student"].value == "mine"
    assert found.values["student"].file == "the command line"
    (twice,) = errors(found)
    assert "given twice: Qwen/Qwen3-8B on line 17, then mine" in twice.message


def test_a_variable_that_is_set_counts(script: Path) -> None:
    told = values(checked(script, SCRIPT, MODEL="q4B"))
    assert (told["student"], told["tensor_parallel_size"]) == ("q4B", 1)


def test_a_variable_that_a_program_decides_may_be_given(script: Path) -> None:
    text = f"N=$(nproc)\n{START} trainer.n_gpus_per_node=$N\n"
    found = checked(script, text).values["gpus_per_node"]
    assert found.source == "undetermined"
    assert found.alternatives == ["depends on $(nproc)", "give it with --set N=VALUE"]
    assert values(checked(script, text, N="6"))["gpus_per_node"] == 6
    assert values(checked(script, f"N=3\n{text[10:]}", N="6"))["gpus_per_node"] == 3


def test_a_sum_with_brackets_in_a_default_is_computed(script: Path) -> None:
    text = f"a=1; b=2\nT=${{T:-$(((a + b) * 2))}}\n{START} data.max_prompt_length=$T\n"
    found = checked(script, text)
    assert (values(found)["max_prompt_length"], errors(found)) == (6, [])


def test_what_a_branch_decides_is_undetermined_with_both_ways(script: Path) -> None:
    text = SCRIPT.replace(
        "PROMPT=1024", 'if [ "$BIG" = 1 ]; then PROMPT=9; else PROMPT=8; fi'
    )
    value = checked(script, text).values["max_prompt_length"]
    assert (value.value, value.source) == (None, "undetermined")
    assert value.alternatives == [
        '9 if [ "$BIG" = 1 ] (line 4)',
        '8 unless [ "$BIG" = 1 ] (line 4)',
        "give it with --set BIG=VALUE",
    ]
    assert values(checked(script, text, BIG="1"))["max_prompt_length"] == 9


BRANCHES = """\
case $SIZE in
  small) N=0 ;;
  middle) N=1 ;;
  *) N=2 ;;
esac
if [ "$DEBUG" = 1 ]; then D=1; else D=0; fi
if [ "$FAST" = 1 ]; then F=1; else F=0; fi
"""


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("$N = 1", " (if $SIZE is middle (line 3))"),
        ("$D = 1", ' (if [ "$DEBUG" = 1 ] (line 6))'),
        ("$D = 0", ' (unless [ "$DEBUG" = 1 ] (line 6))'),
        (
            "$N$D$F = 011",
            ' (if $SIZE is small (line 2), if [ "$DEBUG" = 1 ] (line 6), if [ "$FAST" '
            "= 1 ] (line 7))",
        ),
        (
            "$D$F = 11",
            ' (if $SIZE is small (line 2), if [ "$DEBUG" = 1 ] (line 6), if [ "$FAST" '
            "= 1 ] (line 7); or unless $SIZE is small (line 2), if $SIZE is middle "
            '(line 3), if [ "$DEBUG" = 1 ] (line 6), if [ "$FAST" = 1 ] (line 7); or '
            "unless $SIZE is small (line 2), unless $SIZE is middle (line 3), if [ "
            '"$DEBUG" = 1 ] (line 6), if [ "$FAST" = 1 ] (line 7))',
        ),
        ("$N != 9", ""),
    ],
)
def test_a_fault_of_some_branches_is_told_once_with_their_names(
    test: str, said: str, script: Path
) -> None:
    text = f"{BRANCHES}K=data.seed\nif [ {test} ]; then K=data.zeed; fi\n{START} $K=1\n"
    told = [f for f in checked(script, text).findings if "zeed" in f.message]
    assert [f.level for f in told] == ["warning" if said else "error"]
    assert told[0].message.endswith("'data.image_key'?" + said)


def test_of_many_branches_three_are_named(script: Path) -> None:
    text = (
        f"{BRANCHES}K=data.zeed\nif [ $D$F = 11 ]; then K=data.seed; fi\n{START} $K=1\n"
    )
    told = [f for f in checked(script, text).findings if "zeed" in f.message]
    assert told[0].message.count("; or ") == 3
    assert told[0].message.endswith("; or 6 more paths)")


def test_a_value_from_outside_says_which_variable(script: Path) -> None:
    text = SCRIPT.replace("${MODEL:-Qwen/Qwen3-8B}", "$STUDENT")
    value = checked(script, text).values["student"]
    assert value.source == "undetermined"
    assert value.alternatives == ["give it with --set STUDENT=VALUE"]


@pytest.mark.parametrize(
    ("argument", "level", "says"),
    [
        (
            "data.max_promt_length=8",
            "error",
            "no key data.max_promt_length; did you mean 'data.max_prompt_length'",
        ),
        (
            "+data.max_promt_length=8",
            "warning",
            "it is added, and nothing in verl reads it. Did you mean "
            "data.max_prompt_length?",
        ),
        (
            "+actor_rollout_ref.ref.model.path=teacher",
            "error",
            "give it as distillation.teacher_models.teacher_model.model_path",
        ),
        (
            "distillation.teacher_models.second.model_path=m",
            "error",
            "added with a +: +distillation.teacher_models.second.model_path=",
        ),
        (
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "error",
            "it is one of model_engine=megatron, and this job's is another",
        ),
        (
            "actor_rollout_ref.actor.model_engine=megatron",
            "error",
            "did you mean 'model_engine'?",
        ),
    ],
)
def test_a_key_that_the_release_does_not_have(
    argument: str, level: str, says: str, script: Path
) -> None:
    text = SCRIPT.replace(
        "  distillation.enabled=True", f"  {argument}\n  distillation.enabled=True"
    )
    finding, *_ = errors(checked(script, text))
    assert (finding.cause, finding.level, finding.line) == (
        "config.unknown-option",
        level,
        23,
    )
    assert says in finding.message


@pytest.mark.parametrize(
    "argument",
    [
        "+data.my_own_key=1",
        "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_x=1",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=0",
        "hydra.run.dir=x",
        "--config-name=ppo_megatron_trainer",
        "model_engine=megatron",
        "~data.prompt_key",
        "actor@actor_rollout_ref.actor=megatron_actor actor_rollout_ref.actor.x.tp=2",
    ],
)
def test_a_key_that_may_be_read_is_no_fault(argument: str, script: Path) -> None:
    assert not errors(checked(script, SCRIPT, *argument.split()))


@pytest.mark.parametrize("sign", ["", "+"])
def test_a_key_of_another_release_says_which(script: Path, sign: str) -> None:
    script.write_text(f"{START} {sign}actor_rollout_ref.rollout.skip.enable=True\n")
    told = errors if not sign else (lambda one: one.findings)
    (gone,) = told(check.check(script, framework="verl==0.9.1"))
    assert gone.message.endswith("; verl 0.8.0 had it")
    assert not check.check(script, framework="verl==0.8.0").findings or sign
    script.write_text(f"{START} skip.rollout.enable=True\n")
    (new,) = errors(check.check(script, framework="verl==0.8.0"))
    assert new.message.endswith("; verl 0.9.0 has it")


def test_a_file_for_a_section_may_be_in_a_verl_of_their_own(script: Path) -> None:
    words = "actor@actor_rollout_ref.actor=mine actor_rollout_ref.actor.engine.tp=2"
    (finding,) = errors(checked(script, SCRIPT, *words.split()))
    assert finding.level == "warning"
    assert "ppo_trainer is to take actor/mine.yaml" in finding.message


def test_the_engines_own_keys_count(script: Path) -> None:
    key = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    assert errors(checked(script, SCRIPT, key))
    assert not errors(checked(script, SCRIPT, key, "model_engine=megatron"))
    assert not errors(
        checked(script, SCRIPT, key, "--config-name=ppo_megatron_trainer")
    )


def test_keys_of_an_engine_that_is_not_recorded_are_not_judged(script: Path) -> None:
    found = checked(script, SCRIPT, "model_engine=mine", "actor_rollout_ref.x.y=1")
    assert [(f.level, f.key) for f in found.findings] == [("note", "")]
    found = checked(script, SCRIPT, "model_engine=megatorn")
    assert found.findings[0].message.endswith("; did you mean 'megatron'?")


LOST = f"{START} \\\n  data.a=1 \\\n"
LAST = "  data.b=2\n"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (LOST.replace("1 \\", "1 \\ ") + LAST, 3, "at the blank after the backslash"),
        (LOST + "  # a note\n" + LAST, 4, "at the comment in the line before"),
        (LOST.replace("1 \\", "1") + LAST, 3, "has no backslash at its end"),
        (LOST + "\n" + LAST, 4, "at the empty line before"),
        (LOST.replace("1 \\", "1 \\ # x") + LAST, 3, "comment after the backslash"),
        (LOST.replace("\n", "\r\n") + LAST, 1, "dos2unix"),
    ],
    ids=["blank", "comment", "no backslash", "empty", "after", "Windows"],
)
def test_what_bash_never_gives_to_the_command_is_named(
    text: str, line: int, says: str, script: Path
) -> None:
    found = checked(script, text).findings
    lost = [f for f in found if f.cause == "config.missing-value"]
    assert [(f.line, says in f.message) for f in lost] == [(line, True)]


def test_a_comment_in_an_array_and_a_text_in_a_document_lose_nothing(
    script: Path,
) -> None:
    text = SCRIPT.replace("DATA=(", "DATA=( \\\n  # what it reads")
    text += "cat <<EOF\nrun \\\n# a\n  data.x=1\nEOF\n"
    assert not checked(script, text).findings


@pytest.mark.parametrize(
    ("lines", "arguments", "names"),
    [
        ("", '"data.train_batch_size=$X"', ["train_batch_size"]),
        ("", '"data.train_batch_size"=$X', ["train_batch_size"]),
        ('L=("data.train_batch_size=$X")', '"${L[@]}"', ["train_batch_size"]),
        ('A="trainer.nnodes=2 data.train_batch_size=$X"', "$A", ["train_batch_size"]),
        (
            'if [ "$BIG" = 1 ]; then N=4; else N=1; fi',
            "trainer.nnodes=$N",
            ["nodes", "trainer_gpus", "rollout_gpus", "total_gpus"],
        ),
        (
            "",
            "actor_rollout_ref.rollout.nnodes=$G",
            ["rollout_gpus", "total_gpus", "placement"],
        ),
        ("", "distillation.enabled=$D", ["teacher_gpus", "total_gpus"]),
        (
            'if [ "$X" ]; then f() { T=1; }; else f() { T=2; }; fi; f',
            "trainer.nnodes=$T",
            ["nodes"],
        ),
        ("", "~trainer.nnodes", ["nodes", "trainer_gpus"]),
        ("", "trainer.nnodes=True", ["trainer_gpus", "total_gpus"]),
        ("", "trainer.nnodes='${oc.env:N}'", ["nodes"]),
        ("", "--config-name=mine", ["max_prompt_length", "nodes"]),
        ("", "--config-name=$C", ["nodes"]),
        ("", "model_engine=$E", ["nodes"]),
        ("while read -r N; do T=$N; done < f", "trainer.nnodes=$T", ["nodes"]),
        ("T=1; for i in $LIST; do T=$i; done", "trainer.nnodes=$T", ["nodes"]),
        ("T=1; let T=5", "trainer.nnodes=$T", ["nodes"]),
        ("T=1; printf -v T 5", "trainer.nnodes=$T", ["nodes"]),
        ("declare -i T=1+1", "trainer.nnodes=$T", ["nodes"]),
        ("A=([2]=x [0]=1)", "trainer.nnodes=${A[0]}", ["nodes"]),
        ("", "trainer.nnodes=${SHLVL:-8}", ["nodes"]),
        ("A='1*'; [[ 1x == 1\"*\" ]] && T=1 || T=2", "trainer.nnodes=$T", ["nodes"]),
        ("T=1; [ -n $NONE ] && T=2", "trainer.nnodes=$T", ["nodes"]),
        ('P="it\'s"', 'data.prompt_key="${P//\\\'/q}"', ["prompt_column"]),
        ("case a in a) T=1 ;& b) T=2 ;; esac", "trainer.nnodes=$T", ["nodes"]),
        ("N=4; L=$((-1 + N))", "trainer.nnodes=$L", ["nodes", "total_gpus"]),
        ('k=N; N=1; declare "$k=4"', "trainer.nnodes=$N", ["nodes"]),
        ("N=1; while read N; do :; done < f", "trainer.nnodes=$N", ["nodes"]),
        ("i=0; while ((i++<3)); do :; done", "trainer.nnodes=$i", ["nodes"]),
        ("", 'data.train_files=${F:-"/my data/x"}', ["train_files"]),
        ("A=(2 4)", 'trainer.nnodes="${A[@]}"', ["nodes"]),
        ("", "trainer.nnodes={01..03}", ["nodes"]),
        ("select N in 1 2; do break; done", "trainer.nnodes=$N", ["nodes"]),
        (
            "X=$(cat <<EOF | tr a b\nabc\nEOF\n)",
            "data.prompt_key=$X",
            ["prompt_column"],
        ),
        (
            "T=${T:-$(((a + b) * 2))}",
            "data.train_batch_size=$T",
            ["train_batch_size"],
        ),
        ("x=$((1 + (T++)))", "trainer.nnodes=$T", ["nodes"]),
    ],
)
def test_what_is_not_certain_is_never_told_as_certain(
    lines: str, arguments: str, names: list[str], script: Path
) -> None:
    found = checked(script, f"{lines}\n{START} {arguments}\n")
    sources = {name: found.values[name].source for name in names}
    assert sources == dict.fromkeys(names, "undetermined")
    assert all(found.values[name].alternatives for name in names)


def test_of_a_script_that_is_not_followed_to_its_end_nothing_is_certain(
    script: Path,
) -> None:
    found = checked(script, f"for i in {'1 ' * 300}; do run $i; done\n{SCRIPT}")
    assert {value.source for value in found.values.values()} == {"undetermined"}
    assert found.values["student"].alternatives == [
        "the script was not followed to its end"
    ]


def test_an_argument_that_may_be_any_option_is_named(script: Path) -> None:
    found = checked(
        script,
        f"{START} $EXTRA trainer.nnodes=2\n",
    )
    assert found.values["nodes"].value == 2
    (note,) = found.findings
    assert note.message == "what $EXTRA adds or changes is not known: EXTRA"


def test_the_second_job_of_a_script_is_not_the_first(script: Path) -> None:
    start = f"{START} trainer.nnodes"
    found = checked(script, f"{start}=2\n{start}=4\n")
    assert values(found)["nodes"] == 2
    assert [f.message for f in found.findings] == [
        "another job, started on line 2, is not checked"
    ]


@pytest.mark.parametrize(
    "job",
    [
        "python -m verl.trainer.main_ppo data.train_files={file}",
        "python -m verl.trainer.main_ppo data.train_files=[{file},{here}]",
        "swift sft --model M --dataset {file}#100",
        "python train.py --load L --rollout-num-gpus 2 --prompt-data {file}@[0:8]",
    ],
)
def test_a_train_file_that_is_not_here_is_noted(tmp_path: Path, job: str) -> None:
    here, absent = tmp_path / "here.jsonl", tmp_path / "absent.jsonl"
    here.touch()
    path, told = tmp_path / "run.sh", f"{absent}: there is no such file here"
    path.write_text(job.format(file=absent, here=here))
    found = check.check(path)
    assert [f.level for f in found.findings if f.message == told] == ["note"]
    path.write_text(job.format(file=here, here=here))
    assert "no such file" not in str(check.check(path).findings)


def test_a_file_that_is_only_copied_is_no_job(script: Path) -> None:
    text = f"cp verl/trainer/main_ppo.py /bak/\nE=; X=$($E && pwd)\n{SCRIPT}"
    assert values(checked(script, text))["student"] == "Qwen/Qwen3-8B"


def test_a_script_that_waits_for_a_server_starts_its_job(script: Path) -> None:
    wait = "while true; do curl x && break; sleep 1; done\n"
    found = checked(
        script,
        wait + f"{START} trainer.nnodes=2\n",
    )
    assert values(found)["nodes"] == 2


def test_a_job_that_is_not_reached_says_where_reading_ended(script: Path) -> None:
    with pytest.raises(CheckError, match="found were run; line 1: which file is"):
        checked(script, 'source "$WHERE"\nrun\n')


def test_whole_commands_lose_nothing(script: Path) -> None:
    text = LOST + "  data.b=2\n# a note\npython3 -m other a \\\n  --b\n"
    causes = {finding.cause for finding in checked(script, text).findings}
    assert causes == {"config.unknown-option"}


def bad_file(path: Path, kind: str) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "binary":
        path.write_bytes(b"\x7fELF\0\0")
    elif kind == "python":
        path.write_text("#!/usr/bin/env python3\nprint(1)\n")
    elif kind == "large":
        path.write_bytes(b"#\n" * (3 << 20))
    elif kind == "other":
        path.write_text("python -c 1\n")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "does not exist"),
        ("directory", "is a directory"),
        ("FIFO", "is not a regular file"),
        ("binary", "NUL bytes"),
        ("python", "its first line is #!/usr/bin/env python3"),
        ("large", "6.3 MB, and a job's file is read up to 128 KiB"),
        ("other", "no command was found that starts verl"),
        ("other", "; found were python"),
    ],
)
def test_what_is_no_job_is_refused_by_name(kind: str, says: str, script: Path) -> None:
    bad_file(script, kind)
    with pytest.raises(CheckError, match=str(script)) as caught:
        check.check(script, framework=RELEASE)
    assert says in str(caught.value)


@pytest.mark.parametrize("line", ['"${LATER[@]}"', '"trainer.nnodes=2"'])
def test_an_array_that_bash_takes_for_a_command_is_lost(
    line: str, script: Path
) -> None:
    text = f"LATER=(trainer.nnodes=2)\n{START} \\\n  data.seed=1\n  {line}\n"
    found = checked(script, text)
    (finding,) = [one for one in found.findings if one.line == 4]
    assert finding.level == "error"
    assert "bash takes this line for a command of its own" in finding.message
    assert found.values["nodes"].value == 1


def test_arguments_that_reach_no_job_are_told(script: Path) -> None:
    found = checked(script, f"{START}\n", "trainer.nnodes=2")
    (finding,) = errors(found)
    assert "does not pass its own arguments on" in finding.message
    assert not errors(checked(script, f'{START} "$@"\n', "trainer.nnodes=2"))
    started = f"torchrun --nproc_per_node=$1 -m {START.partition('-m ')[2]}\n"
    assert not errors(checked(script, started, "8"))


def test_another_program_of_the_framework_is_no_job(script: Path) -> None:
    script.write_text("torchrun -m verl.trainer.main_eval data.train_batch_size=8\n")
    with pytest.raises(CheckError, match="no command was found that starts verl") as e:
        check.check(script, framework=RELEASE)
    says = "verl.trainer.main_eval is none of the programs that are read"
    assert says in str(e.value)


def test_a_module_of_ones_own_is_not_said_to_be_the_frameworks(script: Path) -> None:
    script.write_text("python -m my.verl.trainer\n")
    with pytest.raises(CheckError) as caught:
        check.check(script)
    assert "none of the programs" not in str(caught.value)


def test_a_release_that_is_not_recorded_is_refused(script: Path) -> None:
    script.write_text(SCRIPT)
    with pytest.raises(CheckError, match=r"0\.1 is neither .* 0\.8\.0"):
        check.check(script, framework="verl==0.1")


def gkd(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest_gkd", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_answers_in_text_and_in_json(script: Path) -> None:
    script.write_text(SCRIPT)
    done = gkd(str(script), "--framework=verl==0.9.0", "--set", "MODEL=m")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "verl 0.9.0 (--framework), started on line 31"
    assert any(line.split() == ["student", "m", "line", "17"] for line in lines)
    assert lines[-1] == "no error found"
    done = gkd(str(script), "data.x=1", "--format=json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert (told["schema"], told["framework"]) == (1, "verl")
    assert told["values"]["teacher"]["value"] == "Qwen/Qwen3-32B"
    assert told["findings"][0]["key"] == "data.x"


@pytest.mark.parametrize(
    "text",
    [
        "a && " * 3000 + "b",
        "{ " * 3000 + "}" * 3000,
        "if a; then " * 2000 + "b" + "; fi" * 2000,
        "run " + "$(" * 3000 + ")" * 3000,
        "run ${A:-" * 2000 + "}" * 2000,
        "run $((" + "1+" * 5000 + "1))",
        "source /dev/zero",
        "X=(" + "a " * 50_000 + ")\n" + 'X+=("${X[@]}")\n' * 12,
        "a \\\n#\n" * 20_000,
        "shift ²\nrun ${A[²]} $(seq ²)",
    ],
    ids=[
        "and",
        "braces",
        "if",
        "substitution",
        "default",
        "sum",
        "zero",
        "array",
        "comments",
        "digits",
    ],
)
def test_a_hostile_script_is_refused_or_read(text: str, script: Path) -> None:
    with pytest.raises(CheckError, match=r"nested deeper|no command was found"):
        checked(script, text + "\n")


def test_a_sourced_pipe_is_not_waited_for(script: Path) -> None:
    os.mkfifo(script.parent / "pipe")
    found = checked(script, f"source {script.parent}/pipe\n{SCRIPT}")
    assert "is sourced and not read" in found.findings[0].message


@pytest.mark.parametrize("value", ["1e999", "1_024", "1__024"])
def test_odd_values_are_read_as_hydra_would(value: str, script: Path) -> None:
    found = checked(script, SCRIPT, f"data.train_batch_size={value}")
    batch = found.values["train_batch_size"]
    assert (batch.value, batch.source) == (1024 if value == "1_024" else value, "user")
    json.loads(json.dumps(found.to_json(), allow_nan=False))


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000, "'" * 3001, "{a:" * 3000])
def test_a_hostile_value_is_refused_as_hydra_does(value: str, script: Path) -> None:
    found = checked(script, SCRIPT, f"data.train_batch_size={value}")
    assert found.values["train_batch_size"].source == "undetermined"
    (finding,) = errors(found)
    assert (finding.key, finding.level) == ("data.train_batch_size", "error")


def test_a_mapping_for_a_section_gives_its_keys(script: Path) -> None:
    found = checked(script, f"{START} 'trainer={{nnodes: 2, n_gpus_per_node: 4}}'\n")
    assert (values(found)["trainer_gpus"], found.values["nodes"].line) == (8, 1)
    assert not errors(checked(script, f"{START} '+trainer={{nnodes: 2}}'\n"))
    (finding, *_) = errors(
        checked(script, f"{START} '+data={{max_promt_length: 8}}'\n")
    )
    assert "Did you mean data.max_prompt_length?" in finding.message


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.sh"], "nowhere.sh does not exist"),
        (["run.sh", "--set", "A"], "--set=A: expected NAME=VALUE"),
        (["run.sh", "--framework=x==1"], "--framework=x==1: known frameworks are verl"),
    ],
)
def test_a_wrong_call_is_told_and_is_2(arguments: list[str], says: str) -> None:
    done = gkd(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_script_says_is_escaped(script: Path) -> None:
    script.write_text(SCRIPT.replace("Qwen/Qwen3-8B", "\x1b]0;x\x07\\n::error::"))
    done = gkd(str(script))
    assert "\x1b" not in done.stdout
    assert not any(line.startswith("::") for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ("trainer.nnodes=3 --set X=1", 3),
        ("--set X=1 trainer.nnodes=3", 3),
        ("--set X=1 trainer.nnodes=3 --format=json trainer.nnodes=4", 4),
        ("--set X=1 -- trainer.nnodes=5", 5),
    ],
)
def test_arguments_may_stand_behind_options(
    words: str, counts: int, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text('python3 -m verl.trainer.main_ppo a=$X "$@"\n')
    __main__.main(["check", "--format=json", str(script), *words.split()])
    assert json.loads(capsys.readouterr().out)["values"]["nodes"]["value"] == counts


@pytest.mark.parametrize("words", ["--set X=1 a=b --bad", "--set X=1 --bad -- a=b"])
def test_options_that_there_are_not_are_refused(words: str, script: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["check", str(script), *words.split()])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a=${NODES:-2}", "does not read NODE; did you mean 'NODES'?"),
        ("a=$NODE", ""),
        ("a=$(( NODE + 1 ))", ""),
        ("a=$NODES\n. ./other.sh", ""),
    ],
)
def test_a_variable_that_nothing_reads_is_told(
    text: str, says: str, script: Path
) -> None:
    (script.parent / "other.sh").write_text("true\n")
    script.write_text(f"python3 -m verl.trainer.main_ppo {text}\n")
    found = check.check(script, [], "verl", {"NODE": "3"}).findings
    told = [f.message for f in found if f.message.startswith("--set")]
    assert [says in one for one in told] == ([True] if says else [])


@pytest.mark.parametrize(
    ("start", "truncation"),
    [
        ("accelerate launch examples/scripts/gkd.py --lmbda 1", "left"),
        ("trl grpo --model_name_or_path m", "keep"),
        ("python -m skyrl.train.entrypoints.main_base trainer.epochs=1", "drop"),
    ],
)
def test_rows_that_are_too_long_have_a_fate(
    start: str, truncation: str | None, script: Path
) -> None:
    script.write_text(f"{start}\n")
    given = check.check(script).values.get("truncation")
    assert (given and given.value) == truncation


def test_a_value_that_is_still_to_be_given_is_told_in_words(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo\n")
    text = check.text(check.check(script, (), RELEASE))
    (told,) = (line.split() for line in text.splitlines() if "rollout_engine" in line)
    assert told == ["rollout_engine", "must", "be", "given", "default"]
    assert "???" not in text


def test_a_file_beside_the_script_is_told_by_its_name(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo --config-path=conf --config-name=mine\n"
    )
    for place in (tmp_path / "conf", tmp_path):
        place.mkdir(exist_ok=True)
        lines = "defaults: [ppo_trainer, _self_]\ndata: {max_prompt_length: 9}\n"
        (place / "mine.yaml").write_text(lines)
    text = check.text(check.check(script, (), RELEASE))
    assert f"{tmp_path}/conf/mine.yaml:2" in text
    beside = script.read_text().replace("--config-path=conf", "--config-path=.")
    script.write_text(beside)
    text = check.text(check.check(script, (), RELEASE))
    assert " mine.yaml:2" in text
    assert str(tmp_path / "mine.yaml") not in text
