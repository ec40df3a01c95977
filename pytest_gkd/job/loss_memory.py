"""What a loss over the vocabulary holds because of the logits, in bytes."""

from __future__ import annotations

# What a loss holds at its worst moment, forward or backward, for each token and entry
# of the vocabulary, the logits among it: (values in the logits' dtype, bytes in
# float32). Measured on the frameworks' own functions with random logits by torch's
# profiler (on a CPU, with the casts that CUDA's autocast makes):
# - topk: verl's compute_forward_kl_topk (trainer/distillation/fsdp/losses.py, after
#   0.9.1); the logits are divided by the temperature first
# - jsd-BETA: TRL's GKDTrainer.generalized_jsd_loss (1.x) on the float32 logits that
#   accelerate's mixed precision returns, the teacher's among them; 0, 1, or between;
#   low-jsd-BETA: on logits in the dtype that is computed in (DeepSpeed, or all in 16
#   bits)
# - logprob: logits, their copy by the temperature, and flash-attn's cross entropy that
#   turns it into its own gradient (verl, utils/torch_functional.py);
#   logprob-once, topk-once: without the copy
# - swift-jsd-BETA: ms-swift's gkd_loss (4.6.0, rlhf_trainers/gkd_loss.py), beside what
#   its chunks take; swift-topk, swift-served: on top-k logits, of a teacher's whole
#   ones or of a server's; swift-logprob: its GRPO
# - cross-entropy: transformers' ForCausalLMLoss (5.x), which makes logits float32
# - openrlhf: log_probs_from_logits (0.11.2, models/utils.py) on logits made float32
#   (models/actor.py), which are kept beside flash-attn's gradient of them
# - skyrl: logprobs_from_logits (0.3.0, backends/skyrl_train/utils/torch_utils.py), of
#   which flash-attn's gradient takes the place, and entropies in chunks of 1024
# - areal: gather_logprobs_entropy (1.0.4, utils/functional/vocab_parallel.py),
#   compiled, in chunks of 1024, each of whose gradients is as long as the whole
# - roll: log_probs_from_logits (8eb27cc2, utils/functionals.py) on logits made float32
# - lightrft-ROWS: log_probs_from_logits (main, models/utils.py) on 16 bits, row by row;
#   of one row, of two or three, and of four and more
# - nemo-logprob, nemo-topk: get_next_token_logprobs_from_logits and
#   get_distillation_topk_logprobs_from_logits (NeMo-RL at 7ea279ab,
#   nemo_rl/distributed/model_utils.py) on the float32 logits that FSDP2's output_dtype
#   or they make; nemo-packed-KIND: row by row of a packed one
#   (algorithms/loss/wrapper.py, SequencePackingLossWrapper)
# - fused: logits are never whole (liger, verl's fused kernels)
# - prime: of a tile of prime-rl's output matrix, which has no logits beside
#   (559b4477, trainer/models/layers/lm_head.py, _SequenceChunkedLogProbEntropyFn)
# - own-topk, own-jsd: pytest_gkd.workload.gkd.loss, the teacher's among them
LOSSES: dict[str, tuple[float, int]] = {
    "topk": (2, 8),
    "topk-once": (1, 8),
    "jsd-0": (0, 36),
    "jsd-1": (0, 40),
    "jsd": (0, 68),
    "low-jsd-0": (9, 0),
    "low-jsd-1": (10, 0),
    "low-jsd": (17, 0),
    "logprob": (2, 0),
    "logprob-once": (1, 0),
    "swift-jsd-0": (0, 32),
    "swift-jsd-1": (0, 36),
    "swift-jsd": (0, 52),
    "swift-topk": (0, 12),
    "swift-served": (0, 8),
    "swift-logprob": (0, 16),
    "low-swift-jsd-0": (8, 0),
    "low-swift-jsd-1": (9, 0),
    "low-swift-jsd": (13, 0),
    "low-swift-topk": (2, 4),
    "low-swift-served": (2, 4),
    "low-swift-logprob": (4, 0),
    "cross-entropy": (0, 12),
    "openrlhf": (1, 8),
    "skyrl": (2, 0),
    "areal": (3, 0),
    "roll": (1, 12),
    "lightrft-1": (5, 0),
    "lightrft-2": (3.5, 0),
    "lightrft-4": (3, 0),
    "nemo-logprob": (0, 12),
    "nemo-topk": (0, 8),
    "nemo-packed-logprob": (0, 12),
    "nemo-packed-topk": (0, 13),
    "fused": (0, 0),
    "chunked": (0, 0),
    "chunked-logprob": (0, 0),
    "prime": (1, 12),
    "own-topk": (1, 20),
    "own-jsd": (2, 43),
}
# Bytes per value of the tiles of TRL's kernels, which have a matrix of their own for
# each: two in float32 of student and teacher, or one in the compute dtype (1.16.0,
# trl/kernels/chunked_divergence.py and chunked_logprob.py).
TILES = {"chunked": (0, 8), "chunked-logprob": (1, 0)}
WITHOUT_LOGITS = ("fused", "prime", *TILES)
# The same for one chunk of tokens, for losses that work in chunks.
IN_CHUNKS = {
    "areal": (1, 0),
    "swift-jsd-0": (0, 12),
    "swift-jsd-1": (0, 8),
    "swift-jsd": (0, 8),
    "low-swift-jsd-0": (3, 0),
    "low-swift-jsd-1": (2, 0),
    "low-swift-jsd": (2, 0),
}
SWIFT_CHUNK, ENTROPY_CHUNK = 512, 1024
# What is left of the logits when the output matrix's backward pass begins, if that is
# not just their gradient.
LEFT = {
    "openrlhf": (1, 4),
    **dict.fromkeys(
        ("skyrl", "areal", "roll", "lightrft-1", "lightrft-2", "lightrft-4"), (2, 0)
    ),
    **dict.fromkeys(
        ("nemo-logprob", "nemo-topk", "nemo-packed-logprob", "nemo-packed-topk"), (1, 0)
    ),
}
# The logits that a framework's variables hold until the end of the backward pass
# (SkyRL's and OpenRLHF's ``output``; AReaL's ``outputs``, fsdp_engine.py; our own).
HELD = {
    "skyrl": (1, 0),
    "areal": (1, 0),
    "openrlhf": (0, 4),
    "roll": (1, 0),
    "own-topk": (1, 0),
    "own-jsd": (1, 0),
}
# Tokens and vocabulary entries of such a tile, which is as wide for fewer entries.
CHUNK = 4096, 32_768
# Vocabulary entries of a tile of prime-rl's, and what its backward pass holds: logits,
# scaled, their probabilities, and two gradients.
PRIME_TILE, PRIME_BACKWARD = 8192, (1, 20)


