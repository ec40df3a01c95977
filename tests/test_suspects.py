"""What is suspected when a run stands still: the files, the signs, the silent ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_gkd.diagnosis import catalogue, silent_ranks, suspects
from pytest_gkd.diagnosis.catalogue import RuleError
from pytest_gkd.diagnosis.log_phases import PHASES

HANGS = suspects.load()
LOGS = Path(__file__).parent / "logs"
# What a reader names as the last sign of each log, written before the patterns, with
# the completed steps that its loop shows.
SIGNS = {
    "actor-init/interrupted-while-nothing-came": "workers-asked",
    "actor-init/stop1": "workers-asked",
    "actor-init/stop2": "weights-read",
    "checkpoint/optimizer-states-on-lustre": "optimizer",
    "checkpoint/stop1": "told",
    "config/model-path-on-a-dead-mount": "resolved",
    "config/stop1": "resolved",
    "data/filter-at-zero": "preparing",
    "data/stop1": "generating",
    "generation/engine-with-requests-makes-no-token": "no-token",
    "generation/stop1": "validation",
    "ray-init/driver-connects-for-ever": "connecting",
    "ray-init/stop1": "up",
    "rollout-init/compile-of-one-worker": "worker-silent",
    "rollout-init/stop1": "weights-loading",
    "rollout-init/stop2": "joined",
    "teacher-init/engine-of-the-teacher": "weights",
    "teacher-init/proxy-never-ready": "proxy-awaited",
    "teacher/answers-are-awaited": "asked",
    "teacher/one-batch-of-many": "generated",
    "training-step/stacks-of-the-first-backward": "begun",
    "training-step/stop1": "generated",
    "weight-sync/after-twelve-steps": "stepped",
    "weight-sync/stop1": "first",
}
STEPS = {
    "checkpoint/optimizer-states-on-lustre": "step 99 of 1250 is done",
    "checkpoint/stop1": "step 20 of 435 is done",
    "generation/stop1": "step 11 of 435 is done",
    "teacher/answers-are-awaited": "step 6 of 300 is done",
    "teacher/one-batch-of-many": "step 6 of 300 is done",
    "training-step/stacks-of-the-first-backward": "no step of 1250 is done",
    "training-step/stop1": "no step of 435 is done",
    "weight-sync/after-twelve-steps": "step 12 of 300 is done",
    "weight-sync/stop1": "no step of 435 is done",
}
AUTOSCALER = "Error: No available node types can fulfill resource request {'GPU': 8.0}."
# The last sign of a text, by phase, where the logs above have none.
TEXTS = [
    ("config", "Retrying in 2s [Retry 3/5].", "hub-retry"),
    ("config", "", "started"),
    ("data", "dataset len: 7473\n", "read"),
    ("data", "dataset len: 7473\nfilter dataset len: 7400\n", "filtered"),
    ("data", "Loading dataset", "begun"),
    ("ray-init", "ray init kwargs: {}", "begun"),
    ("actor-init", "Initializing TorchBackend in DeepSpeed", "group-begun"),
    ("actor-init", "rank 3 nranks 8 cudaDev 3 - Init COMPLETE", "group-formed"),
    ("actor-init", "Model config after override: Qwen2Config {", "weights"),
    ("actor-init", "Loading weights: 100%|##| 26/26", "weights-read"),
    ("actor-init", "Loading weights:   0%|  | 0/26", "weights"),
    ("actor-init", "Actor use_remove_padding=True", "wrapped"),
    ("actor-init", AUTOSCALER, "infeasible"),
    ("actor-init", f"{AUTOSCALER}\nLoading weights: 100%|##| 26/26", "infeasible"),
    ("ray-init", AUTOSCALER, "infeasible"),
    ("teacher-init", AUTOSCALER, "infeasible"),
    ("rollout-init", AUTOSCALER, "placement"),
    ("rollout-init", "INFO No current placement group found.", "placement"),
    (
        "rollout-init",
        "vLLM is using nccl==2.27.3\nLoading weights took 3.24 s",
        "weights-loaded",
    ),
    (
        "rollout-init",
        "Model loading took 1\nDynamo bytecode transform time: 6 s",
        "compiling",
    ),
    (
        "rollout-init",
        "Model loading took 1\nGPU KV cache size: 285,653 tokens",
        "sized",
    ),
    ("rollout-init", "Capturing CUDA graphs (decode, FULL):  31%|██ ", "capturing"),
    ("rollout-init", "Graph capturing finished in 12 secs", "captured"),
    (
        "rollout-init",
        "Server is not up yet. Retrying in 2.0 seconds...",
        "server-awaited",
    ),
    (
        "teacher-init",
        "wait proxy server ready at x\nteacher proxy is ready",
        "proxy-ready",
    ),
    ("weight-sync", "init_process_group rank: 3, world_size: 9", "group-formed"),
    ("weight-sync", "checkpoint engine manager initialized", "engines-ready"),
    ("weight-sync", 'x - "POST /update_named_param/ HTTP/1.1" 200 OK', "trl-transfer"),
    ("weight-sync", "Timer update_weights start", "slime-transfer"),
    ("generation", "0.0 tokens/s, Running: 0 reqs, Waiting: 12 reqs", "not-admitted"),
    ("generation", "▶ Generating responses for batch of size 512...", "asked"),
    ("generation", "asking the judge for 64 rewards", "reward-asked"),
    ("generation", "update_weights done, time cost: 2.9s", "pushed"),
    ("teacher", "Teacher request failed: x", "failed"),
    ("training-step", "generate text done.\n▶ Computing logprobs...", "log-probs"),
    ("training-step", "▶ Computing logprobs...\n▶ Training policy...", "update"),
    ("training-step", "{'loss': 0.9, 'epoch': 1.0}", "updated"),
    (
        "checkpoint",
        "[Rank 3] Saved model to /a\n[Rank 3] Saved optim to /b",
        "optimizer-saved",
    ),
    ("checkpoint", "Saving model weights to /a", "model"),
    ("checkpoint", "step 20/20 loss 0.1", "begun"),
    ("unknown", "hello", "nothing"),
    ("actor-init", "", "begun"),
    (
        "rollout-init",
        "Waiting for 1 local core engine proc(s) to start.",
        "engine-begun",
    ),
    ("rollout-init", "", "begun"),
    ("teacher-init", "", "begun"),
    ("weight-sync", "", "begun"),
    ("generation", "No available shared memory broadcast block found", "worker-silent"),
    (
        "generation",
        "Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 0 reqs",
        "idle",
    ),
    ("generation", "POST /v1/completions 200 OK", "stepped"),
    ("generation", "", "begun"),
    ("teacher", "", "begun"),
]


def suspicion(phase: str, text: str, **facts: object) -> suspects.Suspicion:
    return suspects.suspects(phase, text.encode(), {"verl", "ray"}, facts)


def text_of(log: str) -> str:
    phase, _, name = log.partition("/")
    path = next(
        p
        for f in (f"hung.{phase}", "interrupted")
        for p in LOGS.glob(f"{f}/{name}.log")
    )
    return path.read_text(encoding="utf-8", errors="replace")


def test_the_files_are_sound() -> None:
    assert set(HANGS.signs) == set(PHASES)
    assert suspects.proofread(HANGS, catalogue.load()) == []


@pytest.mark.parametrize("log", SIGNS)
def test_the_sign_of_a_log(log: str) -> None:
    found = suspicion(log.partition("/")[0], text_of(log))
    assert found.sign == SIGNS[log]
    assert found.last_sign.startswith(STEPS.get(log, found.last_sign))
    assert found.missing_ranks == ()
    assert found.suspects


@pytest.mark.parametrize(("phase", "text", "sign"), TEXTS)
def test_the_sign_of_a_text(phase: str, text: str, sign: str) -> None:
    assert suspicion(phase, text).sign == sign


def test_every_sign_is_tried() -> None:
    tried = {(log.partition("/")[0], sign) for log, sign in SIGNS.items()}
    tried |= {(phase, sign) for phase, _, sign in TEXTS}
    has = {(phase, one.name) for phase, signs in HANGS.signs.items() for one in signs}
    assert has == tried


FRAME = re.compile(r"\b(\w+)(?: or (\w+))? \(([a-z]\w*(?:/\w+)+\.py)\)")
UPSTREAM = {"verl": "verl-project+verl", "trl": "huggingface+trl"}


def frames() -> list[tuple[str, str]]:
    """Every function that an observation names, with its file."""
    found = [FRAME.findall(one.observation) for one in HANGS.suspects.values()]
    named = [(name, hit[2]) for hits in found for hit in hits for name in hit[:2]]
    return sorted({(name, path) for name, path in named if name})


def source_of(path: str) -> Path | None:
    top = path.partition("/")[0]
    upstream = Path(os.environ.get("GKD_UPSTREAM", "/nowhere"))
    folder = {"gkd": "verl-project+verl-recipe"}.get(top, UPSTREAM.get(top, top))
    if (upstream / folder / path).is_file():
        return upstream / folder / path
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]).parent / path


@pytest.mark.parametrize(("name", "path"), frames())
def test_a_frame_is_a_function_of_its_file(name: str, path: str) -> None:
    source = source_of(path)
    if source is None:
        pytest.skip(f"{path} is not here")
    assert re.search(rf"\bdef {name}\b", source.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", HANGS.suspects)
def test_a_command_is_one_for_a_shell(name: str) -> None:
    entry = HANGS.suspects[name]
    filled = re.sub(r"<[a-z_]+>", "1", entry.command)
    shell = subprocess.run(["bash", "-n", "-c", filled], capture_output=True, text=True)
    assert shell.stderr == ""
    assert "NCCL_TIMEOUT" not in entry.command + entry.observation
    assert "kill" not in entry.command.split()
    assert bool(entry.process) <= ("<pid>" in entry.command)


@pytest.mark.parametrize(
    ("text", "ranks", "sentence"),
    [
        ("Ranks 1, 5 failed to pass monitoredBarrier in 9 ms", (1, 5),
         "ranks 1,5 did not come"),
        ("barrier failed -- missing ranks: 3", (3,), "rank 3 did not come"),
        ("waiting for clients. 7/8 clients joined.", (), "7 of 8 have joined"),
        ("rank: 1, key: x:1 (world_size=4, num_workers_joined=3, timeout=0:30:00)", (),
         "3 of 4 have joined"),
        ("waiting for clients. 8/8 clients joined.", (), ""),
        ("no ranks here", (), ""),
    ],
)  # fmt: skip
def test_what_a_library_says_of_ranks(
    text: str, ranks: tuple[int, ...], sentence: str
) -> None:
    found = silent_ranks.missing(text.encode())
    assert (found.ranks, found.sentence) == (ranks, sentence)


def saved(ranks: list[int], what: str = "Saved optim to") -> str:
    """The lines of verl's ranks that have saved a part."""
    return "".join(
        f"(WorkerDict pid={4000 + r}) [Rank {r}] {what} /a/x_world_size_8_rank_{r}.pt\n"
        for r in ranks
    )


