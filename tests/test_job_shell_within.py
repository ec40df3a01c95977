"""Scripts within commands: read as the job that they start, and never run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_gkd.job import check, shell
from pytest_gkd.job.check import Checked
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.shell_values import Command

START = "python3 -m verl.trainer.main_ppo data.train_batch_size="


def commands(path: Path, text: str) -> list[Command]:
    script = path / "run.sh"
    script.write_text(text)
    (world,) = shell.read(script, {}).worlds
    return list(world.commands)


def checked(path: Path, text: str) -> Checked:
    script = path / "run.sh"
    script.write_text(text)
    return check.check(script, framework="verl==0.9.1")


@pytest.mark.parametrize(
    "before",
    [
        "bash -c",
        "srun --nodes=2 bash -c",
        "srun --container-image=x bash -lc",
        "sudo -E /bin/bash -x -o pipefail -c",
        "ray job submit --address=x -- bash -c",
        "singularity exec --nv image.sif bash -c",
        "apptainer exec image.sif sh -ec",
        "docker run --rm --gpus all image bash -c",
        "docker exec name bash -c",
        "timeout 3h nohup bash -c",
        "ssh -p 22 -o A=b host",
        "ssh user@host bash -c",
        "sbatch -N 2 --wrap",
    ],
)
@pytest.mark.parametrize("quote", ["'", '"'])
def test_the_command_within_is_the_job(before: str, quote: str, tmp_path: Path) -> None:
    text = f"set -e\n{before} {quote}cd /x && \n  {START}7 \\\n data.seed=8{quote}\n"
    found = checked(tmp_path, text)
    assert found.values["train_batch_size"].value == 7
    assert found.values["train_batch_size"].line == 3
    assert found.lines == [3]


def test_lines_that_quotes_join_have_their_own_numbers(tmp_path: Path) -> None:
    text = (
        f'bash -c "true; \\\\\n\\\n {START}7 \\\n data.max_prompt_length=64 '
        "\\\n  data.prompt_key='a\nb' \\\n data.max_response_length=3\"\n"
    )
    found = checked(tmp_path, text)
    lines = {name: value.line for name, value in found.values.items()}
    assert lines["train_batch_size"] == 3
    assert lines["max_prompt_length"] == 4
    assert lines["max_response_length"] == 7


@pytest.mark.parametrize(
    "before",
    ["bash", "bash -s", "sbatch", "sbatch --nodes=2", "ssh host", "ssh host bash -s"],
)
@pytest.mark.parametrize("end", ["EOF", "'EOF'"])
def test_a_script_that_is_fed_is_the_job(before: str, end: str, tmp_path: Path) -> None:
    text = f"{before} <<{end}\n#!/bin/bash\n{START}7 \\\n data.seed=8\nEOF\nls\n"
    found = checked(tmp_path, text)
    assert found.values["train_batch_size"].value == 7
    assert found.lines == [3]


def test_the_host_of_ssh_is_behind_its_options(tmp_path: Path) -> None:
    (_, within) = commands(tmp_path, "ssh -p 22 -tt -o A=b host 'train x'")
    assert [word.text.value for word in within.words] == ["train", "x"]


def test_a_file_that_is_given_is_not_what_is_fed(tmp_path: Path) -> None:
    for before in ("bash other.sh", "sbatch other.sh", "cat", "ssh host cat"):
        found = commands(tmp_path, f"{before} <<EOF\n{START}7\nEOF\n")
        assert len(found) == 1


def test_a_variable_is_whose_shell_expands_it(tmp_path: Path) -> None:
    text = (
        "A=1; export B=2\n"
        f'bash -c "{START}$A data.seed=\\$B"\n'
        f"bash -c '{START}$A data.seed=$B'\n"
        f"ssh host '{START}$B'\n"
        f"bash -c 'shift; {START}$1 $0' zero one two\n"
    )
    found = [c for c in commands(tmp_path, text) if c.words[0].text.value == "python3"]
    first, second, third, fourth = ([w.text for w in one.words[3:]] for one in found)
    assert [one.value for one in first] == [
        "data.train_batch_size=1",
        "data.seed=2",
    ]
    assert second[0].needs == {"A"}
    assert second[1].value == "data.seed=2"
    assert third[0].needs == {"B"}
    assert fourth[0].value == "data.train_batch_size=two"


def test_what_is_not_certain_stays_so_within(tmp_path: Path) -> None:
    text = f"bash -c \"{START}$N data.path='$M/x'; if [ '$N' = 3 ]; then echo; fi\"\n"
    script = tmp_path / "run.sh"
    script.write_text(text)
    worlds = shell.read(script, {}).worlds
    words = worlds[0].commands[-1].words
    assert [bool(word.text.needs) for word in words] == [False] * 3 + [True] * 2
    assert words[4].text.needs == {"N", "M"}
    read = shell.read(script, {"N": "3", "M": "m"}).worlds[0].commands[-1]
    assert [word.text.value for word in read.words[3:]] == [
        "data.train_batch_size=3",
        "data.path=m/x",
    ]


def test_a_variable_holds_the_script_of_its_own_lines(tmp_path: Path) -> None:
    text = f'run="true\n{START}7"\nls\nsrun bash -c "$run"\n'
    found = checked(tmp_path, text)
    assert found.lines == [2]


def test_what_is_set_within_stays_within(tmp_path: Path) -> None:
    text = f"export A=1\nbash -c 'A=2; cd /x; exit; ls'\n{START}$A\n"
    found = commands(tmp_path, text)
    assert [one.words[0].text.value for one in found] == ["bash", "python3"]
    assert found[1].words[3].text.value == "data.train_batch_size=1"


def test_a_job_that_is_submitted_to_ray_is_one_within(tmp_path: Path) -> None:
    text = (
        "export NCCL_DEBUG=WARN\nray job submit "
        '--runtime-env-json=\'{"env_vars": {"VLLM_USE_V1": 1}}\' '
        f"-- bash -c '{START}7 trainer.nnodes=$N'\n"
    )
    found = checked(tmp_path, text)
    told = [one.message for one in found.findings]
    assert any("VLLM_USE_V1=1 in env_vars is not a string" in text for text in told)
    assert any("NCCL_DEBUG will not reach the workers" in text for text in told)


def test_nothing_within_is_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    lines = []
    for before in ("bash -c", "srun bash -c", "ssh localhost", "sbatch --wrap"):
        lines += [
            f"{before} 'touch {canary}; $(touch {canary}); `touch {canary}`'",
            f'{before} "touch {canary}; \\$(touch {canary}); $(touch {canary})"',
            f"{before} 'eval touch {canary}; source /dev/stdin'",
        ]
    lines += [f"bash <<EOF\ntouch {canary}\n\\$(touch {canary})\nEOF", START + "7"]
    assert checked(tmp_path, "\n".join(lines)).lines
    assert not canary.exists()


def test_scripts_in_scripts_end(tmp_path: Path) -> None:
    text = f"{START}7"
    for _ in range(8):
        text = "bash -c " + "'" + text.replace("'", "'\\''") + "'"
    assert checked(tmp_path, text).values["train_batch_size"].value == 7
    text = f'export A=\'bash -c "$A"; bash -c "$A"\'\nbash -c "$A"\n{START}7\n'
    with pytest.raises(CheckError, match="nested too deep"):
        checked(tmp_path, text)


# -- files ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [
        "bash",
        "srun bash",
        "srun --nodes=2 --export=ALL bash -x",
        "sbatch",
        "sbatch -N 2 --time 4:00:00 --exclusive",
        "exec bash -eu -o pipefail",
        "docker run --rm --gpus all image bash",
        "singularity exec --nv image.sif bash",
        "ray job submit --address=x -- bash",
        "timeout 3h srun",
        "",
    ],
)
def test_a_file_that_a_shell_is_given_is_the_job(before: str, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"N=$1\n{START}$N \\\n data.seed=$2\n")
    found = checked(
        tmp_path, f"cd {tmp_path}\n\n{before} ./train.sh 7 8 2>&1 | tee log"
    )
    value = found.values["train_batch_size"]
    assert (value.value, value.file) == (7, str(tmp_path / "train.sh"))
    assert found.started_in == str(tmp_path / "train.sh")
    assert found.lines == [2]
    assert f"line 2 of {tmp_path}/train.sh" in check.text(found)


def test_a_file_finds_what_is_exported(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"{START}$A data.seed=$B data.path=$C\n")
    names = {
        "bash": ("", "2", ""),
        "C=3 srun bash": ("", "2", "3"),
        "sbatch --export=ALL,C=3": ("", "2", "3"),
        "sbatch --export=C=3": ("", "", "3"),
        "docker exec name bash": ("", "", ""),
    }
    for before, expected in names.items():
        text = f"cd {tmp_path}\nA=1; export B=2\n{before} train.sh\n"
        words = commands(tmp_path, text)[-1].words[3:]
        values = tuple((w.text.value or "").partition("=")[2] for w in words)
        assert values == expected, before


def test_a_file_knows_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(
        f"cd $(dirname $0)\n{START}1 a=$0 b=${{BASH_SOURCE[0]}}\n"
    )
    name = tmp_path / "train.sh"
    for before, sure in (("bash", True), ("srun", True), ("sbatch", False)):
        words = commands(tmp_path, f"{before} {name}; ls $0")[1].words[-2:]
        said = [word.text.value for word in words]
        # Slurm runs a copy in a folder of its own.
        assert said == ([f"a={name}", f"b={name}"] if sure else [None, None])


def test_a_file_that_submits_itself_is_read_once(tmp_path: Path) -> None:
    text = f'if [ -z "$SLURM_JOB_ID" ]; then sbatch "$0"; exit; fi\n{START}7\n'
    found = checked(tmp_path, text)
    assert found.values["train_batch_size"].value == 7
    assert not [one for one in found.findings if "sbatch" in one.message]
    assert len(shell.read(tmp_path / "run.sh", {}).worlds) == 2
    text = f'if [ "$1" != in ]; then srun bash "$0" in; exit; fi\n{START}7\n'
    found = checked(tmp_path, text)
    assert found.values["train_batch_size"].value == 7
    assert found.lines == [2]


def test_what_a_file_without_a_job_does_is_its_own(tmp_path: Path) -> None:
    """Its branches and what could not be followed in it say nothing of the job."""
    ways = "".join(f'[ "$A{n}" = 1 ] && export B{n}=1 && apt {n}\n' for n in range(6))
    (tmp_path / "setup.sh").write_text(f"{ways}eval x\nbreak 2\n")
    job = checked(tmp_path, f"cd {tmp_path}\nbash setup.sh\n{START}7\n")
    assert job.values["train_batch_size"].value == 7
    assert not [one for one in job.findings if "setup.sh" in one.file]
    (tmp_path / "setup.sh").write_text("ray start --head\n")
    names = [
        c.words[0].text.value
        for c in commands(tmp_path, f"cd {tmp_path}\nbash setup.sh")
    ]
    assert names == ["bash", "ray"]


@pytest.mark.parametrize(
    "start",
    ["bash <<< '{}'", 'bash -s <<< "{}" > log', 'srun bash <<< "{}"', "sbatch < in.sh",
     "bash < ./in.sh", "echo '{}' | bash", "srun bash -x < in.sh 2>&1 | tee log"],
)  # fmt: skip
def test_what_a_shell_reads_is_the_job(start: str, tmp_path: Path) -> None:
    (tmp_path / "in.sh").write_text(f"{START}7\n")
    found = checked(tmp_path, f"cd {tmp_path}\n" + start.format(f"{START}7"))
    assert found.values["train_batch_size"].value == 7
    assert found.lines == [1 if "in.sh" in start else 2]


@pytest.mark.parametrize(
    "end", ["bash", "ssh host", "sbatch -N 2", "bash -s && ls", "bash > log"]
)
def test_what_cat_shows_to_a_shell_is_the_job(end: str, tmp_path: Path) -> None:
    text = f"N=7\ncat <<EOF | {end}\nset -e\n{START}$N \\\n data.seed=8\nEOF\nls\n"
    found = checked(tmp_path, text)
    assert found.values["train_batch_size"].value == 7
    assert found.lines == [4]
    # What another program makes of it is not known.
    other = text.replace("| ", "| envsubst | ")
    with pytest.raises(CheckError, match="no command was found"):
        checked(tmp_path, other)


def test_a_script_that_is_written_is_not_what_lay_there(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"{START}1\n")
    text = (
        f"cd {tmp_path}\nN=7\ncat > train.sh <<EOF\n{START}$N\nEOF\nsbatch train.sh\n"
    )
    found = checked(tmp_path, text)
    assert found.values["train_batch_size"].value == 7
    assert found.lines == [4]
    for change in (">> train.sh <<EOF", "<<EOF | sed s/7/8/ > train.sh"):
        with pytest.raises(CheckError, match="the script writes it itself"):
            checked(tmp_path, text.replace("> train.sh <<EOF", change))
    text = f"cd {tmp_path}\ngenerate > train.sh\nbash train.sh\n"
    with pytest.raises(CheckError, match="the script writes it itself"):
        checked(tmp_path, text)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text("#!/usr/bin/env python\nimport os\n")
    for name, why in (
        ("none.sh", "none.sh is started and not read: it is not here"),
        ("x.sh", "it is not a bash script"),
        ("$X.sh", "which file is started here is not certain"),
    ):
        with pytest.raises(CheckError, match=why):
            checked(tmp_path, f"cd {tmp_path}\nsrun bash {name}\n")


def test_a_value_that_another_file_hands_on_is_meant_to_count(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f'{START}7 data.seed=1 "$@"\n')
    text = f"cd {tmp_path}\nbash train.sh data.train_batch_size=9\n"
    found = checked(tmp_path, text)
    assert found.values["train_batch_size"].value == 9
    assert not [one for one in found.findings if "given twice" in one.message]


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    evil = f"touch {canary}\n$(touch {canary}) `touch {canary}`\neval touch {canary}\n"
    (tmp_path / "evil.sh").write_text(f"#!/bin/bash\n{evil}{START}7\n")
    (tmp_path / "evil.sh").chmod(0o755)
    starts = f"""cd {tmp_path}
bash evil.sh
srun ./evil.sh
./evil.sh
sbatch evil.sh
bash < evil.sh
bash <(cat evil.sh)
bash <<< '{evil}'
echo '{evil}' | bash
cat <<'E' | bash
{evil}E
"""
    assert checked(tmp_path, starts).lines
    assert not canary.exists()


def test_a_fifo_that_is_given_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.sh")
    with pytest.raises(CheckError, match="it is not here"):
        checked(tmp_path, f"cd {tmp_path}\nbash in.sh; bash < in.sh\n")
