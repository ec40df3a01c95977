"""A traceback's functions tell in which phase it was raised."""

from __future__ import annotations

import io

import pytest

from pytest_gkd.diagnosis import catalogue, exceptions, frames, log_file, logs

CATALOGUE = catalogue.load()
START = "Traceback (most recent call last):"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU 3 has"


def frame(function: str, file: str = "a.py") -> str:
    return f'  File "/opt/{file}", line 7, in {function}\n    {function}()'


def phase_of(*lines: str, last: str = "") -> str:
    text = "\n".join(lines).encode()
    chains = exceptions.read(text)
    chain = exceptions.Near(chains).around(text.rindex(b"Error"))
    return frames.phase_of(chain, last)


@pytest.mark.parametrize(
    ("functions", "phase"),
    [
        (["main", "fit", "update_actor", "forward"], "training-step"),
        (["fit", "training_step", "_generate_and_score_completions"], "generation"),
        (["fit", "save_checkpoint", "wait"], "checkpoint"),
        (["TRLTrainer.sync_weights"], "weight-sync"),
        (["wake_up", "rollout_mode", "resume", "LLM.wake_up"], "weight-sync"),
        (["update_weights", "resume", "wake_up", "call"], "weight-sync"),
        (["generate_sequences", "wake_up", "call"], "generation"),
        (["training_step", "_infer", "wake_up", "call"], "generation"),
        (["main", "helper"], ""),
        (["main", "ask_teacher"], "teacher"),
        (["ask_teacher", "update_actor"], "training-step"),
        (["main", "push_the_weights"], "weight-sync"),
        (["main", "compute_reward", "forward"], "generation"),
        (["main", "build_teacher", "__init__"], "teacher-init"),
        (["main", "build_rollout", "__init__"], "rollout-init"),
        (["main", "load_student", "helper"], "actor-init"),
        (["setup", "_create_placement_groups_internal"], "actor-init"),
        (["main_process_first", "barrier"], "data"),
        (["save_pretrained_merged", "merge_and_overwrite_lora"], "checkpoint"),
    ],
)
def test_the_innermost_known_function_tells(functions: list[str], phase: str) -> None:
    assert phase_of(START, *map(frame, functions), "ValueError: no") == phase


def test_a_traceback_in_a_box_tells_as_well() -> None:
    box = "│ /opt/verl/fsdp_workers.py:712 in update_actor        │"
    assert phase_of(START, box, "ValueError: no") == "training-step"


def test_an_attribute_that_a_wrapped_model_looks_for_is_no_import() -> None:
    first = [START, frame("__getattr__"), frame("__getattr__"), "AttributeError: a", ""]
    chain = "During handling of the above exception, another exception occurred:"
    second = ["", START, frame("training_step"), "AttributeError: b"]
    assert phase_of(*first, chain, *second) == "training-step"


def test_the_first_of_chained_exceptions_tells() -> None:
    first = [START, frame("generate_sequences"), "KeyError: 'a'", ""]
    chain = "During handling of the above exception, another exception occurred:"
    second = ["", START, frame("update_actor"), "ValueError: no"]
    assert phase_of(*first, chain, *second) == "generation"
    assert phase_of(*first, "two hours later", *second) == "training-step"


def test_lines_of_another_process_are_passed_over() -> None:
    ours, theirs = "(WorkerDict pid=7) ", "(WorkerDict pid=8) "
    lines = [
        ours + START,
        theirs + START,
        *(ours + line for line in frame("update_actor").splitlines()),
        *(theirs + line for line in frame("save_checkpoint").splitlines()),
        theirs + "OSError: [Errno 28] No space left on device",
        ours + "ValueError: no",
    ]
    first = "\n".join(lines[:1] + lines[2:])
    at = first.encode().rindex(b"ValueError")
    chains = exceptions.read(first.encode())
    told = frames.phase_of(exceptions.Near(chains).around(at, ours.strip()))
    assert told == "training-step"


def test_a_cause_that_is_met_in_one_phase_tells_it() -> None:
    text = (
        b"Started a local Ray instance\nrun.py: error: unrecognized arguments: --lr2\n"
    )
    log = log_file.read(io.BytesIO(text), "a", 0, CATALOGUE)
    assert logs.judge([log], CATALOGUE).phase == "config"