def test_the_rank_that_has_not_saved_is_missing() -> None:
    text = saved(list(range(8)), "Saved model to") + saved([0, 1, 2, 3, 4, 6, 7])
    found = suspicion("checkpoint", text)
    assert found.missing_ranks == (5,)
    assert found.missing.startswith("rank 5 of 8 did not say ")
    assert "Saved optim to" in found.missing


@pytest.mark.parametrize(
    "text",
    [
        saved(list(range(8))),  # all have
        saved([0, 1, 2]),  # a few
        saved([0, 1, 2, 3, 4, 6, 7]) + saved([5], "Another word"),  # the eighth went on
    ],
)  # fmt: skip
def test_no_rank_is_missing(text: str) -> None:
    assert silent_ranks.missing(text.encode()) == silent_ranks.Missing()


def test_folded_lines_are_counted() -> None:
    line = saved([0]).rstrip() + " [repeated 6x across cluster]"
    found = silent_ranks.missing(line.encode())
    assert found.ranks == ()
    assert found.sentence.startswith("7 of 8 ranks have said ")
    full = line.replace("6x", "7x").encode()
    assert silent_ranks.missing(full) == silent_ranks.Missing()


def test_nccl_and_deepspeed_name_their_ranks() -> None:
    line = "n7:8{0}:12 [{0}] NCCL INFO ncclCommInitRank comm 0x5{0} rank {0} nranks 4"
    line += " cudaDev {0} nvmlDev {0} busId 9d000 commId 0xb178402769eb136b - "
    line += "Init COMPLETE\n"
    text = "".join(line.format(rank) for rank in (0, 1, 3))
    found = silent_ranks.missing(text.encode())
    assert found.ranks == (2,)
    assert found.sentence.endswith("Init COMPLETE'")
    text = "".join(
        f"[rank{r}]:[W1006 10:00:0{r}.1 x.cpp:15] [PG 0] Late\n" for r in (0, 1, 2)
    )
    assert (
        silent_ranks.missing(text.encode(), 4).sentence
        == "rank 3 of 4 did not say 'Late'"
    )
    zero = "[Torch] Saved /a/bf16_zero_pp_rank_{0}_mp_rank_00_optim_states.pt.\n"
    text = "".join(zero.format(rank) for rank in (0, 1, 2))
    assert silent_ranks.missing(text.encode(), 4).ranks == (3,)


