"""The memory plan of Megatron trainers: published figures, parts counted by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from checked_job import Checked
from test_estimate import HALF_B, QWEN_7B
from test_job_memory import OF_7_5B, totals

from pytest_gkd.job import megatron_memory, models
from pytest_gkd.job.findings import CheckError
from pytest_gkd.job.megatron_memory import Megatron
from pytest_gkd.job.memory import Job
from pytest_gkd.job.models import Layer, Model, Shape

QWEN3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12_288,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
    "model_type": "qwen3",
}
QWEN3_30B = QWEN3_8B | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "model_type": "qwen3_moe",
}


def qwen3(directory: Path, config: dict[str, Any]) -> Model:
    """What the plan sees of a Qwen3 whose files take no space on the disk."""
    wide, size = config["hidden_size"], config["head_dim"]
    queries, keys = (
        size * config[f"num_{name}_heads"] for name in ("attention", "key_value")
    )
    layer = {
        "self_attn.q_proj.weight": [queries, wide],
        "self_attn.k_proj.weight": [keys, wide],
        "self_attn.v_proj.weight": [keys, wide],
        "self_attn.o_proj.weight": [wide, queries],
        "self_attn.q_norm.weight": [size],
        "self_attn.k_norm.weight": [size],
        "input_layernorm.weight": [wide],
        "post_attention_layernorm.weight": [wide],
    }
    if "num_experts" in config:
        count, inner = config["num_experts"], config["moe_intermediate_size"]
        layer["mlp.gate.weight"] = [count, wide]
        layer["mlp.experts.gate_up_proj"] = [count, 2 * inner, wide]
        layer["mlp.experts.down_proj"] = [count, wide, inner]
    else:
        for name in ("gate", "up", "down"):
            layer[f"mlp.{name}_proj.weight"] = [config["intermediate_size"], wide]
    shapes = {
        "model.embed_tokens.weight": [config["vocab_size"], wide],
        "model.norm.weight": [wide],
        "lm_head.weight": [config["vocab_size"], wide],
    }
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{n}": one for n, one in layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    directory.mkdir()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    (directory / "config.json").write_text(json.dumps(config))
    return models.read(directory)


def gpt(hidden: int, heads: int, **more: Any) -> tuple[Megatron, Layer]:
    """A layer of the paper's models, with a row of 2048 tokens."""
    shape = Shape(heads, hidden, hidden, dense=4 * hidden, is_gated=False)
    layer = Layer(12 * hidden * hidden, 0, 0, 4 * hidden, shape)
    model = Model(
        *("", 12 * hidden * hidden, 0, False, 51_200, hidden, 0, 0, 0),
        *((layer,), layer, (), 0, False),
    )
    usual: dict[str, Any] = {
        "tokens": 2048,
        "attention": 2048,
        "has_dropout": True,
        "has_rotary": False,
    }
    return Megatron(model, **usual | more), layer


# Korthikanti et al., arXiv 2205.05198, table 3: hidden size and heads of 22, 175 and
# 530 billion weights, and table 2: bytes of a layer for each token and hidden element.
@pytest.mark.parametrize(
    ("hidden", "heads", "scores"),
    [(6144, 64, 106.667), (12_288, 96, 80), (20_480, 128, 64)],
)
@pytest.mark.parametrize(
    ("more", "fixed", "divided", "has_scores"),
    [
        ({}, 34, 0, True),
        ({"tensor": 8}, 10, 24, True),
        ({"tensor": 8, "sequence_parallel": True}, 0, 34, True),
        (
            {"tensor": 8, "sequence_parallel": True, "recompute": "selective"},
            *(0, 34, False),
        ),
        ({"tensor": 8, "recompute": "selective"}, 10, 24, False),
    ],
)
def test_the_activations_of_the_papers_layers(
    hidden: int,
    heads: int,
    scores: float,
    more: dict[str, Any],
    fixed: int,
    divided: int,
    has_scores: bool,
) -> None:
    job, layer = gpt(hidden, heads, **more)
    ranks = more.get("tensor", 1)
    each = fixed + (divided + scores * has_scores) / ranks
    found = megatron_memory.layer_bytes(job, layer)
    assert found == pytest.approx(2048 * hidden * each, rel=1e-5)


