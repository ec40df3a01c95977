"""Scripts within commands: read as the job that they start, and never run."""

from __future__ import annotations

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