def test_facts_count_before_the_text() -> None:
    bar = "Training Progress:   4%|    | 12/300 [08:00<2:24:28, 30.10s/it]\n"
    assert suspicion("generation", bar).last_sign.startswith("step 12 of 300 is done: ")
    said = suspicion("generation", bar, step=57, steps=2400).last_sign
    assert said.startswith("step 57 of 2400 is done: ")
    alone = suspicion("generation", "step:6 - actor/kl_loss:17.6").last_sign
    assert alone.startswith("step 6 is done: ")
    own = "\x1b[0m  7%|\x1b[32m   \x1b[0m| 99/1250 [06:36<1:18:39,  4.10s/it]"
    assert suspicion("checkpoint", own).last_sign.startswith(
        "step 99 of 1250 is done: "
    )
    assert suspicion("data", bar).last_sign.startswith("the dataset is asked for; ")
    nemo = "========================= Step 57/2400 =========================\n"
    nemo += "▶ Training policy..."
    assert suspicion("training-step", nemo).last_sign == (
        "step 57 of 2400 has begun: generation and log-probabilities are done; "
        "the update is not done"
    )
    said = suspicion("training-step", nemo, step=57, steps=2400).last_sign
    assert said.startswith("step 57 of 2400 has begun: ")
    iteration = suspicion("training-step", "iteration 7/ 90 | lm loss: 1 |", step=7)
    changed = "step 7 is done: the weights have changed; the next step is not done"
    assert iteration.last_sign == changed
    assert "env.compiler" not in [one.cause for one in iteration.suspects]
    rollout = suspicion("generation", "rollout 7: {'raw_reward': 1}", step=7).last_sign
    assert "first" not in rollout