@pytest.mark.parametrize(
    ("hidden", "heads", "saved"), [(12_288, 96, 0.70), (20_480, 128, 0.65)]
)
def test_what_selective_recomputation_saves_by_the_paper(
    hidden: int, heads: int, saved: float
) -> None:
    # Section 5: "70% and 65%" of GPT-3's and MT-NLG's.
    kept = [
        megatron_memory.layer_bytes(*gpt(hidden, heads, recompute=kind))
        for kind in ("", "selective")
    ]
    assert 1 - kept[1] / kept[0] == pytest.approx(saved, abs=0.01)


def test_full_recomputation_keeps_the_inputs_alone() -> None:
    job, _ = gpt(12_288, 96, recompute="full")
    assert megatron_memory.kept(job, 0) == 2 * 2048 * 12_288  # 2 s b h


@pytest.mark.parametrize(("is_distributed", "each"), [(False, 18), (True, 6 + 12 / 8)])
def test_the_bytes_of_megatrons_documentation(
    is_distributed: bool, each: float, tmp_path: Path
) -> None:
    model = qwen3(tmp_path / "m", QWEN3_8B)
    job = Megatron(model, gpus=8, is_distributed=is_distributed)
    parts = megatron_memory.resident(job, 0, "update")
    assert sum(parts.values()) == pytest.approx(each * model.elements)


