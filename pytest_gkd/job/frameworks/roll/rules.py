"""What ROLL refuses in a configuration, each with the source that it is from.

Read at 8eb27cc2 (0.3.0 and the main branch of August 2026); paths are below roll/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pytest_gkd.job.frameworks.roll import devices
from pytest_gkd.job.frameworks.roll.job import ENGINES, PPO, TRAIN, Look, samples
from pytest_gkd.job.frameworks.roll.job import backward as backward_of
from pytest_gkd.job.looking import Fault, NotCertainError
from pytest_gkd.options import near

STRATEGIES = (*ENGINES, *TRAIN, "hf_infer", "megatron_infer", "fsdp2_infer")
PACKINGS = ("none", "load_balance")
# Settings that the two engines name differently.
TWINS = {
    "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length",
    "enforce_eager": "disable_cuda_graph",
    "max_num_seqs": "max_running_requests",
}


def _each(look: Look, rule: Callable[[Look, str], Iterator[Fault]]) -> Iterator[Fault]:
    """A rule for every worker; skips those for which it is not certain."""
    for worker in look.workers():
        try:
            yield from list(rule(look, worker))
        except NotCertainError:
            continue


def _needed(look: Look) -> Iterator[tuple[str, str]]:
    """The workers that need GPUs, and why the job has them."""
    if look.rollout:
        yield look.rollout, "it generates"
    if look.is_rollout:
        return
    yield look.trainer, "it is trained"
    for worker in look.teachers():
        yield worker, "it is the teacher"
    has_reference = look.is_ppo or look.root == "DPOConfig"
    if has_reference and not look.teachers() and look.has_reference():
        kl = look("init_kl_coef") if look.is_ppo else None
        why = (
            f"init_kl_coef = {kl} and enable_reference want it" if kl else "it is read"
        )
        yield "reference", why
    if look.is_ppo and not look.is_pure and look("adv_estimator") == "gae":
        yield "critic", "adv_estimator=gae trains it"


# -- workers -----------------------------------------------------------------------


def _mapping(look: Look, worker: str) -> Iterator[Fault]:
    """configs/worker_config.py, WorkerConfig.__post_init__."""
    key = f"{worker}.device_mapping"
    text = look(key)
    if text is None:
        return
    form = 'a text such as "list(range(0, 8))" or "[0, 1]"'
    if not isinstance(text, str):
        yield key, f"{key} = {str(text)[:80]}: ROLL gives it to eval, and takes {form}"
        return
    try:
        found = devices.numbers(text)
    except devices.NotReadError:
        return
    except SyntaxError:
        yield key, f"{key} = {text[:80]} is no Python expression; expected is {form}"
        return
    if any(number < 0 for number in found):
        yield key, f"{key} = {text[:80]} has a GPU below 0"
    each = look.per_worker(worker)
    if len(found) % each:
        sizes = "tensor_parallel_size * pipeline_parallel_size"
        what = sizes if look.strategy(worker) == "vllm" else "num_gpus_per_worker"
        line = (
            f"{key} has {len(found)} GPUs, which cannot be divided by {what} = {each}"
        )
        yield key, line


def _mappings(look: Look) -> Iterator[Fault]:
    yield from _each(look, _mapping)


def _missing(look: Look) -> Iterator[Fault]:
    """distributed/executor/cluster.py: a worker without GPUs has no size."""
    for worker, why in _needed(look):
        key = f"{worker}.device_mapping"
        if look(key) is None:
            yield key, f"{key} is not given, and ROLL needs it: {why}"
        elif not look.strategy(worker):
            key = f"{worker}.strategy_args"
            yield key, f"{key} is not given, and ROLL needs it: {why}"


def _strategies(look: Look) -> Iterator[Fault]:
    """configs/base_config.py, BaseConfig; distributed/strategy/factory.py."""
    for worker, _ in _needed(look):
        key, name = f"{worker}.strategy_args.strategy_name", look.strategy(worker)
        if not name:
            continue
        if name not in STRATEGIES:
            known = f"known are {', '.join(STRATEGIES)}{near(name, STRATEGIES)}"
            yield key, f"{key}={name}: {known}"
        elif worker == look.rollout and name not in ENGINES:
            yield key, f"{key}={name}: what generates is run by vllm or sglang"
        elif worker == look.trainer and name not in TRAIN:
            yield key, f"{key}={name}: what is trained needs {' or '.join(TRAIN)}"


def _split(look: Look, worker: str) -> Iterator[Fault]:
    """utils/config_utils.py; Megatron-Core's own check; fsdp2_strategy.py."""
    found, name = look.gpus(worker), look.strategy(worker)
    split = look.split(worker)
    key = f"{worker}.device_mapping"
    if not found or split < 2:
        return
    if len(found) % split:
        of = "TP * PP * CP" if name.startswith("megatron") else "ulysses_size"
        yield (
            key,
            f"{key} has {len(found)} GPUs, which cannot be divided by {of} = {split}",
        )
    if name.startswith("fsdp2"):
        size = look.whole_part(worker, "fsdp_size")
        if size < split:
            key = f"{worker}.strategy_args.strategy_config.fsdp_size"
            yield key, f"{key} = {size} must be at least ulysses_size = {split}"