def test_the_frames_of_the_root_say_where_a_run_failed() -> None:
    text = ["Before init rollout model", START, frame("update_actor"), OOM]
    log = log_file.read(io.BytesIO("\n".join(text).encode()), "a", 0, CATALOGUE)
    assert logs.judge([log], CATALOGUE).phase == "training-step"
    text[2] = frame("init_model")  # verl's, which makes the rollout too
    log = log_file.read(io.BytesIO("\n".join(text).encode()), "a", 0, CATALOGUE)
    assert logs.judge([log], CATALOGUE).phase == "rollout-init"


def test_the_frames_of_an_unknown_failure_say_where_it_was() -> None:
    text = [
        "Before init rollout model",
        START,
        frame("update_actor"),
        "MoonError: x",
    ]
    log = log_file.read(io.BytesIO("\n".join(text).encode()), "a", 0, CATALOGUE)
    report = logs.judge([log], CATALOGUE)
    assert (report.verdict, report.phase) == ("unknown", "training-step")


@pytest.mark.parametrize(
    ("process", "phase"),
    [
        ("TeacherWorker", "teacher-init"),
        ("RolloutActor", "rollout-init"),
        ("TrainerWorker", "actor-init"),
        ("ActorRolloutRefWorker", "config"),
        ("Worker", "config"),
    ],
)
def test_what_a_role_raises_in_its_init_is_of_its_start(
    process: str, phase: str
) -> None:
    lines = [START, frame("__init__"), frame("get_config_dict"), "OSError: no folder"]
    prefixed = (
        f"({process} pid=7) {line}" for each in lines for line in each.split("\n")
    )
    assert phase_of(*prefixed) == phase
    task = f"RayTaskError: ray::{process}.__init__() (pid=7, ip=10.0.0.1)"
    assert phase_of(*lines[:3], task) == phase


def test_what_ray_prints_of_a_creation_task_is_read_as_an_exception() -> None:
    died = "The actor died because of an error raised in its creation task, "
    lines = [frame("__init__"), frame("get_config_dict"), "OSError: no folder"]
    for before in ("Exception raised in creation task: ", "ray.ActorDiedError: ", ""):
        task = f"{before}{died}ray::lm-0-0:Worker.__init__() (pid=7, ip=10.0.0.1)"
        each = "\n".join([task, *lines]).split("\n")
        prefixed = [f"(TeacherWorker pid=7) {line}" for line in each]
        assert phase_of(*prefixed) == "teacher-init"


def test_what_a_role_raises_in_its_work_is_of_its_phase() -> None:
    task = "ray.exceptions.RayTaskError(ValueError): ray::{}.score() (pid=7)"
    lines = [START, frame("score")]
    assert phase_of(*lines, task.format("TeacherWorker")) == "teacher"
    assert phase_of(*lines, task.format("RewardManager")) == "generation"
    assert phase_of(*lines, task.format("TrainerWorker")) == ""
    built = [f"(TrainerWorker pid=7) {START}"]
    for function in ("load_checkpoint", "__init__"):  # of what it calls
        built += [f"(TrainerWorker pid=7) {x}" for x in frame(function).split("\n")]
    assert phase_of(*built, "(TrainerWorker pid=7) OSError: no") == "checkpoint"
    weights = [START, frame("update_weights")]
    assert phase_of(*weights, task.format("RolloutWorker")) == "weight-sync"


def test_of_log_probabilities_the_last_mark_tells_whose_they_are() -> None:
    def told(function: str, last: str) -> str:
        text = f"{START}\n{frame(function)}\nValueError: no\n".encode()
        return frames.phase_of(exceptions.read(text)[0], last)

    assert told("compute_log_prob", "teacher") == "teacher"
    assert told("compute_log_prob", "generation") == "training-step"
    assert told("update_actor", "teacher") == "training-step"