def test_the_ranks_of_a_dense_model_divide_it(tmp_path: Path) -> None:
    model = qwen3(tmp_path / "m", QWEN3_8B)
    assert model.elements == 8_190_735_360  # of its model card: 8.2B
    job = Megatron(model, gpus=8, tensor=4, pipeline=2)
    # Of each layer two norms and two of a head's width are on all ranks.
    layers = 18 * ((4096 * (4096 + 2 * 1024 + 4096 + 3 * 12_288)) // 4 + 8448)
    vocabulary = 151_936 * 4096 // 4
    assert megatron_memory.elements(job, 0) == (layers + vocabulary, 0)
    assert megatron_memory.elements(job, 1) == (layers + vocabulary + 4096, 0)


def test_experts_are_divided_by_their_own_ranks(tmp_path: Path) -> None:
    model = qwen3(tmp_path / "m", QWEN3_30B)
    assert model.elements == 30_532_122_624  # of its model card: 30.5B
    experts = 48 * 128 * 3 * 768 * 2048
    dense = model.elements - experts
    whole = 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048
    for tensor, expert, own in ((4, 8, 1), (2, 2, 2), (2, 4, 0)):
        job = Megatron(model, gpus=16, tensor=tensor, expert=expert, expert_tensor=own)
        wide = own or tensor
        found = ((dense - whole) // tensor + whole, experts // (expert * wide))
        assert megatron_memory.elements(job, 0) == found
        parts = megatron_memory.resident(job, 0, "update")
        shares = found[0] // (16 // tensor) + found[1] // (16 // (expert * wide))
        assert parts["optimizer states"] == pytest.approx(8 * shares, rel=1e-6)
        assert parts["gradients float32"] == 4 * sum(found)


def test_experts_without_ranks_of_their_own_are_weights_as_others(
    tmp_path: Path,
) -> None:
    model = qwen3(tmp_path / "m", QWEN3_30B)
    job = Megatron(model, gpus=16, tensor=2, expert_tensor=1)
    own, routed = megatron_memory.elements(job, 0)
    parts = megatron_memory.resident(job, 0, "update")
    assert parts["optimizer states"] == pytest.approx(own + routed, rel=1e-6)
    # The start: all weights a second time, beside the buffer of their gradients.
    parts = megatron_memory.loading(job, 0)
    assert sum(parts.values()) == (2 + 2 + 4) * (own + routed)
    # With ranks of their own they are taken in last, when the others' copies are gone.
    job = Megatron(model, gpus=16, tensor=2, expert=2, expert_tensor=1)
    own, routed = megatron_memory.elements(job, 0)
    parts = megatron_memory.loading(job, 0)
    assert sum(parts.values()) == 6 * own + 8 * routed


def test_a_tied_embedding_is_twice_in_a_pipeline(tmp_path: Path) -> None:
    tied = qwen3(tmp_path / "tied", QWEN3_8B | {"tie_word_embeddings": True})
    own = qwen3(tmp_path / "own", QWEN3_8B)
    assert own.elements - tied.elements == 151_936 * 4096
    for stages, more in ((1, 151_936 * 4096), (2, 0)):
        last = [
            megatron_memory.elements(Megatron(m, gpus=2, pipeline=stages), stages - 1)
            for m in (tied, own)
        ]
        assert last[1][0] - last[0][0] == more


def test_stages_have_the_layers_that_are_said(tmp_path: Path) -> None:
    model = qwen3(tmp_path / "m", QWEN3_8B)
    for job, sizes in (
        (Megatron(model, pipeline=4), [9, 9, 9, 9]),
        (Megatron(model, pipeline=4, last=6), [10, 10, 10, 6]),
        (Megatron(model, pipeline=4, first=4, last=8), [4, 12, 12, 8]),
    ):
        assert [len(one) for one in megatron_memory.stages(job)] == sizes
    with pytest.raises(CheckError, match="36 layers are not divided among 5"):
        megatron_memory.stages(Megatron(model, pipeline=5))


def test_the_first_stage_keeps_as_many_micro_batches_as_there_are() -> None:
    job, _ = gpt(12_288, 96, pipeline=4, micro_batches=8)
    assert [megatron_memory.in_flight(job, stage) for stage in range(4)] == [4, 3, 2, 1]
    few, _ = gpt(12_288, 96, pipeline=4, micro_batches=2)
    assert megatron_memory.in_flight(few, 0) == 2
    # Interleaved, 1 + (p - 1) / (p m) of it (arXiv 2205.05198, section 4.2.3).
    chunks, _ = gpt(12_288, 96, pipeline=4, micro_batches=8, chunks=3)
    assert megatron_memory.in_flight(chunks, 0) == pytest.approx(4 * (1 + 3 / 12))


def test_offload_lowers_the_rollout_and_not_the_update(tmp_path: Path) -> None:
    model = qwen3(tmp_path / "m", QWEN3_8B)
    kept = Megatron(model, gpus=8, tensor=8, tokens=4096)
    moved = Megatron(
        model,
        gpus=8,
        tensor=8,
        tokens=4096,
        away=frozenset(megatron_memory.PARTS),
        away_to_send=frozenset(megatron_memory.PARTS),
    )
    for phase in ("idle", "sync"):
        assert sum(megatron_memory.resident(kept, 0, phase).values()) > 8 << 30
        assert sum(megatron_memory.resident(moved, 0, phase).values()) == 0
    assert totals(Job(kept)) == totals(Job(moved))


def test_parts_beside_the_language_model_are_not_guessed() -> None:
    # 7.5 billion elements of which no layer says where they are.
    with pytest.raises(CheckError, match="beside the language model"):
        megatron_memory.elements(Megatron(OF_7_5B), 0)


# -- slime and miles ---------------------------------------------------------------

SLIME = (
    "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --load L "
    "--hf-checkpoint {s} --tensor-model-parallel-size 2 --sequence-parallel "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --rollout-batch-size 16 "
    "--n-samples-per-prompt 8 --global-batch-size 128 --num-rollout 3 "
    "--rollout-max-response-len 8192 --sglang-mem-fraction-static 0.7"
)
DYNAMIC = "--use-dynamic-batch-size --max-tokens-per-gpu 9216"
FULL = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)


@pytest.fixture
def slime(tmp_path: Path, capsys: Any) -> Checked:
    return Checked(tmp_path, capsys, "slime==0.3.1")


def test_slime_divides_by_megatrons_distributed_optimizer(slime: Checked) -> None:
    elements, _ = slime.elements()
    found = slime.parts(f"{SLIME} {DYNAMIC} --colocate {FULL}")
    half = elements // 2
    vocab = HALF_B.vocab // 2
    assert found["weights bfloat16"] == 2 * half
    assert found["gradients float32"] == 4 * half
    assert found["optimizer states"] == pytest.approx(8 * half / 2, rel=1e-6)
    assert found["master copies"] == pytest.approx(4 * half / 2, rel=1e-6)
    # Logits and softmax in float32, of the budget's tokens.
    assert found["logits and loss"] == 9216 * vocab * 8
    # Inputs of 24 layers and of the last norm and the head; those of a layer gathered.
    assert found["activations bfloat16"] == 26 * 9216 * 896 * 2 // 2
    assert found["gathered activations"] == 9216 * 896 * 2


@pytest.mark.parametrize(
    ("release", "options", "each"),
    [
        ("slime==0.3.1", "--rollout-temperature 0.8", 12),
        ("slime==0.3.1", "--entropy-coef 0.01", 12),
        ("slime==0.2.4", "", 16),
        ("slime==0.3.0", "--rollout-temperature 0.8", 20),
        ("miles==0.1.0", "", 12),
    ],
)
def test_the_losses_of_releases_hold_more(
    tmp_path: Path, capsys: Any, release: str, options: str, each: int
) -> None:
    checked = Checked(tmp_path, capsys, release)
    found = checked.parts(f"{SLIME} {DYNAMIC} --colocate {FULL} {options}")
    assert found["logits and loss"] == 9216 * HALF_B.vocab // 2 * each


def test_dropout_is_kept_unless_it_is_turned_off(slime: Checked) -> None:
    command = f"{SLIME} {DYNAMIC} --colocate"
    name = "activations bfloat16"
    off = slime.parts(command)[name]
    on = slime.parts(command.replace("--hidden-dropout 0.0", ""))[name]
    # Megatron's default is 0.1: two masks of a byte in each of 24 layers.
    assert on - off == 24 * 2 * 9216 * 896 // 2


def test_slimes_offload_empties_the_gpu_for_the_rollout(slime: Checked) -> None:
    elements, _ = slime.elements()
    command = f"{SLIME} {DYNAMIC} --colocate"
    found = slime.parts(command, "rollout")
    assert not [name for name in found if "states" in name or name.startswith("we")]
    memory = 79 << 30
    assert found["KV cache bfloat16"] == int(0.7 * memory) - 2 * elements
    found = slime.parts(f"{command} --no-offload-train", "rollout")
    assert found["weights bfloat16"] == elements
    # Weights are sent of host memory, gathered and flattened.
    found = slime.parts(f"{command} --update-weight-buffer-size 1000000", "weight sync")
    assert found["bucket of weights"] == 2_000_000
    assert "gradients float32" not in found


def test_states_in_host_memory_and_in_other_dtypes(slime: Checked) -> None:
    half = slime.elements()[0] // 2
    aware = f"{SLIME} {DYNAMIC} --colocate --use-precision-aware-optimizer"
    for options, moments, master in (
        ("", 8, 2),  # half of what bfloat16 weights have already
        ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 4, 2),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.75", 2, 1),
        ("--optimizer-cpu-offload", 0, 0),
    ):
        found = slime.parts(f"{aware} {options}", "optimizer step")
        states = [found.get(n, 0) for n in ("optimizer states", "master copies")]
        wanted = [moments * half / 2, master * half / 2]
        assert states == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"{SLIME} --colocate", "nothing bounds the prompts of a micro-batch"),
        (f"{SLIME} {DYNAMIC} --mtp-num-layers 1", "several tokens is not known"),
        (f"{SLIME} {DYNAMIC} --optimizer muon", "the state of that optimizer"),
        (f"{SLIME} {DYNAMIC} --fp8-format e4m3", "training in fp8"),
        (f"{SLIME} {DYNAMIC} --transformer-impl local", "those layers"),
        (f"{SLIME} {DYNAMIC} --rollout-top-p 0.9", "the replay of rollout_top_p"),
        (f"{SLIME} {DYNAMIC} --advantage-estimator ppo", "memory of a critic"),
        (f"{SLIME} {DYNAMIC} --tensor-model-parallel-size $TP", "not certain"),
        (f"{SLIME} {DYNAMIC} --tensor-model-parallel-size 3", "no multiple of 3"),
        (f"{SLIME} {DYNAMIC} --pipeline-model-parallel-layout E", "lays out stages"),
        (
            f"{SLIME} {DYNAMIC} --recompute-granularity selective "
            "--recompute-modules mla_up_proj",
            "what recomputation of mla_up_proj leaves",
        ),
        (
            SLIME.replace("--sglang-mem-fraction-static 0.7", f"--colocate {DYNAMIC}"),
            "SGLang chooses its share",
        ),
    ],
)
def test_what_is_not_known_of_slime_has_no_plan(
    slime: Checked, command: str, said: str
) -> None:
    found = slime(command)
    assert found["memory"] == []
    assert said in found["no_memory_plan"]