def needed(loss: str, tokens: int, vocab: int, width: int) -> tuple[int, int]:
    """What a loss holds for ``tokens`` at its peak, and what is left when the output
    matrix's backward pass begins; ``width`` is the bytes per element of the compute
    dtype.
    """
    if loss in TILES:
        values, bytes_ = TILES[loss]
        tile = min(tokens, CHUNK[0]) * CHUNK[1] * (values * width + bytes_)
        return tile, tile
    entries = tokens * vocab
    items, floats = LOSSES[loss]
    if loss == "prime":
        entries = tokens * min(vocab, PRIME_TILE)
        values, bytes_ = PRIME_BACKWARD
        return (
            entries * int(items * width + floats),
            entries * (values * width + bytes_),
        )
    raw = width if loss.startswith(("topk", "logprob", "low")) else 4
    if loss in LEFT:
        raw = LEFT[loss][0] * width + LEFT[loss][1]
    whole = int(entries * (items * width + floats))
    left = 0 if loss in WITHOUT_LOGITS else entries * raw
    if loss == "skyrl":  # logits plus a chunk's in float32, or plus their gradient
        chunk = min(tokens, ENTROPY_CHUNK) * vocab * 12
        return max(whole, entries * width + chunk), left
    items, floats = IN_CHUNKS.get(loss, (0, 0))
    size = ENTROPY_CHUNK if loss == "areal" else SWIFT_CHUNK
    return whole + min(tokens, size) * vocab * (items * width + floats), left


def kept(loss: str, tokens: int, vocab: int, width: int) -> int:
    """The bytes of logits that are held until the end of the backward pass."""
    items, floats = HELD.get(loss, (0, 0))
    return tokens * vocab * (items * width + floats)