def test_a_file_named_after_the_teacher_tells_where_no_function_does() -> None:
    lines = [START, frame("<module>", "teacher.py"), frame("topk", "teacher_server.py")]
    assert phase_of(*lines, "ValueError: no") == "teacher"
    assert phase_of(*lines[:2], frame("x"), "ValueError: no") == ""


def test_some_causes_tell_more_than_the_frames() -> None:
    def phase(text: str) -> str:
        log = log_file.read(io.BytesIO(text.encode()), "a.log", 0, CATALOGUE)
        return logs.judge([log], CATALOGUE).phase

    raised = "\n".join(
        [START, frame("training_step"), "RuntimeError: DataLoader worker "]
    )
    assert phase(f"{raised}(pid 12884) is killed by signal: Killed.\n") == "data"
    ray = "Error: No available node types can fulfill resource request {'GPU': 1.0}.\n"
    assert phase(f"Generating train split: 288 examples\n(autoscaler +7s) {ray}") == (
        "actor-init"
    )


def called(function: str, code: str, file: str = "a.py") -> str:
    return f'  File "/opt/{file}", line 7, in {function}\n    {code}'


@pytest.mark.parametrize(
    ("frames", "error", "phase"),
    [
        (
            [
                called("<module>", "import job", "train.py"),
                called("<module>", "import vllm._C", "job.py"),
            ],
            "ImportError: libcudart.so.13",
            "config",
        ),
        (
            [
                called("<module>", "import job", "train.py"),
                called("<module>", "class GenerateLoss(Base):", "job.py"),
                called("generate_loss", "x()", "losses.py"),
            ],
            "RuntimeError: no",
            "config",
        ),
        (
            [
                called("<module>", "job.main()", "train.py"),
                called("<module>", "run()", "job.py"),
                called("generate", "x()", "losses.py"),
            ],
            "RuntimeError: no",
            "generation",
        ),
        (
            [called("<module>", "main()", "train.py"), called("main", "work()")],
            "ImportError: libcudart.so.13",
            "",
        ),
        (
            [
                called("compute_loss", "teacher_outputs = self.teacher_model("),
                frame("f"),
            ],
            "ValueError: no",
            "teacher",
        ),
        (
            [called("compute_loss", "outputs = model("), frame("f")],
            "ValueError: no",
            "training-step",
        ),
        (
            [
                called("main", "teacher = AutoModel.from_pretrained("),
                frame("init_model"),
            ],
            "ValueError: no",
            "teacher-init",
        ),
        (
            [called("main", "rows = [json.loads(line) for line in open(path)]")],
            "ValueError: no",
            "data",
        ),
        ([called("run", "go()", "losses.py")], "ValueError: no", "training-step"),
        (
            [called("main", "ray.get(trainer.state.remote(), timeout=60)")],
            "GetTimeoutError: no",
            "actor-init",
        ),
        (
            [called("main", "many = [Judge.remote(cfg) for _ in range(4)]")],
            "TypeError: no",
            "actor-init",
        ),
        (
            [called("main", "ray.get(trainer.state.remote())")],
            "RayTaskError: ray::Trainer.state() (pid=7, ip=10.0.0.1)",
            "",
        ),
        (
            [called("main", 'data: List["DataProto"] = ray.get(refs)')],
            "ValueError: no",
            "",
        ),
        ([called("main", "ray.init(address=place)")], "ValueError: no", "ray-init"),
        (
            [called("<module>", 'KL = float(os.environ["KL"])')],
            "ValueError: no",
            "config",
        ),
        (
            [called("<module>", 'rank = int(os.environ["RANK"])')],
            "KeyError: no",
            "",
        ),
        (
            [called("main", "y = head(x)"), frame("_call_impl", "module.py")],
            "TypeError: no",
            "training-step",
        ),
    ],
)
def test_lines_and_files_tell_where_names_do_not(
    frames: list[str], error: str, phase: str
) -> None:
    assert phase_of(START, *frames, error) == phase


def test_what_a_trainer_raises_while_it_is_constructed_is_of_the_start() -> None:
    init = [START, frame("main"), frame("__init__", "trl/trainer/grpo_trainer.py")]
    rewards, engine = frame("compute_rewards"), frame("_init_vllm")
    assert phase_of(*init, rewards, "ValueError: no") == "actor-init"
    asked = frame("init_communicator")
    assert phase_of(*init, engine, asked, "RuntimeError: no") == "rollout-init"
    assert phase_of(START, frame("main"), rewards, "ValueError: no") == "generation"