def test_the_advice_is_in_slimes_own_options(slime: Checked) -> None:
    command = f"{SLIME} {DYNAMIC} --colocate"
    need = max(
        row["total"] for row in slime(command)["memory"] if "for" in row["phase"]
    )
    bad = slime(command, f"{need - (1 << 30)}B")
    told = [one["message"] for one in bad["findings"] if one["cause"] == "cuda.oom"]
    change = told[0].split("With ")[1].split(" (now")[0]
    assert change == (
        "--recompute-granularity=full --recompute-method=uniform "
        "--recompute-num-layers=1"
    )
    good = slime(f"{command} {change}", f"{need - (1 << 30)}B")
    assert {row["verdict"] for row in good["memory"]} <= {"fits", "tight"}


# -- the teacher's server ----------------------------------------------------------

OPD = (
    f"{SLIME} {DYNAMIC} --colocate {FULL} --use-opd --opd-type sglang "
    "--custom-rm-path slime.rollout.on_policy_distillation.reward_func "
    "--rm-url http://127.0.0.1:13141/generate"
)
SERVER = (
    "CUDA_VISIBLE_DEVICES=7 python3 -m sglang.launch_server --model-path {t} "
    "--port 13141 --chunked-prefill-size 4096 {more} &\n"
)


def test_a_teachers_server_has_rows_of_its_own(slime: Checked) -> None:
    elements = slime.elements()[1]
    share = "--mem-fraction-static 0.6"
    found = slime(SERVER.replace("{more}", share) + OPD)
    start, work = (row for row in found["memory"] if row["role"] == "teacher")
    assert (start["phase"], work["phase"]) == ("engine start", "serving")
    weights, cache = "engine's weights bfloat16", "KV cache bfloat16"
    assert start["bytes"][weights] == work["bytes"][weights] == 2 * elements
    assert start["available"] == int(0.6 * (79 << 30))
    assert work["bytes"][cache] == int(0.6 * (79 << 30)) - 2 * elements
    # Float32 logits, those of prompts among them, and log-probabilities of these.
    assert work["bytes"]["prompts' logits"] == 4096 * QWEN_7B.vocab * 12
    trainer = [row for row in found["memory"] if row["role"] != "teacher"]
    assert trainer == slime(OPD)["memory"]
    two = slime(SERVER.replace("{more}", f"{share} --tp 2") + OPD)
    parts = next(row["bytes"] for row in two["memory"] if row["role"] == "teacher")
    assert parts[weights] == elements


