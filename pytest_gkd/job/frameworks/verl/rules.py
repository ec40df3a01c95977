"""verl's own rules on sizes: what fails at its start, after a rollout, or silently.

Read in verl 0.8.0, 0.9.0 and 0.9.1; each rule names its place in the sources. 0.9 has a
second trainer (trainer/ppo/v1, its default), which pads batches that do not divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pytest_gkd.job import model_files
from pytest_gkd.job.findings import Finding
from pytest_gkd.job.overrides import Given, Job

CONFLICT = "config.invalid-combination"
MISSING = "config.missing-value"
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
LOSS = "distillation.distillation_loss"
TEACHERS = "distillation.teacher_models"
TEACHER = f"{TEACHERS}.teacher_model"
# trainer/distillation/losses.py
TOPK_LOSSES = ("forward_kl_topk",)
UNGIVEN = "???"  # OmegaConf's mark of a value that must be given


def broken(job: Job) -> Iterator[Finding]:
    """The rules of main_ppo that a job breaks."""
    return judged(RULES, job)


class Sizes:
    """The values of a job by their keys."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._read: dict[str, Given] = {}
        teachers = {key.split(".")[2] for key in job.given(f"{TEACHERS}.*.*")}
        self.more_teachers = teachers - {"teacher_model"}
        self.has_first = "teacher_model" in teachers

    def __call__(self, key: str) -> Any:
        """A value; Unsure if it cannot be determined or is not in this release."""
        given = self._read[key] = self._job.find(key)
        if given.needs:
            raise UnsureError
        return given.value

    def is_given(self, key: str) -> bool:
        """Whether the user gives the key."""
        return self._job.find(key).source == "user"

    def has(self, key: str) -> bool:
        """Whether the release has the key."""
        return self._job.knows(key)

    def has_one_teacher(self) -> bool:
        """Whether it distils from a single teacher, under verl's name for it."""
        return not self.more_teachers and bool(self("distillation.enabled"))

    def whole(self, *keys: str) -> list[int]:
        """Values that are integers; Unsure if one is not."""
        values = [self(key) for key in keys]
        if not all(type(value) is int for value in values):
            raise UnsureError
        return values

    def fault(
        self, message: str, level: str = "error", cause: str = CONFLICT
    ) -> Finding:
        """A finding at the last key that was read and that the user gave."""
        given = [(k, one) for k, one in self._read.items() if one.word is not None]
        key, one = given[-1] if given else (next(iter(self._read), ""), None)
        word = one.word if one else None
        file, line = (word.file, word.line) if word else ("", 0)
        return Finding(cause, level, message, file, line, key)


class UnsureError(Exception):
    """A value that a rule needs cannot be determined."""


Rule = Callable[[Sizes], Iterator[Finding]]
RULES: list[Rule] = []


def judged(rules: Iterable[Rule], job: Job) -> Iterator[Finding]:
    """What the rules say of a job, each only if what it needs is certain."""
    for rule in rules:
        try:
            yield from list(rule(Sizes(job)))
        except UnsureError:
            continue


def _rule(body: Rule) -> Rule:
    RULES.append(body)
    return body


def _data_parallel(sizes: Sizes) -> tuple[int, int]:
    """The trainer's GPUs, and the number of parts they split a batch into.

    FSDP's get_data_parallel_size is the world size divided by Ulysses'
    (workers/engine/fsdp), Megatron's by tensor, pipeline and context parallelism.
    """
    nodes, per_node = sizes.whole("trainer.nnodes", "trainer.n_gpus_per_node")
    strategy = sizes(f"{ACTOR}.strategy")
    if strategy in ("fsdp", "fsdp2"):
        (split,) = sizes.whole(f"{ACTOR}.ulysses_sequence_parallel_size")
    elif strategy == "megatron":
        parts = ("tensor_model", "pipeline_model", "context")
        keys = [f"{ACTOR}.megatron.{part}_parallel_size" for part in parts]
        tensor, pipeline, context = sizes.whole(*keys)
        split = tensor * pipeline * context
    else:
        raise UnsureError
    if split <= 0:
        raise UnsureError
    return nodes * per_node, split