def test_a_tracker_belongs_to_the_settings_and_then_to_the_step() -> None:
    lines = START, frame("save_model"), frame("send", "site-packages/mlflow/a.py")
    chain = exceptions.read("\n".join((*lines, "ValueError: no")).encode())[0]
    assert frames.phase_of(chain, "data") == "config"
    assert frames.phase_of(chain, "generation") == "training-step"


def test_a_converters_every_failure_is_of_the_checkpoint() -> None:
    def told(file: str) -> str:
        text = "\n".join((START, frame("<module>", file), frame("load_dataset")))
        log = log_file.read(
            io.BytesIO(f"{text}\nOSError: x".encode()), "a", 0, CATALOGUE
        )
        return logs.judge([log], CATALOGUE).phase

    assert told("merge_shards.py") == "checkpoint"
    assert told("train.py") == "data"


def test_a_line_that_makes_an_object_of_settings_is_of_the_configuration() -> None:
    lines = (
        '  File "/home/a/go.py", line 6, in main',
        "    args=SomeArguments(**cfg),",
    )
    assert phase_of(START, *lines, "TypeError: no") == "config"
    inner = '  File "/home/a/go.py", line 6, in main', "    use(model, SomeConfig(r=4))"
    assert phase_of(START, *inner, "TypeError: no") == ""


def test_an_engine_checks_its_own_settings_as_it_starts() -> None:
    llm = '  File "/opt/site-packages/vllm/entrypoints/llm.py", line 3, in __init__'
    check = '  File "/opt/site-packages/{}/config.py", line 3, in __post_init__'
    told = phase_of(START, llm, check.format("vllm"), "ValueError: no")
    assert told == "rollout-init"
    assert phase_of(START, llm, check.format("trl"), "ValueError: no") == "config"


def test_the_function_that_starts_a_scheduler_answers_nothing() -> None:
    file = "sglang/srt/managers/scheduler.py"
    start, ask = frame("run_scheduler_process", file), frame("schedule_batch", file)
    assert phase_of(START, start, "RuntimeError: no") == "rollout-init"
    assert phase_of(START, start, ask, "RuntimeError: no") == "generation"


def judged(*lines: str) -> tuple[str, str]:
    log = log_file.read(io.BytesIO("\n".join(lines).encode()), "a", 0, CATALOGUE)
    report = logs.judge([log], CATALOGUE)
    return report.causes[0].cause if report.causes else report.verdict, report.phase


TIMED_OUT = (
    "[rank4]:[E911 00:17:48.51 ProcessGroupNCCL.cpp:632] [Rank 4] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=600000) ran for 600011 milliseconds before timing out."
)


def test_what_is_marked_after_the_root_is_no_phase_of_the_failure() -> None:
    cause = "comm.collective-timeout"
    steps = [f"step:{n} - actor/loss:0.3" for n in (1, 2)]
    text = *steps, "saving checkpoint at step 2", TIMED_OUT, "Generating rollouts"
    assert judged(*text) == (cause, "checkpoint")
    # Later steps show that it failed elsewhere, of what had failed before.
    caught = START, frame("helper"), "OSError: [Errno 24] Too many open files"
    later = ["INFO: update actor done"] * 2
    empty = START, frame("<module>"), "_queue.Empty"
    text = *steps, "saving checkpoint at step 2", *caught, *later, *empty
    assert judged(*text) == ("env.too-many-files", "training-step")


def test_where_the_root_has_no_frames_the_last_exception_tells() -> None:
    steps = [f"step:{n} - actor/loss:0.3" for n in (1, 2)]
    driver = (
        START,
        frame("fit"),
        frame("_compute_old_log_prob"),
        "ActorDiedError: it",
    )
    text = *steps, "Generating rollouts", TIMED_OUT, "x" * 600
    assert judged(*text) == ("comm.collective-timeout", "generation")
    assert judged(*text, *driver) == ("comm.collective-timeout", "training-step")


