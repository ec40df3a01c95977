"""Holds the plan of a Megatron trainer against what its ranks really allocate.

    GKD_UPSTREAM=DIR python tools/memory_megatron.py      # prints the table
    GKD_UPSTREAM=DIR python tools/memory_megatron.py docs/memory-megatron.md

Wants ``pip install megatron-core==0.16.1`` beside torch and transformers. Two processes
under gloo, on a CPU, where the bytes of all tensors of each rank are counted:
megatron-core's GPTModel, DistributedDataParallel, distributed optimizer and schedules,
its parallel groups as they are, attention by torch's fused kernel, and slime's function
of log-probabilities, which is read from its source under DIR. The plan sees the models'
files alone.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import memory_page
from memory_page import Line
from memory_ranks import Counted

from pytest_gkd.job import megatron_memory, models
from pytest_gkd.job.megatron_memory import Megatron
from pytest_gkd.job.training_memory import total

LOSS = "THUDM+slime/slime/utils/ppo_utils.py"
RANKS = 2
TOKENS = 512
MICRO_BATCHES = 2
SIZES: dict[str, Any] = memory_page.SIZES | {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "vocab_size": 4096,
}
PARTS = ("weights", "gradients", "master copies", "optimizer states")


class Case(NamedTuple):
    """A model and how it is divided among the ranks."""

    model: str
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 0
    chunks: int = 1
    sequence_parallel: bool = False
    recompute: str = ""
    layers: int = 1
    gradients: str = "float32"
    fuses_gates: bool = True


CASES = (
    Case("llama", tensor=2, sequence_parallel=True),
    Case("llama", pipeline=2),
    Case("qwen3", recompute="full"),
    Case("qwen3", tensor=2, recompute="full", layers=2),
    Case("qwen2", pipeline=2, chunks=2),
    Case("qwen2", tensor=2, gradients="bfloat16"),
    Case("qwen3_moe", expert=2),
    Case("qwen3_moe", tensor=2, expert=2, expert_tensor=1, sequence_parallel=True),
    Case("qwen3_moe", tensor=2, sequence_parallel=True, recompute="full"),
    Case("qwen3", fuses_gates=False),
    Case("qwen3_moe", expert=2, fuses_gates=False),
)
TEXT = f"""\
Two ranks under gloo on a CPU, {SIZES["num_hidden_layers"]} layers, {MICRO_BATCHES} \
micro-batches of {TOKENS} tokens:
megatron-core 0.16.1's modules, buffers, distributed optimizer and schedules, and
slime's loss. Start is the most while they are made, update the most in a second
step, beyond what that takes beside weights, gradients and states. Error in per
cent of the measured. Transformer Engine was not there: attention and norms are
stand-ins that keep what its own keep, and gradients are added up behind the
kernels that make them."""
# What the first judgement gave, before anything was mended for it.
FIRST = """\
Judged once before anything was mended for it: start 3.1 on average and 18.9 at
worst, all else as below. Wrong were experts that are not divided among ranks of
their own, which are in the other weights' buffer, and this tool, which wrapped a
chunk before the next was made. The cases without fused gates came later and were
judged once, too: nothing was mended for them."""


def sizes_of(name: str) -> models.Model:
    """What the plan sees: the files of a model of that architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    own = (memory_page.MODELS | memory_page.HELD_OUT)[name]
    config = AutoConfig.for_model(name, **SIZES | own)
    model = AutoModelForCausalLM.from_config(config)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, is_main_process=True)
        return models.read(Path(directory))


def upstream_loss() -> Any:
    """slime's calculate_log_probs_and_entropy, of its source."""
    import torch
    import torch.distributed as dist

    path = Path(os.environ["GKD_UPSTREAM"]) / LOSS
    wanted = {
        *("_maybe_all_reduce", "_get_vocab_parallel_rank_size"),
        *("_VocabParallelLogProbEntropy", "_calculate_log_probs_and_entropy_chunk"),
        "calculate_log_probs_and_entropy",
    }
    tree = ast.parse(path.read_text("utf-8"))
    found = [node for node in tree.body if getattr(node, "name", "") in wanted]
    space: dict[str, Any] = {"torch": torch, "dist": dist}
    for node in found:
        exec(compile(ast.unparse(node), str(path), "exec"), space)  # noqa: S102 - ours
    return space["calculate_log_probs_and_entropy"]


def fused_attention() -> Any:
    """A core attention that keeps what flash attention does."""
    from megatron.core.transformer.module import MegatronModule
    from torch.nn.functional import scaled_dot_product_attention

    class Attention(MegatronModule):  # type: ignore[misc]
        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__(config=config)

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
            one, two, three = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            found = scaled_dot_product_attention(
                one, two, three, is_causal=True, enable_gqa=True
            )
            return found.permute(2, 0, 1, 3).flatten(2)

    return Attention