@_rule
def _world(sizes: Sizes) -> Iterator[Finding]:
    # utils/config.py, validate_config; FSDP: init_device_mesh over (dp, sp).
    gpus, split = _data_parallel(sizes)
    if gpus % split:
        yield sizes.fault(
            f"the trainer has {gpus} GPUs, and each model copy takes {split}: "
            f"{gpus} is not a multiple of {split}"
        )


@_rule
def _mini_batch(sizes: Sizes) -> Iterator[Finding]:
    # workers/engine_workers.py, train_mini_batch: mini_batch_size is the key's value
    # times n.
    gpus, split = _data_parallel(sizes)
    mini, samples = sizes.whole(f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n")
    parts = gpus // split
    if parts and mini * samples % parts:
        yield sizes.fault(
            f"a mini batch of {mini} prompts times {samples} samples cannot be "
            f"divided evenly among {parts} data-parallel ranks; verl finds that "
            "out after the first rollout"
        )


@_rule
def _batch(sizes: Sizes) -> Iterator[Finding]:
    # workers/config/actor.py, ActorConfig.validate (only without dynamic batch size);
    # utils/tensordict_utils.py, make_iterator; trainer/ppo/v1/trainer_base.py pads in
    # _balance_batch.
    keys = ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    train, mini = sizes.whole(*keys)
    if mini <= 0 or train % mini == 0:
        return
    text = f"train_batch_size {train} is not a multiple of ppo_mini_batch_size {mini}"
    if train < mini and not sizes(f"{ACTOR}.use_dynamic_bsz"):
        yield sizes.fault(f"{text}, and is less: verl refuses it")
    elif _pads(sizes):
        (samples,) = sizes.whole(f"{ROLLOUT}.n")
        more = -train % mini * samples
        text += f": each step computes {more} sequences of padding beside"
        yield sizes.fault(f"{text} {train * samples} real ones", "warning")
    else:
        yield sizes.fault(f"{text}; verl finds that out after the first rollout")


@_rule
def _agent_workers(sizes: Sizes) -> Iterator[Finding]:
    # experimental/agent_loop/agent_loop.py, generate_sequences; protocol.py, chunk.
    if _pads(sizes):
        return
    keys = ("data.train_batch_size", f"{ROLLOUT}.n", f"{ROLLOUT}.agent.num_workers")
    train, samples, workers = sizes.whole(*keys)
    if workers > 0 and train * samples % workers:
        yield sizes.fault(
            f"train_batch_size {train} times {samples} samples cannot be divided "
            f"evenly among {workers} agent loop workers ({keys[2]}); verl finds "
            "that out at the first rollout"
        )


def _pads(sizes: Sizes) -> bool:
    """Whether the trainer pads a batch that does not divide."""
    return sizes.has("trainer.use_v1") and bool(sizes("trainer.use_v1"))


@_rule
def _real_batch(sizes: Sizes) -> Iterator[Finding]:
    # utils/config.py, validate_config.
    gpus, split = _data_parallel(sizes)
    if sizes(f"{ACTOR}.use_dynamic_bsz"):
        return
    least = gpus
    if sizes(f"{ACTOR}.strategy") == "megatron":
        least = gpus // split * sizes.whole(f"{ACTOR}.ppo_micro_batch_size_per_gpu")[0]
    train, samples = sizes.whole("data.train_batch_size", f"{ROLLOUT}.n")
    if least and train * samples % least:
        yield sizes.fault(
            f"train_batch_size {train} times {samples} samples is not a multiple of "
            f"{least}, as verl requires without use_dynamic_bsz"
        )


@_rule
def _micro_batches(sizes: Sizes) -> Iterator[Finding]:
    # workers/config/actor.py, __post_init__; utils/config.py, check_mutually_exclusive.
    if sizes(f"{ACTOR}.use_dynamic_bsz"):
        return
    names = [f"{ACTOR}.ppo_micro_batch_size", f"{ROLLOUT}.log_prob_micro_batch_size"]
    if sizes(f"{ACTOR}.use_kl_loss") or sizes("algorithm.use_kl_in_reward"):
        names.append(f"{REF}.log_prob_micro_batch_size")
    for name in names:
        given = [sizes(name) is not None, sizes(f"{name}_per_gpu") is not None]
        if all(given):
            yield sizes.fault(f"{name} and {name}_per_gpu are mutually exclusive")
        elif not any(given):
            yield sizes.fault(
                f"{name}_per_gpu has no value, and use_dynamic_bsz is not on: give one "
                "of the two",
                cause=MISSING,
            )


@_rule
def _sequence_parallel(sizes: Sizes) -> Iterator[Finding]:
    # workers/config/actor.py, FSDPActorConfig.validate.
    key = "actor_rollout_ref.model.use_remove_padding"
    (split,) = sizes.whole(f"{ACTOR}.ulysses_sequence_parallel_size")
    if sizes(f"{ACTOR}.strategy") in ("fsdp", "fsdp2") and split > 1 and not sizes(key):
        yield sizes.fault(f"ulysses_sequence_parallel_size {split} needs {key}=True")


@_rule
def _rollout(sizes: Sizes) -> Iterator[Finding]:
    # workers/config/rollout.py, __post_init__; workers/engine_workers.py, init_model.
    if sizes(f"{ROLLOUT}.mode") == "sync":
        yield sizes.fault(f"{ROLLOUT}.mode=sync is gone; verl has only async")
    names = ("tensor_model_parallel", "data_parallel", "pipeline_model_parallel")
    tensor, data, pipeline = sizes.whole(*(f"{ROLLOUT}.{name}_size" for name in names))
    if pipeline > 1 and sizes(f"{ROLLOUT}.name") in ("vllm", "sglang"):
        yield sizes.fault(
            f"pipeline_model_parallel_size is {pipeline}: verl's rollout has none"
        )
    (experts,) = sizes.whole(f"{ROLLOUT}.expert_parallel_size")
    name = sizes(f"{ROLLOUT}.name")
    if name != "trtllm" and experts > 1 and experts != tensor * data:
        yield sizes.fault(
            f"expert_parallel_size {experts} must be tensor_model_parallel_size "
            f"{tensor} times data_parallel_size {data}"
        )
    own = sizes.whole(f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node")
    shared = sizes.whole("trainer.nnodes", "trainer.n_gpus_per_node")
    nodes, per_node = own if own[0] else shared
    replica = tensor * data * pipeline
    if replica > 0 and nodes * per_node % replica:
        yield sizes.fault(
            f"{nodes * per_node} GPUs of the rollout are not a multiple of the "
            f"{replica} that one replica takes"
        )


@_rule
def _engine(sizes: Sizes) -> Iterator[Finding]:
    # trainer/config/rollout/rollout.yaml; vLLM takes a share above 0 and up to 1.
    if sizes(f"{ROLLOUT}.name") == UNGIVEN:
        yield sizes.fault(
            f"{ROLLOUT}.name must be given, for example vllm", cause=MISSING
        )
    share = sizes(f"{ROLLOUT}.gpu_memory_utilization")
    if isinstance(share, int | float) and not 0 < share <= 1:
        yield sizes.fault(
            f"gpu_memory_utilization {share} is not a fraction above 0 and up to 1"
        )


@_rule
def _tokens(sizes: Sizes) -> Iterator[Finding]:
    # utils/seqlen_balancing.py, rearrange_micro_batches: asserted on each batch.
    if not sizes(f"{ACTOR}.use_dynamic_bsz"):
        return
    if sizes(f"{ACTOR}.strategy") not in ("fsdp", "fsdp2"):
        return
    keys = ("data.max_prompt_length", "data.max_response_length")
    prompt, response = sizes.whole(*keys)
    split, most = sizes.whole(
        f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.ppo_max_token_len_per_gpu"
    )
    if most * split < prompt + response:
        yield sizes.fault(
            f"ppo_max_token_len_per_gpu {most} is less than prompt {prompt} and "
            f"response {response}: verl ends at the first longer sequence"
        )


@_rule
def _lengths(sizes: Sizes) -> Iterator[Finding]:
    # vllm_async_server.py, generate: max_tokens is cut to what remains of the context.
    keys = ("data.max_prompt_length", "data.max_response_length")
    prompt, response = sizes.whole(*keys)
    (most,) = sizes.whole(f"{ROLLOUT}.max_model_len")
    if prompt >= most:
        yield sizes.fault(
            f"max_model_len {most} leaves no room for a response after a prompt of "
            f"{prompt}"
        )
    elif prompt + response > most:
        yield sizes.fault(
            f"max_model_len {most} is less than prompt {prompt} and response "
            f"{response}: verl cuts the responses of long prompts short, silently",
            "warning",
        )


@_rule
def _truncation(sizes: Sizes) -> Iterator[Finding]:
    # utils/dataset/rl_dataset.py keeps data.truncation, which nothing reads; it is
    # experimental/agent_loop/agent_loop.py, apply_chat_template, that cuts.
    if sizes("data.filter_overlong_prompts"):
        return
    side = sizes("data.truncation")
    if sizes.is_given("data.truncation") and side != "left":
        yield sizes.fault(
            f"nothing reads data.truncation={side}: a text prompt of more than "
            "max_prompt_length tokens loses its beginning (left), with a line in the "
            "log; data.filter_overlong_prompts=True leaves it out",
            "warning",
        )


@_rule
def _resume(sizes: Sizes) -> Iterator[Finding]:
    # trainer/ppo/ray_trainer.py, trainer/ppo/v1/trainer_base.py (main_ppo_sync.py in
    # 0.8.0) and experimental/fully_async_policy, _load_checkpoint: all in fit.
    when = "verl finds that out only after all workers have loaded their models"
    mode, place = sizes("trainer.resume_mode"), sizes("trainer.resume_from_path")
    if mode != "resume_path":
        if place is not None and mode in ("auto", "disable"):
            yield sizes.fault(
                f"nothing reads trainer.resume_from_path={place}: with trainer."
                f"resume_mode={mode} verl does not look at it; resume_path does",
                "warning",
            )
    elif not isinstance(place, str):
        text = "has no value" if place is None else f"is {place}, not a path"
        yield sizes.fault(
            f"trainer.resume_mode=resume_path needs trainer.resume_from_path, which "
            f"{text} (resume ckpt must be str type); {when}",
            cause=MISSING,
        )
    elif "global_step_" not in place:
        yield sizes.fault(
            f"trainer.resume_from_path={place} does not contain global_step_ (resume "
            f"ckpt must specify the global_steps); {when}"
        )
    elif not _is_int(step := place.split("global_step_")[-1]):
        yield sizes.fault(
            f"trainer.resume_from_path={place} must end in global_step_ and the number "
            f"of the step: verl reads {step!r} as that number; {when}"
        )


def _is_int(text: str) -> bool:
    """Whether Python's int accepts the text."""
    try:
        int(text)
    except ValueError:
        return False
    return True


@_rule
def _teacher(sizes: Sizes) -> Iterator[Finding]:
    # workers/config/distillation.py, _resolve_teacher_models, check_configured.
    given = sizes(f"{TEACHER}.model_path")
    if sizes.more_teachers:
        if sizes.has_first:
            yield sizes.fault(
                f"verl drops teacher_model as soon as there are others "
                f"({', '.join(sorted(sizes.more_teachers))}): give it another name"
            )
        return
    if not sizes("distillation.enabled"):
        if given:
            yield sizes.fault(
                f"the teacher {given} is not used: distillation.enabled is not True",
                "warning",
            )
        return
    if given is None:
        yield sizes.fault(f"{TEACHER}.model_path has no value", cause=MISSING)


@_rule
def _teacher_gpus(sizes: Sizes) -> Iterator[Finding]:
    # trainer/main_ppo*.py (pool); workers/config/distillation.py, __post_init__.
    if not sizes.has_one_teacher():
        return
    keys = ("distillation.nnodes", "distillation.n_gpus_per_node")
    nodes, per_node = sizes.whole(*keys)
    if nodes <= 0 or per_node <= 0:
        yield sizes.fault(
            "the teacher has no GPUs: distillation.nnodes and distillation."
            f"n_gpus_per_node are {nodes} and {per_node}",
            cause=MISSING,
        )
        return
    # Pipeline parallelism, the third factor, is refused for a rollout.
    names = ("tensor_model_parallel", "data_parallel")
    tensor, data = sizes.whole(*(f"{TEACHER}.inference.{name}_size" for name in names))
    replica = tensor * data
    if replica > 0 and nodes * per_node % replica:
        yield sizes.fault(
            f"the teacher's pool of {nodes * per_node} GPUs is not a multiple of the "
            f"{replica} that one replica of it takes"
        )


@_rule
def _teacher_length(sizes: Sizes) -> Iterator[Finding]:
    # workers/config/distillation.py, validate_and_prepare_for_distillation.
    if not sizes.has_one_teacher():
        return
    keys = ("data.max_prompt_length", "data.max_response_length")
    prompt, response = sizes.whole(*keys)
    (most,) = sizes.whole(f"{TEACHER}.inference.max_model_len")
    if prompt + response + 1 > most:
        yield sizes.fault(
            f"the teacher's max_model_len {most} is less than prompt {prompt}, "
            f"response {response} and one more token"
        )


@_rule
def _loss(sizes: Sizes) -> Iterator[Finding]:
    # workers/config/distillation.py, DistillationLossConfig.__post_init__.
    if not sizes("distillation.enabled"):
        return
    mode = sizes(f"{LOSS}.loss_mode")
    by_policy = sizes(f"{LOSS}.use_policy_gradient")
    if mode == "k1" and not by_policy:
        yield sizes.fault(
            "loss_mode k1 without use_policy_gradient has a gradient that does not "
            "depend on the teacher: verl refuses it"
        )
    if mode in TOPK_LOSSES and by_policy:
        yield sizes.fault(
            f"loss_mode {mode} with use_policy_gradient uses the sampled token only, "
            "and hardly any of the top-k: verl means it for use_policy_gradient=False",
            "warning",
        )


@_rule
def _log_probabilities(sizes: Sizes) -> Iterator[Finding]:
    # workers/config/distillation.py, _validate_topk_logprobs; SGLang has no such bound.
    if not sizes.has_one_teacher():
        return
    if sizes(f"{LOSS}.loss_mode") not in TOPK_LOSSES:
        return
    if sizes(f"{LOSS}.topk") is None:
        yield sizes.fault(f"{LOSS}.topk has no value", cause=MISSING)
        return
    engine = sizes(f"{TEACHER}.inference.name")
    if engine not in ("vllm", "sglang"):
        yield sizes.fault(
            f"the teacher's engine is {engine}: for a loss of the top-k verl takes "
            "vllm and sglang"
        )
        return
    if engine == "sglang":
        return
    (top,) = sizes.whole(f"{LOSS}.topk")
    (most,) = sizes.whole(f"{TEACHER}.inference.engine_kwargs.vllm.max_logprobs")
    if most < top:
        yield sizes.fault(
            f"the teacher's engine gives {most} log-probabilities a token "
            f"(max_logprobs), and the loss takes {top} (topk)"
        )


@_rule
def _tokenizers(sizes: Sizes) -> Iterator[Finding]:
    # The teacher scores the student's token ids, and its top-k ids are looked up in the
    # student's logits (trainer/distillation/losses.py); nothing compares the two.
    if not sizes.has_one_teacher():
        return
    student = sizes("actor_rollout_ref.model.path")
    teacher = sizes(f"{TEACHER}.model_path")
    said, in_earnest = model_files.other_tokenizer(student, teacher)
    if said:
        yield sizes.fault(
            f"{said}: the teacher {teacher} is given the student's token ids, and verl "
            "does not compare the two",
            "error" if in_earnest else "warning",
            "tokenizer.vocab-mismatch",
        )