def test_another_files_exception_tells_nothing_of_the_roots_phase() -> None:
    ranks = [
        ["Generating rollouts", "torch.OutOfMemoryError: CUDA out of memory. Tried to"],
        [START, frame("load_dataset"), "ConnectionError: the peer is gone"],
    ]
    texts = ("\n".join(lines).encode() for lines in ranks)
    read = [
        log_file.read(io.BytesIO(text), f"rank{number}.log", number, CATALOGUE)
        for number, text in enumerate(texts)
    ]
    report = logs.judge(read, CATALOGUE)
    assert (report.causes[0].cause, report.phase) == ("cuda.oom", "generation")


def test_who_asked_a_dead_engine_knows_more_of_the_phase_than_its_server() -> None:
    server = "(APIServer pid=5) ERROR 09-24 19:04:58 [async_llm.py:858] "
    own = '  File "/opt/vllm/v1/engine/async_llm.py", line 801, in output_handler'
    raised = "EngineDeadError: EngineCore encountered an issue. See stack trace"
    dead = [server + line for line in (START, own, raised)]
    assert judged(*dead) == ("vllm.engine-died", "rollout-init")
    driver = START, frame("main"), frame("push_weights"), "HTTPError: 500"
    assert judged(*dead, *driver) == ("vllm.engine-died", "weight-sync")


def test_a_launchers_summary_hides_no_phase_of_an_unknown_failure() -> None:
    rank = START, frame("create_reward_model"), "MoonError: no"
    summary = START, frame("launch_agent"), "ChildFailedError: train.py FAILED"
    assert judged(*rank, *summary) == ("unknown", "actor-init")


def test_a_file_of_a_data_library_is_no_engines() -> None:
    core = '  File "/opt/site-packages/{}/core.py", line 3, in __init__'
    assert phase_of(START, core.format("pyarrow/parquet"), "OSError: no") == ""
    assert phase_of(START, core.format("vllm/v1/engine"), "OSError: no") != ""


def test_failing_all_else_a_functions_name_tells_and_then_its_file() -> None:
    lines = [START, frame("next_completions", "loop.py")]
    assert phase_of(*lines, "ValueError: no") == "generation"
    library = frame("_f", "site-packages/transformers/tokenization_utils_fast.py")
    own = frame("finish", "sampling.py")
    assert phase_of(START, own, library, "ValueError: no") == "generation"
    assert phase_of(START, library, "ValueError: no") == "data"


@pytest.mark.parametrize(
    ("file", "own", "general"),
    [
        (r"C:\Users\me\job\train.py", True, False),
        (r"C:\venv\Lib\site-packages\zaplib\core.py", False, False),
        (r"C:\venv\Lib\site-packages\torch\nn\modules\linear.py", False, True),
        (r"C:\Python311\Lib\threading.py", False, True),
    ],
)
def test_whose_a_file_of_windows_is(file: str, own: bool, general: bool) -> None:
    text = f'{START}\n  File "{file}", line 7, in f\n    g()\nKeyError: 1'
    ((raised,),) = exceptions.read(text.encode())
    (one,) = raised.frames
    assert one.file == file
    assert (frames.is_own(one), frames.is_general(one)) == (own, general)
    assert frames.in_library(raised) is not own


@pytest.mark.parametrize(
    ("raised_in", "last", "phase"),
    [
        ("load_model", "teacher-init", "teacher-init"),
        ("load_model", "config", "actor-init"),
        ("load_student", "teacher-init", "actor-init"),
    ],
)
def test_a_model_that_fails_after_the_teachers_start_is_the_teacher(
    raised_in: str, last: str, phase: str
) -> None:
    calls = [frame(raised_in), frame("from_pretrained", "transformers/m.py")]
    assert phase_of(START, *calls, "ValueError: no", last=last) == phase


def test_a_roles_other_names_tell_its_phase() -> None:
    told = [f"(Oracle pid=7) {START}", f"(Oracle pid=7) {frame('work')}"]
    assert phase_of(*told, "(Oracle pid=7) ValueError: no") == "teacher"