def _splits(look: Look) -> Iterator[Fault]:
    yield from _each(look, _split)


def _experts(look: Look, worker: str) -> Iterator[Fault]:
    """distributed/strategy/fsdp2_strategy.py, initialize."""
    if not look.strategy(worker).startswith("fsdp2"):
        return
    experts, world = look.whole_part(worker, "ep_size"), len(look.gpus(worker))
    split = experts * look.whole_part(worker, "efsdp_size")
    if experts > 1 and world and world % split:
        key = f"{worker}.strategy_args.strategy_config.ep_size"
        yield key, f"efsdp_size * ep_size = {split} must divide the {world} GPUs"


def _all_experts(look: Look) -> Iterator[Fault]:
    yield from _each(look, _experts)


def _engine(look: Look, worker: str) -> Iterator[Fault]:
    """distributed/strategy/sglang_strategy.py, initialize."""
    name = look.strategy(worker)
    start = f"{worker}.strategy_args.strategy_config"
    if name not in ENGINES or not look.config.is_section(start):
        return
    if name == "sglang":
        each = look.per_worker(worker)
        tensor = look.whole_part(worker, "tensor_parallel_size", each)
        size = tensor * look.whole_part(worker, "pipeline_parallel_size")
        if size % each:
            key = f"{start}.tensor_parallel_size"
            line = f"TP * PP = {size} of SGLang must be a multiple of "
            yield key, f"{line}{worker}.num_gpus_per_worker = {each}"
        if not look.config.has(f"{start}.mem_fraction_static"):
            yield start, f"{start}.mem_fraction_static has to be given for sglang"


def _engines(look: Look) -> Iterator[Fault]:
    yield from _each(look, _engine)


def twins(look: Look) -> Iterator[Fault]:
    """Names of the other engine, which are passed to the engine unchanged."""
    for worker in look.workers():
        name = look.strategy(worker)
        start = f"{worker}.strategy_args.strategy_config"
        for ours, theirs in TWINS.items() if name in ENGINES else ():
            wrong, right = (theirs, ours) if name == "vllm" else (ours, theirs)
            key = f"{start}.{wrong}"
            if look.config.has(key):
                yield key, f"{key}: {name} has no {wrong}, but {right}"


def _replay(look: Look, worker: str) -> Iterator[Fault]:
    """configs/worker_config.py, WorkerConfig.__post_init__."""
    key = f"{worker}.router_replay.mode"
    if look(key) == "R2" and look.strategy(worker):
        yield key, f"{key}=R2 is not implemented; R3 is"


def _columns(look: Look, worker: str) -> Iterator[Fault]:
    """configs/data_args.py, DataArguments.__post_init__."""
    names = [f"{worker}.data_args.{name}" for name in ("messages", "prompt")]
    if all(look(name) is not None for name in names):
        yield names[1], f"{names[0]} and {names[1]} exclude each other"


def _batching(look: Look, worker: str) -> Iterator[Fault]:
    """utils/dynamic_batching.py, utils/sequence_packing.py."""
    is_trained = worker == look.trainer
    for way in ("train", "infer") if is_trained else ("infer",):
        key = f"{worker}.max_tokens_per_microbatch_in_{way}"
        if look.is_on(f"{worker}.use_dynamic_batching_in_{way}") and not look(key):
            yield key, f"{key} has to be given with use_dynamic_batching_in_{way}=true"
    start = f"{worker}.sequence_packing_args"
    kind = look(f"{start}.algorithm")
    if not look.is_on(f"{worker}.use_sequence_packing"):
        return
    if kind not in PACKINGS:
        line = f"{start}.algorithm={kind}: known are {', '.join(PACKINGS)}"
        yield f"{start}.algorithm", f"{line}{near(str(kind), PACKINGS)}"
    for way in ("train", "forward") if is_trained else ("forward",):
        key = f"{start}.max_packed_sequence_length_{way}"
        if kind == "load_balance" and look(key) is None:
            yield key, f"{key} has to be given with algorithm=load_balance"


