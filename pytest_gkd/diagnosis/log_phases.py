"""How far a run had come when its log ends, and what that phase waits for.

A marker is a text that a program prints, with the phase the run is in after it. The
last marker of a log tells the phase. Where the texts come from: verl 0.6 to 0.9 and
verl-recipe (main_gkd.py, ray_trainer.py), vLLM 0.32, Ray 2.60, datasets 5.2, TRL 1,
transformers 5, LightRFT.
"""

from __future__ import annotations

from pytest_gkd.diagnosis.patterns import Pattern

PHASES = (
    "config",
    "data",
    "ray-init",
    "actor-init",
    "rollout-init",
    "teacher-init",
    "weight-sync",
    "generation",
    "teacher",
    "training-step",
    "checkpoint",
    "unknown",
)

# Marker texts that occur a few times in a run. Those of every step are in STEPS.
MARKERS: dict[str, tuple[str, ...]] = {
    "config": (
        "TaskRunner hostname:",
        "{'actor_rollout_ref': {",
        "[validate_config] All configuration checks passed",
        "non-default args: {",
        "Setting ds_accelerator to",
        "Using config file",
    ),
    "ray-init": (
        "ray init kwargs:",
        "Started a local Ray instance",
        "Connecting to existing Ray cluster at address",
        "Connected to Ray cluster",
        "Local node IP:",
        "Usage stats collection is",
    ),
    "data": (
        "resource_pool_spec:",
        "Using dataset class",
        "Generating train split",
        "Generating validation split",
        "Generating test split",
        "dataset len:",
        "Filtering prompts longer than",
        "Size of train dataloader",
        "train and validate dataloader initialized",
        "Tokenizing train dataset",
        "Applying chat template to train dataset",
        "Loading dataset",
        "loading dataset",
        "Downloading data:",
        "Resolving data files",
        "Map (num_proc=",
        "Map:  ",
        "Running tokenizer on dataset",
        "Converting format of dataset",
    ),
    "actor-init": (
        "Total training steps:",
        "worker group kwargs:",
        "colocated worker base class",
        "create worker group",
        "Model config after override",
        "TF config:",
        "Loading checkpoint shards",
        "wrap_policy:",
        "actor_module:",
        "loading embeddings...",
        "loading layer #",
        "loading megatron ckpt done",
        "number of parameters on (tensor",
        "Actor use_remove_padding",
        "Before init actor model",
        "Before init ref model",
        "Init Distributed Env, init_method",
        "distributed init (rank",
        "Initializing TorchBackend in DeepSpeed",
        "[Gloo] Rank",
        "initializing torch distributed",
        "Initializing process group",
        "Waiting in store based barrier",
        "Actor optimizer",
    ),
    "rollout-init": (
        "actor and ref model engine initialized",
        "Before init rollout model",
        "Before building vllm rollout",
        "Before building sglang",
        "Initializing a V1 LLM engine",
        "Initializing an LLM engine",
        "Initializing a V0 LLM engine",
        "No current placement group found",
        "Waiting for creating a placement group of specs",
        "is assigned as DP rank",
        "Using model weights format",
        "Starting to load model",
        "Loading safetensors checkpoint shards",
        "Loading weights took",
        "Model loading took",
        "Capturing CUDA graph",
        "Capturing cudagraphs",
        "GPU KV cache size",
        "Available KV cache memory",
        "Graph capturing finished",
        "torch.compile takes",
        "Dynamo bytecode transform time",
        "vLLM is using nccl",
        "Resolved architecture",
        "core engine proc(s) to start",
        "vLLM API server version",
        "Load weight begin",
        "Load weight end",
        "Waiting for vLLM server",
        "init engine (profile",
    ),
    "teacher-init": (
        "reward loop manager initialized",
        "wait proxy server ready at",
        "teacher proxy is ready",
        "start teacher worker",
        "teacher server is ready",
        "Loading teacher",
        "loading teacher",
        "Initializing teacher",
    ),
    "weight-sync": (
        "After building vllm rollout",
        "LLMServerManager:",
        "checkpoint engine manager initialized",
        "all initialize finished, ready to fit",
        "[SYNC] Starting weight",
        "POST /init_communicator",
        "POST /update_named_param",
        "POST /start_weight_update",
        "POST /init_weight_transfer",
        "Before sync rollout weights",
        "init_process_group rank:",
        "Initializing weight transfer",
        "start update_engine_weights",
    ),
    "generation": (
        "update_weights done, time cost",
        "send weights done, time cost",
        "finished update_engine_weights",
        "Initial validation metrics",
        "test_gen_batch meta info",
        "generate_sequences Before",
        "Processed prompts:",
        "Generating rollouts",
        "Rendering prompts:",
        "Application startup complete",
        "Avg generation throughput",
        "POST /generate",
        "POST /v1/",
        "[SYNC] Weight",
    ),
    "teacher": (
        "generate_sequences After",
        "get_prompt_topk_logprobs started",
        "Teacher request failed",
        "worker started...",
    ),
    "training-step": (
        "generate text done",
        "Before update_policy",
        "***** Running training *****",
        "Before compute_log_prob",
        "Before update_actor",
    ),
    "checkpoint": (
        "local_global_step_folder:",
        "Saving model checkpoint to",
        "Saving model weights to",
        "Saving checkpoint",
        "saving checkpoint",
        "Saving current state to",
        "Saving DeepSpeed Model and Optimizer",
        "[Torch] Saving",
        "[Torch] Saved",
        "zero checkpoint saved",
        "Checkpoint saved",
        "[Rank 0] Saved",
    ),
    "first-step": (
        "Training from scratch",
        "Setting global step to",
        "setting global step to",
        "Training Progress:   0%",
    ),
}