def fused_norm() -> Any:
    """An RMSNorm that keeps what Transformer Engine's does: its input, and a float32
    for each token."""
    import torch

    class Kept(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, given: Any, weight: Any, eps: float) -> Any:
            root = given.float().pow(2).mean(-1, keepdim=True).add(eps).rsqrt()
            ctx.save_for_backward(given, weight, root)
            return (given * root).to(given.dtype) * weight

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (gradient,) = gradients
            given, weight, root = ctx.saved_tensors
            normed = given * root
            wide = gradient * weight
            mean = (wide * normed).mean(-1, keepdim=True)
            own = ((wide - normed * mean) * root).to(given.dtype)
            rows = tuple(range(gradient.dim() - 1))
            return own, (gradient * normed).sum(rows).to(weight.dtype), None

    class Norm(torch.nn.Module):  # type: ignore[misc]
        def __init__(
            self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any
        ) -> None:
            super().__init__()
            self.eps = eps
            self.weight = torch.nn.Parameter(torch.ones(hidden_size))
            self.weight.sequence_parallel = config.sequence_parallel

        def forward(self, given: Any) -> Any:
            return Kept.apply(given, self.weight, self.eps)

    return Norm


def made(case: Case) -> list[Any]:
    """This rank's part of the model, wrapped; several parts with virtual stages."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = SIZES | (memory_page.MODELS | memory_page.HELD_OUT)[case.model]
    experts = config.get("num_experts")
    is_full = case.recompute == "full"
    shape = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        ffn_hidden_size=config["intermediate_size"],
        moe_ffn_hidden_size=config.get("moe_intermediate_size"),
        num_moe_experts=experts,
        moe_router_topk=config.get("num_experts_per_tok", 2),
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - no password
        moe_router_load_balancing_type="none",
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=case.model == "qwen2",
        qk_layernorm=case.model.startswith("qwen3"),
        hidden_dropout=0,
        attention_dropout=0,
        bias_activation_fusion=case.fuses_gates,
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        expert_model_parallel_size=case.expert,
        expert_tensor_parallel_size=case.expert_tensor or case.tensor,
        sequence_parallel=case.sequence_parallel,
        recompute_granularity="full" if is_full else None,
        recompute_method="uniform" if is_full else None,
        recompute_num_layers=case.layers if is_full else None,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(
        experts, False, qk_layernorm=shape.qk_layernorm, normalization="RMSNorm"
    )
    norm = fused_norm()
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = fused_attention()
    if shape.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    wrap = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=case.gradients == "float32",
    )
    found = []
    for chunk in range(case.chunks):
        place: dict[str, Any] = {"vp_stage": chunk} if case.chunks > 1 else {}
        count = get_num_layers_to_build(shape, chunk if case.chunks > 1 else None)
        block = TransformerBlockSubmodules([spec] * count, norm)
        model = GPTModel(
            shape,
            block,
            vocab_size=config["vocab_size"],
            max_sequence_length=TOKENS,
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=False, **place
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=False, **place
            ),
            share_embeddings_and_output_weights=config["tie_word_embeddings"],
            position_embedding_type="rope",
            **place,
        )
        found.append(Float16Module(shape, model.bfloat16()))
    for number, model in enumerate(found):
        found[number] = DistributedDataParallel(shape, wrap, model)
    return found


def measured(case: Case) -> dict[str, int]:
    """What this rank has of each part, and at most in its second step."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parallel_state.initialize_model_parallel(
        case.tensor,
        case.pipeline,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        expert_model_parallel_size=case.expert,
        expert_tensor_parallel_size=case.expert_tensor or case.tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    counted = Counted([])
    with counted.mode():
        chunks = made(case)
        start = counted.most
        config = OptimizerConfig(
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )
        optimizer = get_megatron_optimizer(config, chunks)
    loss_of = upstream_loss()
    group = parallel_state.get_tensor_model_parallel_group()

    def forward(batches: Any, model: Any) -> Any:
        ids = torch.randint(0, SIZES["vocab_size"], (1, TOKENS))
        logits = model(ids, torch.arange(TOKENS)[None], None)

        def loss(logits: Any) -> Any:
            found, _ = loss_of(logits.squeeze(0), ids.squeeze(0), group)
            return found.sum(), {}

        return logits, loss

    def update() -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(())] * len(chunks) if len(chunks) > 1 else iter(()),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=MICRO_BATCHES,
            seq_length=TOKENS,
            micro_batch_size=1,
            forward_only=False,
        )

    with counted.mode():
        update()
        optimizer.step()
        optimizer.zero_grad()
        counted.most = 0
        update()
    buffers = [one for m in chunks for one in (*m.buffers, *m.expert_parallel_buffers)]
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    moments = [
        one.nbytes
        for each in inner
        for state in each.optimizer.state.values()
        for name, one in state.items()
        if name.startswith("exp_avg")
    ]
    found = {
        "start": start,
        "weights": sum(p.nbytes for m in chunks for p in m.parameters()),
        "gradients": sum(one.grad_data.nbytes for one in buffers),
        "master copies": sum(
            p.nbytes
            for each in inner
            for several in each.shard_fp32_from_float16_groups
            for p in several
        ),
        "optimizer states": sum(moments),
        "update": counted.most,
    }
    found["beyond"] = found["update"] - sum(found[part] for part in PARTS)
    return found