def test_the_process_that_spoke_last_is_named() -> None:
    text = "(WorkerDict pid=11) a\n(WorkerDict pid=12, ip=10.0.0.3) b\n(Other pid=13) c"
    found = suspicion("actor-init", text + "\nLoading checkpoint shards: 100%|#")
    assert "py-spy dump --pid 12" in found.suspects[0].command
    blank = suspicion("actor-init", "Loading checkpoint shards: 100%|#")
    assert blank.suspects[0].command == "py-spy dump --pid PID"


def test_what_the_sign_names_fills_the_command() -> None:
    found = suspicion(
        "ray-init", "Connecting to existing Ray cluster at address: 10.0.3.4:6379..."
    )
    assert (
        found.last_sign
        == "the driver has the address 10.0.3.4:6379; the cluster has not answered"
    )
    assert "ray health-check --address 10.0.3.4:6379" in found.suspects[0].command


def test_suspects_of_other_frameworks_are_left_out() -> None:
    text = b"update_named_param"
    verl = suspects.suspects("generation", text, {"verl"})
    trl = suspects.suspects("generation", text, {"trl"})
    assert {one.cause for one in verl.suspects} != {one.cause for one in trl.suspects}
    assert any("accelerate" in one.observation for one in trl.suspects)
    assert not any("accelerate" in one.observation for one in verl.suspects)


def test_a_hostile_text_ends_in_plain_words() -> None:
    text = b"\x1b[31mGenerating \x00train split: 0 examples [00:00, ? examples\x1b]0;x"
    assert "\x1b" not in repr(suspects.suspects("data", text, ()))
    address = b"Connecting to existing Ray cluster at address: $(id):1`x`;rm -rf /:6379"
    found = suspects.suspects("ray-init", address, {"ray"})
    assert found.sign == "begun"
    flood = b"Rank 99999 of nranks 999999 x " * 60_000 + b"(world_size=999999, " * 9_000
    assert suspects.suspects("unknown", flood, ()).missing_ranks == ()
    broken = bytes(range(256)) * 4000
    for phase in PHASES:
        assert suspects.suspects(phase, broken, ()).missing == ""


def test_the_json_is_plain() -> None:
    told = suspicion("checkpoint", saved([0, 1, 2, 3, 4, 6, 7])).to_json()
    assert told["missing_ranks"] == [5]
    assert told["suspects"][0].keys() == set(suspects.Suspect.__annotations__)


