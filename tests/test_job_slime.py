"""``gkd check`` on slime and miles: values, what they refuse, the teacher's server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gkd.job import releases
from pytest_gkd.job.check import Checked, check
from pytest_gkd.job.findings import CheckError, Finding

TEACHER = "CUDA_VISIBLE_DEVICES=7 python3 -m sglang.launch_server --model-path T --tp 1"
OPD = """\
--use-opd --opd-type sglang --rm-url http://127.0.0.1:13141/generate
--custom-rm-path slime.rollout.on_policy_distillation.reward_func
--custom-reward-post-process-path slime.rollout.on_policy_distillation.post
"""
START = """\
MODEL_ARGS=(--num-layers 36 --num-attention-heads 32 --group-query-attention
  --num-query-groups 8)
ray start --head --num-gpus 8
ray job submit --address=http://127.0.0.1:8265 -- python3 train.py \\
  --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 2 \\
  --rollout-batch-size 16 --n-samples-per-prompt 4 --num-rollout 3 \\
  --global-batch-size 64 --tensor-model-parallel-size 2 --load L \\
  --hf-checkpoint Qwen/Qwen3-8B ${MODEL_ARGS[@]} "$@" """


def checked(
    path: Path, more: str = "", before: str = "", framework: str = "slime==0.3.1"
) -> Checked:
    path.write_text(f"{before}\n{START}\n")
    return check(path, more.split(), framework)


def faults(found: Checked) -> list[Finding]:
    return [f for f in found.findings if f.level != "note"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "run.sh"


def test_a_start_that_is_right_has_no_fault(script: Path) -> None:
    found = checked(script, OPD, f"{TEACHER} --port 13141 &")
    assert not faults(found)
    told = {name: value.value for name, value in found.values.items()}
    assert told["total_gpus"] == 4 + 2 + 1
    assert (told["teacher"], told["teacher_server_port"]) == ("T", 13141)
    assert (told["tensor_parallel_size"], told["placement"]) == (1, "split")
    assert (told["dtype"], told["offload_param"]) == ("bfloat16", False)
    assert found.values["train_tensor_parallel_size"].source == "user"
    assert found.values["pipeline_parallel_size"].source == "default"


@pytest.mark.parametrize(
    ("more", "level", "said"),
    [
        ("--use-odp", "warning", "did you mean '--use-opd'"),
        ("--rollout-batch 3", "warning", "no option --rollout-batch"),
        (
            "--use-dynamic-batch-size True",
            "warning",
            "True does not belong to any option",
        ),
        ("--sglang-mem-fraction x", "error", "expects a number"),
        ("--sglang-enable 0.4", "error", "may mean"),
        ("--opd-type vllm", "error", "knows sglang, megatron"),
        ("--lr 1e-6 --lr 1e-5", "warning", "given twice"),
        ("--tensor-model-parallel-size 0", "error", "must be at least 1"),
        ("--rollout-temperature 0", "error", "not above 0"),
        ("--use-opd", "error", "requires --opd-type"),
        ("--use-opd --opd-type megatron", "error", "requires --opd-teacher-load"),
        ("--use-opd --opd-type sglang --opd-teacher-load X", "error", "is refused"),
        ("--opd-teacher-load X", "error", "refused without --use-opd"),
        ("--opd-kl-coef 0.5", "warning", "nothing is distilled"),
        ("--use-opd --opd-type sglang", "error", "nothing queries the teacher"),
        (f"{OPD} --rm-url=", "error", "the teacher's server is not named"),
        (
            "--custom-rm-path a.rollout.on_policy_distillation.reward_func",
            "error",
            "is not a reward",
        ),
        ("--rm-type remote_rm", "error", "has no --rm-url"),
        ("--use-kl-loss", "error", "--ref-load"),
        ("--load=", "error", "no initial weights"),
        ("--eval-interval 5", "error", "requires --eval-prompt-data"),
        ("--eval-prompt-data a b c", "error", "pairs"),
        ("--save-interval 5", "error", "requires --save"),
        ("--kl-coef 0.1 --kl-loss-coef 0.1 --ref-load R", "error", "only one"),
        ("--advantage-estimator reinforce_plus_plus", "error", "normalize"),
        ("--use-tis --use-rollout-logprobs", "error", "are mutually exclusive"),
        ("--get-mismatch-metrics", "error", "--custom-tis-function-path"),
        ("--use-dynamic-batch-size", "error", "--max-tokens-per-gpu"),
        ("--max-tokens-per-gpu 9", "warning", "has no effect"),
        ("--balance-by-flops", "error", "--use-dynamic-batch-size"),
        ("--debug-rollout-only --debug-train-only", "error", "are mutually exclusive"),
        ("--num-steps-per-rollout 2", "error", "--global-batch-size 64 is not"),
        ("--global-batch-size 128", "error", "too few for a step"),
        ("--global-batch-size 48", "warning", "the rest is dropped"),
        ("--over-sampling-batch-size 8", "error", "is below"),
        ("--num-epoch 3", "warning", "has no effect"),
        ("--enable-mtp-training", "error", "--mtp-num-layers"),
        (
            "--rollout-max-context-len 9 --rollout-max-prompt-len 9",
            "error",
            "leaves no room",
        ),
        (
            "--only-train-params-name-list a --freeze-params-name-list b",
            "error",
            "are mutually exclusive",
        ),
        ("--update-weight-transport disk", "error", "--update-weight-disk-dir"),
        ("--update-weight-mode delta", "error", "--update-weight-transport disk"),
        ("--update-weight-mode delta --colocate", "error", "refused with --colocate"),
        ("--update-weight-mode delta", "error", "local-checkpoint-dir"),
        ("--rollout-num-gpus-per-engine 4", "error", "fewer GPUs than"),
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "warning", "is idle"),
        (
            "--rollout-num-gpus-per-engine 2 --sglang-pp-size 3",
            "error",
            "not a multiple",
        ),
        ("--sglang-dp-size 2", "error", "--sglang-enable-dp-attention"),
        ("--sglang-dp-size 2 --sglang-enable-dp-attention", "error", "does not divide"),
        ("--context-parallel-size 4", "error", "no multiple of tensor 2"),
        ("--expert-model-parallel-size 8 --num-experts 8", "error", "expert parallel"),
        ("--expert-model-parallel-size 2", "error", "does not divide --num-experts"),
        ("--num-attention-heads 31", "error", "does not divide --num-attention-heads"),
        ("--num-query-groups 3", "error", "neither divides the other"),
        (
            "--pipeline-model-parallel-size 2 --num-layers 35",
            "error",
            "does not divide",
        ),
        ("--decoder-last-pipeline-num-layers 3", "error", "without pipeline"),
        (
            "--recompute-granularity selective --recompute-method uniform",
            "error",
            "is refused",
        ),
        (
            "--rollout-batch-size 1 --n-samples-per-prompt 1 --global-batch-size 1",
            "error",
            "fewer samples than there are",
        ),
        ("--rollout-num-gpus 8", "warning", "it waits"),
        (
            "--wandb-key 0123456789abcdef0123456789abcdef01234567",
            "warning",
            "whoever can read",
        ),
        ("--prompt-data /not/here.jsonl", "warning", "not on this machine"),
        # Looked at before anything asks whether there is training at all.
        ("--debug-rollout-only --kl-coef 0.1", "error", "--ref-load"),
        ("--num-steps-per-rollout 1 --global-batch-size 48", "error", "48 is not"),
        ("--global-batch-size 65", "error", "too few for a step"),
        ("--colocate --rollout-num-gpus-per-engine 8", "error", "fewer GPUs than"),
        ("--colocate --rollout-num-gpus 16", "warning", "needs 16 GPUs"),
        ("--rollout-num-gpus 5", "warning", "needs 9 GPUs"),
        (
            "--rollout-num-gpus 4 --rollout-num-gpus-per-engine 4 --sglang-pp-size 2 "
            "--sglang-dp-size 4 --sglang-enable-dp-attention",
            "error",
            "does not divide the 4 GPUs",
        ),
        (
            "--expert-model-parallel-size 4 --num-experts 8",
            "error",
            "no multiple of expert parallel 4",
        ),
        (
            "--expert-model-parallel-size 2 --num-experts 5",
            "error",
            "does not divide --num-experts 5",
        ),
        ("--decoder-first-pipeline-num-layers 3", "error", "without pipeline"),
        ("--opd-type megatron", "warning", "nothing is distilled"),
    ],
)
def test_what_is_wrong_is_told(more: str, level: str, said: str, script: Path) -> None:
    found = [f.level for f in faults(checked(script, more)) if said in f.message]
    assert found == [level]


@pytest.mark.parametrize(
    "more",
    [
        "--rollout-temperature 0.1",
        "--use-opd --opd-type megatron --opd-teacher-load X",
        "--use-opd --opd-type sglang --custom-generate-function-path m.f",
        "--use-opd --opd-type sglang --rollout-function-path m.f",
        "--use-kl-loss --ref-load R",
        "--kl-coef 0.1 --ref-load R --load=",
        "--eval-interval 5 --eval-prompt-data a b",
        "--save-interval 5 --save S",
        "--advantage-estimator reinforce_plus_plus --normalize-advantages",
        "--get-mismatch-metrics --custom-tis-function-path m.f --use-tis",
        "--use-dynamic-batch-size --max-tokens-per-gpu 9 --balance-by-flops",
        "--num-steps-per-rollout 2 --global-batch-size 32",
        "--global-batch-size 32",
        "--global-batch-size 2 --rollout-batch-size 1 --n-samples-per-prompt 2",
        "--over-sampling-batch-size 16",
        "--enable-mtp-training --mtp-num-layers 1",
        "--rollout-max-context-len 9 --rollout-max-prompt-len 8",
        "--update-weight-transport disk --update-weight-disk-dir D",
        "--update-weight-mode delta --update-weight-transport disk "
        "--update-weight-disk-dir D --update-weight-local-checkpoint-dir C",
        "--rollout-num-gpus-per-engine 2",
        "--rollout-num-gpus 4 --rollout-num-gpus-per-engine 2",
        "--rollout-num-gpus-per-engine 2 --sglang-pp-size 2",
        "--rollout-num-gpus-per-engine 2 --sglang-dp-size 2 "
        "--sglang-enable-dp-attention",
        "--context-parallel-size 2",
        "--expert-model-parallel-size 2 --num-experts 4",
        "--num-query-groups 1",
        "--num-query-groups 4",
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --num-layers 35 "
        "--decoder-last-pipeline-num-layers 17",
        "--recompute-granularity selective",
        "--debug-rollout-only --context-parallel-size 4",
        "--use-opd --opd-type megatron --opd-teacher-load X "
        "--custom-rm-path m.rollout.on_policy_distillation.reward_func "
        "--custom-reward-post-process-path m.f",
        "--custom-rm-path m.rollout.on_policy_distillation.reward_func "
        "--custom-reward-post-process-path m.f",
        "--use-opd --opd-type sglang --custom-rm-path m.f",
        "--use-opd --opd-type sglang --custom-reward-post-process-path m.f",
        "--rm-type remote_rm --rm-url http://h:1/x",
        "--load= --ref-load R",
        "--load= --pretrained-checkpoint P",
        "--eval-interval 5 --eval-config c.yaml",
        "--eval-config c.yaml --eval-prompt-data a b c",
        "--eval-prompt-data a",
        "--kl-loss-coef 0.1",
        "--kl-coef 0.1 --ref-load R",
        "--use-rollout-logprobs",
        "--num-steps-per-rollout 1",
        "--only-train-params-name-list a",
        "--freeze-params-name-list a",
        "--update-weight-transport disk --update-weight-disk-dir D --colocate",
        # Nothing is trained, so no step is cut out of a rollout.
        "--debug-rollout-only --load=",
        "--debug-rollout-only --global-batch-size 128",
        "--debug-rollout-only --rollout-batch-size 1 --n-samples-per-prompt 1 "
        "--global-batch-size 1",
        "--debug-rollout-only --expert-model-parallel-size 8",
        "--debug-rollout-only --num-attention-heads 31",
        "--debug-rollout-only --num-query-groups 3",
        "--debug-rollout-only --pipeline-model-parallel-size 3 --num-layers 35",
        "--debug-rollout-only --decoder-last-pipeline-num-layers 3",
        "--debug-rollout-only --recompute-granularity selective "
        "--recompute-method uniform",
        # Samples are made by the user's own function then.
        "--custom-convert-samples-to-train-data-path m.f --global-batch-size 128",
        # No engine is started here.
        "--debug-train-only --rollout-num-gpus-per-engine 4",
        "--load-debug-rollout-data D --rollout-num-gpus-per-engine 4",
        "--rollout-external-engine-addrs a:1 --rollout-num-gpus-per-engine 4",
        "--sglang-config c.yaml --rollout-num-gpus-per-engine 4",
        "--debug-train-only --rollout-num-gpus 8",
        "--load-debug-rollout-data D --rollout-num-gpus 8",
        "--colocate",
        "--colocate --rollout-num-gpus 8",
        "--actor-num-nodes 2 --rollout-num-gpus 16",
        "--sglang-enable-dp-attention --sglang-dp-size 1",
        "--rollout-num-gpus 4 --rollout-num-gpus-per-engine 4 --sglang-pp-size 2 "
        "--sglang-dp-size 2 --sglang-enable-dp-attention",
        "--expert-model-parallel-size 4 --num-experts 8 "
        "--expert-tensor-parallel-size 1",
        "--num-experts 7",
        "--recompute-granularity full --recompute-method uniform",
        "--wandb-key $K",
    ],
)
def test_what_is_at_a_bound_is_no_fault(more: str, script: Path) -> None:
    assert faults(checked(script, more)) == []


def test_options_that_stand_in_another_file_are_noted(script: Path) -> None:
    found = checked(script, "--custom-config-path c.yaml").findings
    (note,) = [one for one in found if one.key == "custom_config_path"]
    assert (note.level, "is not read here" in note.message) == ("note", True)


@pytest.mark.parametrize(
    ("framework", "more"),
    [
        ("slime==0.3.0", "--rollout-temperature 0"),
        ("slime==0.3.0", "--load= --megatron-to-hf-mode bridge"),
        ("miles", "--load= --megatron-to-hf-mode bridge"),
    ],
)
def test_what_another_release_takes_is_no_fault_of_it(
    framework: str, more: str, script: Path
) -> None:
    assert not faults(checked(script, more, framework=framework))


@pytest.mark.parametrize(
    ("server", "more"),
    [
        # What listens elsewhere, or where only the run knows.
        (f"{TEACHER} --port 13141 &", "--rm-url http://far:13142/generate"),
        (f"{TEACHER} --port 13141", "--rm-url http://far:13141/generate"),
        (f"{TEACHER} --port $P &", ""),
        ("", ""),
        (
            f"{TEACHER} --port 13141 --context-length 8193 &",
            "--rollout-max-response-len 8192",
        ),
        (f"{TEACHER} --port 13141 --context-length 1 &", ""),
        (f"{TEACHER.replace('=7', '=6')} --port 13141 &", ""),
        (f"{TEACHER.replace('=7', '=5')} --port 13141 &", "--actor-num-nodes 2"),
        (f"{TEACHER.removeprefix('CUDA_VISIBLE_DEVICES=7 ')} --port 13141 &", ""),
    ],
)
def test_a_teacher_that_may_answer_is_no_fault(
    server: str, more: str, script: Path
) -> None:
    url = "--rm-url http://127.0.0.1:13141/generate"
    words = OPD.replace(url, "") if "--rm-url" in more else OPD
    assert not faults(checked(script, f"{words} {more}", server))


@pytest.mark.parametrize(
    ("server", "more", "said"),
    [
        (f"{TEACHER} --port 13142 &", "", "its server listens on 13142"),
        (f"{TEACHER} &", "", "its server listens on 30000"),
        (f"{TEACHER} --port 13141", "", "add & after it"),
        (f"{TEACHER} --port 13141 &", "--rm-url http://127.0.0.1:13141/", "/generate"),
        (
            f"{TEACHER} --port 13141 &",
            "--rm-url http://[::1/generate",
            "not an address",
        ),
        (
            f"{TEACHER} --port 13141 --context-length 4096 &",
            "--rollout-max-response-len 8192",
            "takes 4096 tokens",
        ),
        (
            f"{TEACHER} --port 13141 --context-length 8192 &",
            "--rollout-max-response-len 8192",
            "takes 8192 tokens",
        ),
        (f"{TEACHER.replace('=7', '=5')} --port 13141 &", "", "share 5"),
    ],
)
def test_a_teacher_that_cannot_answer_is_told(
    server: str, more: str, said: str, script: Path
) -> None:
    url = "--rm-url http://127.0.0.1:13141/generate"
    words = OPD.replace(url, "") if "--rm-url" in more else OPD
    (fault,) = faults(checked(script, f"{words} {more}", server))
    assert said in fault.message


def test_a_teacher_of_another_tokenizer_is_told(script: Path) -> None:
    for name in ("student", "teacher"):
        (script.parent / name).mkdir()
        (script.parent / name / "config.json").write_text("{}")
        vocab = {"a": len(name)}
        file = script.parent / name / "tokenizer.json"
        file.write_text(json.dumps({"of": name, "model": {"vocab": vocab}}))
    (script.parent / "teacher/tokenizer.json").write_text('{"model": {"vocab": {}}}')
    server = TEACHER.replace("T ", f"{script.parent}/teacher ")
    more = f"{OPD} --hf-checkpoint {script.parent}/student"
    found = faults(checked(script, more, f"{server} --port 13141 &"))
    assert not found  # a file without a vocabulary tells nothing
    file.write_text('{"model": {"vocab": {"a": 1}}}')
    (fault,) = faults(checked(script, more, f"{server} --port 13141 &"))
    assert "1 of the student's 1 tokens have another id" in fault.message
    file.write_text('{"model": {"vocab": {"a": 7}}}')
    assert not faults(checked(script, more, f"{server} --port 13141 &"))


def test_a_shape_that_is_not_the_checkpoints_is_told(script: Path) -> None:
    config = {"num_hidden_layers": 28, "num_attention_heads": 32}
    (script.parent / "config.json").write_text(json.dumps(config))
    (fault,) = faults(checked(script, f"--hf-checkpoint {script.parent}"))
    assert fault.message.startswith("--num-layers is 36, and num_hidden_layers")
    (script.parent / "config.json").write_text("[" * 9999)
    assert not faults(checked(script, f"--hf-checkpoint {script.parent}"))


def test_train_py_is_slimes_by_its_options_alone(script: Path) -> None:
    script.write_text("python3 train.py --lr 1e-6\n")
    with pytest.raises(CheckError, match="no command was found"):
        check(script)
    assert check(script, framework="slime").framework == "slime"
    script.write_text(START)
    assert check(script).framework == "slime"
    script.write_text(f"{START} --custom-rm-path miles.rollout.x.y\n")
    assert check(script).framework == "miles"


def test_miles_refuses_a_start_without_weights_too(script: Path) -> None:
    (fault,) = faults(checked(script, "--load=", framework="miles"))
    assert "no initial weights" in fault.message


def test_train_async_py_refuses_to_share_gpus(script: Path) -> None:
    script.write_text(START.replace("train.py", "train_async.py"))
    (fault,) = faults(check(script, ["--colocate"]))
    assert "train_async.py refuses --colocate" in fault.message


def test_what_an_option_needs_that_is_not_given_is_told(script: Path) -> None:
    script.write_text("python train.py --actor-num-nodes 1 --colocate --load L\n")
    told = " ".join(fault.message for fault in faults(check(script)))
    assert "refuses a start without --rollout-batch-size" in told
    assert "neither --num-rollout nor --num-epoch" in told
    assert "needs --rollout-num-gpus" not in told
    script.write_text("python train.py --actor-num-nodes 1\n")
    told = " ".join(fault.message for fault in faults(check(script)))
    assert "without --colocate the rollout needs --rollout-num-gpus" in told


def test_miles_refuses_what_slime_passes_over(script: Path) -> None:
    (fault,) = faults(checked(script, "--use-odp", framework="miles"))
    assert (fault.level, fault.key) == ("error", "--use-odp")
    (fault,) = faults(checked(script, "stray", framework="miles"))
    assert fault.level == "error"
    (fault,) = faults(checked(script, "--sglang-of-a-fork 1", framework="miles"))
    assert fault.level == "warning"
    more = "--train-backend fsdp --attn-implementation sdpa"
    assert not faults(checked(script, more, framework="miles"))


def test_words_that_are_not_known_leave_no_default_certain(script: Path) -> None:
    script.write_text(START.replace('"$@"', "$MORE"))
    found = check(script)
    assert found.values["placement"].source == "undetermined"
    script.write_text(START.replace("MODEL_ARGS=", "OTHERS="))
    found = check(script)
    assert found.values["placement"].value == "split"


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_every_recorded_release_reads_a_start(name: str, script: Path) -> None:
    for release in releases.recorded(name):
        found = checked(script, framework=f"{name}=={release}")
        assert not faults(found)
        assert found.values["total_gpus"].value == 6
        assert found.values["pipeline_parallel_size"].value == 1


@pytest.mark.parametrize(
    ("option", "truncation"), [("", "keep"), ("--rollout-max-prompt-len 512", "drop")]
)
def test_prompts_that_are_too_long_are_dropped_where_a_length_is_set(
    option: str, truncation: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"python3 train.py --rollout-batch-size 8 {option}\n")
    found = check(path, framework="slime==0.3.1").values["truncation"]
    assert (found.value, found.source) == (truncation, "user" if option else "default")


def test_an_option_of_another_release_says_which(script: Path) -> None:
    script.write_text(START.replace("train.py", "train.py --megatron-to-hf-mode raw"))
    (gone,) = [f for f in check(script, (), "slime==0.3.1").findings if f.key]
    assert "has no option --megatron-to-hf-mode; slime 0.3.0 had it." in gone.message
    told = check(script, (), "slime==0.3.0").findings
    assert not [f for f in told if f.key == "--megatron-to-hf-mode"]