def plan(case: Case, rank: int) -> dict[str, int]:
    """The same by the plan, of the files alone."""
    own = {k: v for k, v in case._asdict().items() if k != "model"}
    job = Megatron(
        sizes_of(case.model),
        gpus=RANKS,
        tokens=TOKENS,
        micro_batches=MICRO_BATCHES,
        fuses=False,
        **own,
    )
    stage = rank if case.pipeline > 1 else 0
    found: dict[str, int] = {"update": 0, "start": 0}
    for name, size in megatron_memory.resident(job, stage, "update").items():
        whole = next((part for part in PARTS if name.startswith(part)), name)
        found[whole] = size
    found["start"] = sum(megatron_memory.loading(job, stage).values())
    moments = megatron_memory.updates(job, stage)
    found["update"] = max(sum(total(one).values()) for one in moments)
    found["beyond"] = found["update"] - sum(found[part] for part in PARTS)
    return found


def without_cuda() -> Any:
    """A context in which Megatron's buffers and random states are on the only device
    that there is."""
    import torch
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils
    from torch import distributed
    from torch.overrides import TorchFunctionMode

    class Here(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = dict(kwargs or {})
            if str(given.get("device", "")).startswith("cuda"):
                given["device"] = "cpu"
            found = func(*args, **given)
            if func is torch.Tensor.type and isinstance(found, str):
                return found.replace("torch.", "torch.cuda.")
            return found

    # It is asked for without Transformer Engine, too, and is not there then.
    moe_utils.te_general_gemm = None
    whole = distributed.all_to_all_single

    def all_to_all_single(*args: Any, **given: Any) -> Any:
        """With numbers of rows as lists, which they are where they come from a GPU."""
        rows = {
            name: value if value is None else list(map(int, value))
            for name, value in given.items()
            if name.endswith("split_sizes")
        }
        return whole(*args, **{**given, **rows})

    distributed.all_to_all_single = all_to_all_single

    class Stream:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: Stream()

    torch.cuda.Stream = torch.cuda.current_stream = lambda *_, **__: Stream()
    torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()
    torch.cuda.synchronize = lambda *_, **__: None
    torch.Tensor.record_stream = lambda *_, **__: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = torch.get_rng_state
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    return Here()


def rank(number: int, store: str, at: int) -> None:
    """One of the two processes, which prints what it found as JSON."""
    import torch
    from torch import distributed

    torch.manual_seed(0)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=number, world_size=RANKS
    )
    with without_cuda():
        found = measured(CASES[at])
    print("FOUND", json.dumps(found), flush=True)
    distributed.destroy_process_group()


def everything(only: tuple[int, ...] = ()) -> list[Line]:
    """All cases, or some of them, each in two processes of its own."""
    found = []
    for at in only or range(len(CASES)):
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, __file__, "rank"]
            ranks = [
                subprocess.Popen(
                    [*command, str(number), f"{directory}/store", str(at)],
                    stdout=subprocess.PIPE,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    text=True,
                )
                for number in range(RANKS)
            ]
            texts = [one.communicate()[0] for one in ranks]
        case = CASES[at]
        said = ", ".join(
            f"{name} {value}"
            for name, value in case._asdict().items()
            if name != "model" and value != Case._field_defaults[name]
        )
        for number, text in enumerate(texts):
            own = next((li[6:] for li in text.splitlines() if li[:6] == "FOUND "), "{}")
            planned, real = plan(case, number), json.loads(own)
            where = f"{said}, rank {number}"
            found += [
                Line(case.model, "bfloat16", False, where, what, planned[what], size)
                for what, size in real.items()
            ]
    return found


def page(lines: list[Line]) -> str:
    """The page of docs."""
    told = [
        "# Memory plan: what the ranks of a Megatron trainer allocate",
        "",
        "Made by `GKD_UPSTREAM=DIR python tools/memory_megatron.py "
        "docs/memory-megatron.md`.",
        "",
        *TEXT.splitlines(),
        "",
        *FIRST.splitlines(),
        "",
        "| part | on average | at worst |",
        "|---|---|---|",
    ]
    for what in dict.fromkeys(line.what for line in lines):
        errors = [100 * abs(line.error) for line in lines if line.what == what]
        mean = sum(errors) / len(errors)
        told.append(f"| {what} | {mean:.1f} | {max(errors):.1f} |")
    told += ["", "| model | case | part | planned, MB | measured | error |"]
    told += ["|---|---|---|---|---|---|"]
    told += [
        f"| {li.model} | {li.loss} | {li.what} | {li.planned / 1e6:.1f} | "
        f"{li.measured / 1e6:.1f} | {100 * li.error:+.1f} % |"
        for li in lines
        if li.what in ("start", "update", "beyond")
    ]
    return "\n".join(told) + "\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        made_page = page(everything())
        if sys.argv[1:]:
            Path(sys.argv[1]).write_text(made_page, "utf-8")
        else:
            sys.stdout.write(made_page)