def _workers(look: Look) -> Iterator[Fault]:
    for rule in (_replay, _columns, _batching):
        yield from _each(look, rule)


# -- lengths and batches -----------------------------------------------------------


def _lengths(look: Look) -> Iterator[Fault]:
    """configs/base_config.py, BaseConfig.__post_init__."""
    if not look("sequence_length") and not look("response_length"):
        yield "sequence_length", "response_length or sequence_length has to be given"
        return
    names = ("val_prompt_length", "val_sequence_length")
    given = [look(name) is not None for name in names]
    if any(given) and not all(given):
        yield names[given.index(True)], f"{' and '.join(names)} go together"
    if look.root == "RLVRConfig":
        prompt, longest = look.whole("prompt_length"), look.longest()
        if longest <= prompt:
            line = f"sequence_length = {longest} leaves no token for a response behind "
            yield "sequence_length", f"{line}prompt_length = {prompt}"


def _rollout_batch(look: Look) -> Iterator[Fault]:
    """utils/config_utils.py, validate_megatron_batch_size."""
    is_judged = look.is_ppo or look.root == "DPOConfig"
    if not is_judged or not look.strategy(look.trainer).startswith("megatron"):
        return
    batch, ranks = look.whole("rollout_batch_size"), look.replicas(look.trainer)
    if batch % ranks:
        line = f"rollout_batch_size = {batch} cannot be divided by the {ranks} "
        yield "rollout_batch_size", f"{line}data-parallel ranks of {look.trainer}"


def _update(look: Look) -> Iterator[Fault]:
    """pipeline/base_worker.py, train_step; scheduler/protocol.py, make_iterator."""
    start = look.trainer
    if look.root != "RLVRConfig" or look.is_rollout:
        return
    if look.is_on(f"{start}.use_dynamic_batching_in_train"):
        return
    count, ranks = samples(look), look.replicas(start)
    whole = look.whole("rollout_batch_size") * (count or 1)
    own, backward = whole // ranks, backward_of(look)
    if whole % ranks == 0 and own % backward:
        key = f"{start}.training_args.gradient_accumulation_steps"
        line = (
            f"a rank has rollout_batch_size * samples / ranks = {own} samples, which "
        )
        more = "cannot be divided by per_device_train_batch_size * "
        yield key, f"{line}{more}gradient_accumulation_steps = {backward}"


def _steps(look: Look) -> Iterator[Fault]:
    """pipeline/rlvr/rlvr_pipeline.py; pipeline/agentic/agentic_config.py."""
    if look.root not in (*PPO, "DPOConfig"):
        return
    steps = look.whole("max_steps")
    if steps <= 0 and not (steps == -1 and look.root == "AgenticConfig"):
        yield "max_steps", f"max_steps = {steps} must be above 0"


def _profilers(look: Look) -> Iterator[Fault]:
    """configs/base_config.py, BaseConfig.__post_init__."""
    names = ("profiler_timeline", "profiler_memory")
    if all(look.is_on(name) for name in names):
        yield names[1], f"{' and '.join(names)} exclude each other"


def _async(look: Look) -> Iterator[Fault]:
    """configs/base_config.py, PPOConfig; pipeline/rlvr/rlvr_config.py."""
    if not look.is_ppo:
        return
    key = "async_generation_ratio"
    ratio, level = look.number(key), look.whole("generate_opt_level")
    if ratio and level != 1:
        line = f"{key} = {ratio} needs generate_opt_level = 1, which is {level}"
        yield "generate_opt_level", line
    if look.root == "RLVRConfig" and 0 < ratio < 1:
        yield key, f"{key} = {ratio} must be 0, or at least 1"


Rule = Callable[[Look], Iterator[Fault]]
REFUSED: tuple[Rule, ...] = (
    _mappings,
    _missing,
    _strategies,
    _splits,
    _all_experts,
    _engines,
    _workers,
    _lengths,
    _rollout_batch,
    _update,
    _steps,
    _profilers,
    _async,
)