@pytest.mark.parametrize(
    ("phase", "old", "new", "complaint"),
    [
        ("data", 'open = "not one', 'opened = "x', "sign 1: unknown key 'opened'"),
        ("data", "[[suspect]]", "[[suspects]]", "unknown key 'suspects'"),
        ("data", 'cause = "data.cache"', "cause = 3", "cause: 3 is not a text"),
        ("data", 'name = "cache-locked"', 'name = "preparation"', "is there twice"),
        ("data", '"cache-locked", "prep', '"nobody", "prep', "no suspect 'nobody'"),
        ("unknown", "done =", "done", "is not valid TOML"),
        ("unknown", '[[sign]]', '[[sign]]\npattern = "x"', "without a pattern"),
        ("checkpoint", 'process = ["Work', 'frameworks = ["Work', "is not one of"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused(
    tmp_path: Path, phase: str, old: str, new: str, complaint: str
) -> None:
    shutil.copytree(suspects.HANGS_DIR, tmp_path / "hangs")
    path = tmp_path / "hangs" / f"{phase}.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(RuleError) as caught:
        suspects.load(tmp_path / "hangs")
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"config\.toml: cannot be read"):
        suspects.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"example": "nothing"}, "'nothing' must match"),
        ({"near_miss": ("dataset len: 3 ",)}, "must not match"),
        ({"near_miss": ()}, "near_miss is missing"),
        ({"pattern": "(?<=x)"}, "RE2's syntax"),
        ({"open": "{what} is open"}, "{what} is no group"),
    ],
)
def test_proofreading_finds(change: dict[str, object], complaint: str) -> None:
    sign = suspects.Sign(
        "a", "b", "c", ("d",), "dataset len: ", "", "dataset len: 1", ("x",)
    )
    entry = suspects.Entry("d", "data.cache", "e", "f")
    bad = suspects.Hangs(
        {"data": (sign.__class__(**{**vars(sign), **change}),)}, {"d": entry}
    )
    good = suspects.Hangs({"data": (sign,)}, {"d": entry})
    known = catalogue.load()
    assert suspects.proofread(good, known) == []
    assert complaint in "\n".join(suspects.proofread(bad, known))


def test_proofreading_finds_a_suspect_that_nobody_names_or_knows() -> None:
    entry = suspects.Entry("d", "no.such", "e" * 300, "f")
    found = "\n".join(
        suspects.proofread(suspects.Hangs({}, {"d": entry}), catalogue.load())
    )
    assert "no cause 'no.such'" in found
    assert "no sign names it" in found
    assert "at most 300" in found


SPY = """step:1 - actor/loss:0.1
Thread 41822 (idle): "MainThread"
    {frames}
"""
LOADER = "_try_get_data (torch/utils/data/dataloader.py:1251)"
BARRIER = "barrier (torch/distributed/distributed_c10d.py:4818)"
POST = "post (requests/sessions.py:637)\n    {} (/job/grpo.py:33)"


def named(phase: str, frames: str) -> list[str]:
    text = SPY.format(frames=frames).encode()
    found = suspects.suspects(phase, text, ["trl"]).suspects
    of = {one.observation: name for name, one in HANGS.suspects.items()}
    return [of[one.observation] for one in found]


def test_what_a_stack_shows_comes_first_and_what_it_disproves_goes() -> None:
    assert named("training-step", LOADER)[0] == "rank-on-data"
    assert "rank-missing" not in named("training-step", LOADER)
    assert named("training-step", BARRIER)[0] == "rank-missing"
    assert "rank-on-data" not in named("training-step", BARRIER)
    before = suspects.suspects("training-step", b"step:1 - actor/loss:0.1", ["trl"])
    assert len(before.suspects) > len(named("training-step", LOADER))


def test_a_stack_with_its_process_in_front_of_each_line_is_read() -> None:
    text = SPY.format(frames=LOADER).splitlines()
    lines = "\n".join(f"(WorkerDict pid=7) {line}" for line in text)
    found = suspects.suspects("training-step", lines.encode(), ["verl"])
    assert found.suspects[0].cause == "data.loader-stall"


def test_a_stack_before_the_last_step_disproves_nothing() -> None:
    steps = "step:2 - actor/loss:0.1\nstep:3 - actor/loss:1\n"
    text = SPY.format(frames=LOADER) + steps
    found = suspects.suspects("training-step", text.encode(), ["verl"])
    assert found.suspects[0].cause == "comm.collective-timeout"


def test_a_judge_is_suspected_below_a_reward_not_below_an_engine() -> None:
    assert named("generation", POST.format("judge_reward"))[0] == "reward-silent"
    assert "reward-silent" not in named("generation", POST.format("generate"))


def test_below_an_event_loop_nothing_is_disproved() -> None:
    loop = "select (selectors.py:468)\n    _run_once (asyncio/base_events.py:1898)"
    assert "reward-silent" in named("generation", loop)