WAITS_FOR: dict[str, str] = {
    "config": "the model path or the tokenizer to be read or downloaded, or imports",
    "data": "the dataset to be read, prepared and filtered",
    "ray-init": "the Ray cluster, or a place for the first task (ray status)",
    "actor-init": "a place for the workers (ray status shows a pending placement "
    "group), their process group, or the trainer's weights",
    "rollout-init": "the engine: weights, profiling, compilation, graph capture",
    "teacher-init": "the teacher's engine or server",
    "weight-sync": "both sides of the transfer; verl's GKD recipe has no time limit",
    "generation": "the engine's answers, or a transfer that precedes them",
    "teacher": "the teacher's answer (600 s in verl's GKD recipe)",
    "training-step": "forward, backward and the collectives of the optimizer step",
    "checkpoint": "all ranks to write their part, or the storage",
    "unknown": "something that leaves no mark in this log",
}

NCCL = Pattern(rb"\bNCCL (?:INFO|version) ?")

# One completed step of training, however the framework prints it.
STEP = Pattern(
    rb"\bstep:\d+ - |\{'loss': |\{'train_loss|'reward': -?\d"
    rb"|Training Progress: +\d+%\|.{0,80}\| [1-9]\d*/"
    rb"|\b(?:iteration|[Ss]tep|global_step|iter|[Ee]poch)[ =:]+\d+[^\r\n]{0,300}[Ll]oss"
    rb"|\| [1-9]\d*/\d+ \[[^\]\r\n]{0,80}loss=|\bstep=\d+, skipped="
    rb"|INFO: update actor done"
)
# Nothing follows these but the end of the program.
FINISHED = Pattern(
    rb"'train_runtime': |train_runtime +=|Final validation metrics"
    rb"|Training Progress: +100%\|"
    rb"|\b[Tt]raining (?:is )?(?:completed?|finished|done|succeeded)\b"
    rb"|\b[Ff]inished [Tt]raining\b|[Tt]raining finished successfully"
    rb"|\b[Dd]one training in [\d.]+ seconds"
    rb"|Training took: |Finished server process|\bJob 'raysubmit_\w+' succeeded"
    rb"|\bSUCCEEDED\b"
    rb"|\b(?:exited|finished|completed) with (?:exit )?(?:code|status):? 0\b"
    rb"|(?:(?:failed|died) with )?\bexit (?:code|status):? 0\b"
    rb"|Successfully installed "
    rb"|=+ \d+ passed(?:, \d+ (?:skipped|warnings?|deselected))* in [\d.]+s"
    rb"|^\d+ passed in [\d.]+s"
    rb"|\b(?:All done|Run complete|Job completed|run completed)\b",
    unless=rb"^(?:failed|died) with ",
)
# The program works at this point; a later failure still counts.
WORKING = Pattern(
    rb"Application startup complete|Uvicorn running on"
    rb"|(?:GET|POST) /[\w/.?=&-]* HTTP/1\.\d\" 200"
    rb"|Processed prompts: 100%|Avg generation throughput: (?:[1-9]|0\.[1-9])"
    rb"|Generated text: |The server is fired up and ready to roll"
    rb"|(?m:^ *\d+ +\d+ +(?:float|half|double|b?float\d+|u?int\d+) .*\d+\.\d\d )",
    unless=rb"^(?:GET|POST) /(?:update_named_param|init_communicator|\w+_weight)",
)
# What a server prints once its engine works; a trainer's engine is then only begun.
READY = Pattern(
    rb"init engine \(profile|Starting (?:vLLM|uvicorn)|Available routes are|Route: /"
    rb"|Supported tasks: |Waiting for application startup|Started server process"
    rb"|Running: 0 reqs|Heartbeat successful|\[shutdown\]|Application shutdown complete"
)
# Nothing moves: a process that waits says so again and again, or its stacks are shown.
WAITING = Pattern(rb"No available shared memory broadcast block found")
IDLE = Pattern(
    rb"Avg prompt throughput: 0\.0 tokens/s, Avg generation throughput: 0\.0 tokens/s"
    rb", Running: [1-9]"
)
STACKS = Pattern(
    rb"(?m)^ *Timeout \(\d+:\d\d:\d\d\)!|\(most recent call first\):"
    rb"|^ *Thread (?:0x)?[\dA-Fa-f]+ \((?:idle|active)",
)
# Somebody lost patience.
INTERRUPT = Pattern(
    rb"(?m)(?:^|\r) *(?:\([^)]*\) *|\[\w+\]: *)*KeyboardInterrupt\s*$|(?:^|\r) *\^C"
    rb"|got signal: 2\b|Signal 2 \(SIGINT\)|[Rr]eceived (?:signal )?SIGINT",
)
# Seen at the end of a run; some programs print it after a failure as well.
ENDED = Pattern(
    rb"max_steps reached|Model saved to|Saved model to|saved successfully"
    rb"|Evaluation complete|[Aa]ll (?:tests|checks) passed"
    rb"|Avg bus bandwidth|Out of bounds values : 0 OK|Serving Benchmark Result"
    rb"|was not called before program exit|\bexits successfully"
    rb"|wandb: Find logs at|wandb: Synced |Throughput: [\d.]+ requests/s"
    rb"|^ *100%\|[^|]{0,99}\| (?P<done>\d+)/(?P<all>\d+) \["
    rb"|(?:[Ee]poch|Episode)[^|]{0,40}: 100%\|"
)
# Signs that a program failed, whatever the reason.
FAILED = Pattern(
    rb"^(?:E +)?(?:\([^)]*\) *|\[rank\d+\]: *)*Traceback \(most recent call last\)"
    rb"|^(?:\([^)]*\) *|\[rank\d+\]: *)*[\w.]*(?:Error|Exception): "
    rb"|\[\w+\.py:\d+\] [\w.]*(?:Error|Exception): "
    rb"|slurmstepd: error|CANCELLED AT "
    rb"|\b(?:FATAL|CRITICAL)\b|Segmentation fault|core dumped"
    rb"|[Ee]xit(?:ed with)? (?:code|status):? [1-9]|Error executing job with overrides"
    rb"|Fatal Python error|terminate called after|Aborted\b"
)


def last_phase(text: bytes) -> str:
    """The phase after the last marker of a text.

    Also ``first-step`` where the first step begins, and ``after-step`` after a
    completed one: what a run does there depends on what kind of job it is.
    """
    at, phase = max(
        (
            (text.rfind(mark.encode()), phase)
            for phase, marks in MARKERS.items()
            for mark in marks
        ),
        key=lambda found: found[0],
    )
    step = STEP.last(text)
    if max(at, step) >= 0:
        return phase if at > step else "after-step"
    # NCCL's own lines stand for the workers' start where nothing else is said.
    waits = NCCL.search(text) and b"Init COMPLETE" not in text
    return "actor-init" if waits else "unknown"


def ended(line: bytes) -> bool:
    """Whether the line is seen at the end of a run; of a bar, that all is done."""
    found = ENDED.search(line)
    return found is not None and found[b"done"] == found[b"all"]


_STARTS = ("config", "data", "ray-init", "actor-init", "rollout-init", "teacher-init")


def starts_after(text: bytes, at: int) -> bool:
    """Whether a phase of the start of a run begins after byte ``at``."""
    return any(
        text.find(mark.encode(), at) >= 0
        for phase in _STARTS
        for mark in MARKERS[phase]
    )