@pytest.mark.parametrize(
    ("release", "variable", "tokens"),
    [
        ("slime==0.3.1", "", 4096),
        ("slime==0.3.1", "SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK=1", 2048),
        ("miles==0.1.0", "", 2048),
        ("miles==0.1.0", "SGLANG_ENABLE_LOGPROB_CHUNK=false", 4096),
    ],
)
def test_log_probabilities_are_taken_in_chunks_from_sglang_0_5_16_on(
    tmp_path: Path, capsys: Any, release: str, variable: str, tokens: int
) -> None:
    checked = Checked(tmp_path, capsys, release)
    script = SERVER.replace("{more}", "--mem-fraction-static 0.6")
    found = checked(f"{variable} {script}{OPD}")["memory"]
    parts = next(row["bytes"] for row in found if row["phase"] == "serving")
    assert parts["prompts' logits"] == tokens * QWEN_7B.vocab * 12


def test_a_server_that_does_not_fit_is_told_with_what_makes_it_fit(
    slime: Checked,
) -> None:
    script = SERVER.replace("{more}", "--mem-fraction-static 0.9") + OPD
    (told,) = (one for one in slime(script)["findings"] if one["cause"] == "cuda.oom")
    assert "teacher does not fit in serving" in told["message"]
    assert "With --mem-fraction-static 0.85 (now 0.9) it fits" in told["message"]
    share = SERVER.replace("{more}", "--mem-fraction-static 0.1") + OPD
    (told,) = (
        one for one in slime(share)["findings"] if one["cause"] == "vllm.kv-cache"
    )
    assert "--mem-fraction-static" in told["message"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", "SGLang chooses mem_fraction_static by the GPU"),
        ("--mem-fraction-static $M", "share is not certain"),
        ("--mem-fraction-static 0.6 --quantization fp8", "quantised weights"),
        ("--mem-fraction-static 0.6 --kv-cache-dtype fp8_e5m2", "cache in that dtype"),
        ("--mem-fraction-static 0.6 --dp 2 --enable-dp-attention", "data parallel att"),
        ("--mem-fraction-static 0.6 --dtype int4", "its dtype is int4"),
    ],
)
def test_a_server_of_which_not_all_is_known_has_no_rows(
    slime: Checked, more: str, said: str
) -> None:
    found = slime(SERVER.replace("{more}", more) + OPD)
    assert "teacher" not in {row["role"] for row in found["memory"]}
    assert found["memory"]
    (told,) = (
        one for one in found["findings"] if "the teacher has none" in one["message"]
    )
    assert said in told["message"]
