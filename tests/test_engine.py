"""What engine and trainer agree on before and after a push, without an engine."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gkd.stage_api import StageFault
from pytest_gkd.workload.deadline import GRACE_S, both, within
from pytest_gkd.workload.engine import engine, engine_config, engine_errors, engine_fork
from pytest_gkd.workload.layouts import ray_layout
from pytest_gkd.workload.models import model_files
from pytest_gkd.workload.sync import broadcast, parameters, push
from pytest_gkd.workload.sync.push import ParameterMap


def fused_model() -> Any:
    """Two fused projections and a padded embedding, named as vLLM names them."""
    import torch
    from torch import nn

    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = nn.Linear(4, 8)
            self.qkv_proj.output_sizes = [4, 2, 2]
            self.o_proj = nn.Linear(4, 4, bias=False)

    class Model(nn.Module):  # type: ignore[misc]
        packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.embed.org_vocab_size = 5
            self.attn = Attention()

    torch.manual_seed(0)
    return Model()


def test_fused_parameters_are_seen_as_a_checkpoint_has_them() -> None:
    from pytest_gkd.workload.sync.parameters import unfused

    shapes = {name: tuple(view.shape) for name, view in unfused(fused_model()).items()}
    assert shapes == {
        "embed.weight": (5, 4),
        "attn.q_proj.weight": (4, 4),
        "attn.k_proj.weight": (2, 4),
        "attn.v_proj.weight": (2, 4),
        "attn.q_proj.bias": (4,),
        "attn.k_proj.bias": (2,),
        "attn.v_proj.bias": (2,),
        "attn.o_proj.weight": (4, 4),
    }


def test_fused_parameters_that_do_not_add_up_stay_whole() -> None:
    from pytest_gkd.workload.sync.parameters import unfused

    model = fused_model()
    model.attn.qkv_proj.output_sizes = [4, 4]
    assert "attn.qkv_proj.weight" in unfused(model)


def test_a_checksum_is_that_of_the_parts_whatever_their_order() -> None:
    import torch

    from pytest_gkd.workload.sync.parameters import checksum

    whole = torch.randn(6, 4)
    parts = [whole[4:], torch.zeros(3, 4), whole[:4].t()]
    assert checksum(parts) == checksum([whole])


def test_a_checksum_tells_a_single_changed_bit() -> None:
    import torch

    from pytest_gkd.workload.sync.parameters import checksum

    values = torch.randn(64).to(torch.bfloat16)
    changed = values.clone()
    changed.view(torch.int16)[7] ^= 1
    assert checksum([changed]) != checksum([values])


def test_shards_add_up_and_copies_count_once() -> None:
    ranks = [{"shard": "0a", "copy": "05"}, {"shard": "02", "copy": "05"}]
    found = push.whole(ranks, shards=True)
    assert {name: int(value, 16) for name, value in found.items()} == {
        "shard": 12,
        "copy": 5,
    }


def parameter_map(
    known: list[str], unmapped: list[str], unfilled: list[str]
) -> ParameterMap:
    table = dict.fromkeys([*known, *unfilled], ("float32", (2,)))
    return ParameterMap(
        {name: name for name in known}, table, tuple(unmapped), tuple(unfilled)
    )


def test_a_tensor_kept_in_another_form_is_compared_by_content() -> None:
    def digests(now: ParameterMap) -> tuple[dict[str, str], dict[str, str]]:
        # b is transposed in the engine, c is another tensor.
        trainer = {"a": "1", "b": "2", "c": "3"}
        engine = {"a": "1", "b": "2" if "b" in now.by_content else "x", "c": "y"}
        return engine, trainer

    base = parameter_map(["a", "b", "c"], [], [])
    assert push.by_content(base, digests).by_content == {"b"}


def test_tensors_of_a_strange_architecture_are_left_to_vllm() -> None:
    base = parameter_map(["a"], ["experts.0"], ["w13"])
    push.check_set([("a", "float32", (2,)), ("experts.0", "float32", (9,))], base, base)


def test_a_set_of_which_no_name_is_known_is_refused() -> None:
    base = parameter_map([], ["module.a"], ["a"])
    with pytest.raises(StageFault, match=r"module\.a") as caught:
        push.check_set([("module.a", "float32", (2,))], base, base)
    assert caught.value.cause == "sync.name-or-shape"


def test_weights_that_cannot_be_compared_are_no_success() -> None:
    with pytest.raises(StageFault, match="no tensor that could be compared"):
        push.check_equal({}, {}, "after the push")


def test_a_tensor_only_one_side_has_is_a_difference() -> None:
    with pytest.raises(StageFault, match="1 of 2 tensors"):
        push.check_equal({"a": "1", "b": "2"}, {"a": "1"}, "after the push")


def test_both_sides_plan_the_same_buckets_in_order() -> None:
    infos = [(f"t{n}", "bfloat16", (n, 100)) for n in range(1, 9)]
    buckets = broadcast.buckets_of(infos, bucket_bytes=1600)
    assert [info for bucket in buckets for info in bucket] == infos
    sizes = [sum(map(broadcast.nbytes, bucket)) for bucket in buckets]
    assert (
        max(size for size, b in zip(sizes, buckets, strict=True) if len(b) > 1) <= 1600
    )


@pytest.mark.parametrize(
    ("config", "device", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "cpu", "float32"),
        ({"torch_dtype": "float16"}, "cuda", "float16"),
        ({"dtype": "float32"}, "cuda", "bfloat16"),
        ({}, "cuda", "bfloat16"),
    ],
)
def test_engine_and_trainer_share_a_dtype_that_compares(
    config: dict[str, str], device: str, dtype: str
) -> None:
    assert engine_config.choose_dtype(config, device) == dtype


def test_a_gpu_without_bfloat16_gets_float16() -> None:
    for named in ("bfloat16", "float32", "float16"):
        dtype = engine_config.choose_dtype({"dtype": named}, "cuda", bfloat16=False)
        assert dtype == "float16"
    assert engine_config.choose_dtype({}, "cpu", bfloat16=False) == "float32"
    gemma = {"dtype": "bfloat16", "model_type": "gemma2"}
    assert engine_config.choose_dtype(gemma, "cuda", bfloat16=False) == "float32"
    assert engine_config.choose_dtype(gemma, "cuda") == "bfloat16"


def test_an_engine_that_keeps_what_the_old_weights_made_is_told_of() -> None:
    class Busy:
        def reset_prefix_cache(self) -> bool:
            return False

    made = engine.Engine.__new__(engine.Engine)
    made.llm = Busy()
    with pytest.raises(StageFault, match="did not drop the keys and values") as told:
        made.forget_prefixes()
    assert told.value.cause == "sync.not-applied"


def test_what_stands_beside_a_tensor_in_another_form_may_be_in_another_form() -> None:
    # BLOOM's rows are sorted, those of the bias too: zeros look the same either way.
    names = ["qkv.weight", "qkv.bias", "norm.weight"]

    def digests(now: ParameterMap) -> tuple[dict[str, str], dict[str, str]]:
        trainer = dict.fromkeys(names, "1")
        sorted_rows = "1" if "qkv.weight" in now.by_content else "x"
        return trainer | {"qkv.weight": sorted_rows}, trainer

    found = push.by_content(parameter_map(names, [], []), digests).by_content
    assert found == {"qkv.weight", "qkv.bias"}


def test_a_tensor_is_compared_as_vllms_loader_turns_it() -> None:
    torch = pytest.importorskip("torch")
    kept = parameters.as_engine_holds("layers.0.mixer.A", torch.tensor([0.0, 1.0]))
    assert kept.tolist() == pytest.approx([-1.0, -2.7182817])
    plain = torch.tensor([2.0])
    assert parameters.as_engine_holds("layers.0.mixer.D", plain) is plain


def test_products_that_vllm_keeps_as_parameters_are_no_weights() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Module()
    for name in ("weight", "W_UV", "W_UK_T"):
        setattr(model, name, torch.nn.Parameter(torch.ones(2)))
    assert list(parameters.unfused(model)) == ["weight"]


def test_mambas_logarithm_is_found_under_the_engines_name() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Module()
    model.A = torch.nn.Parameter(torch.ones(2))
    outer = torch.nn.Module()
    outer.mixer = model
    outer.hf_to_vllm_mapper = SimpleNamespace(map_name=lambda name: name)
    assert parameters.engine_names(outer, ["mixer.A_log"]) == {"mixer.A_log": "mixer.A"}


def test_the_length_of_a_model_is_found_under_its_own_name() -> None:
    assert model_files.positions({"n_positions": 512}) == 512
    mixed = {"max_seq_len": 64, "max_position_embeddings": None}
    assert model_files.positions(mixed) == 64
    assert model_files.positions({}) is None
    gpt2 = {"n_head": 4, "n_layer": 2, "n_embd": 128}
    assert engine_config.cache_bytes(gpt2, 512) is not None


def test_the_cache_holds_one_sequence_of_full_length() -> None:
    config = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 1024,
        "num_hidden_layers": 64,
    }
    needed = 2 * 4 * 64 * 4 * 128 * 8192
    assert (engine_config.cache_bytes(config, 8192) or 0) >= needed


def test_a_cache_of_an_unusual_config_is_left_to_vllm() -> None:
    assert engine_config.cache_bytes({"hidden_size": 8}, 128) is None


def test_pythons_own_threads_do_not_forbid_a_fork() -> None:
    before = engine_fork.native_threads()
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert engine_fork.native_threads() == before
    finally:
        release.set()
        thread.join()


def test_a_call_that_does_not_return_is_given_up() -> None:
    release = threading.Event()
    try:
        with pytest.raises(StageFault, match="the answer had not finished") as caught:
            within(0.05, release.wait, "the answer", "sync.stuck")
    finally:
        release.set()
    assert caught.value.cause == "sync.stuck"


def fail(error: Exception) -> None:
    raise error


def test_of_two_failures_the_one_behind_the_other_is_raised() -> None:
    with pytest.raises(ValueError, match="no module named x") as caught:
        both(
            ("sender", lambda: fail(RuntimeError("Connection closed by peer"))),
            ("receiver", lambda: fail(ValueError("there is no module named x"))),
            5.0,
            "sync.stuck",
        )
    assert caught.value.__notes__ == ["the other side said: Connection closed by peer"]


def test_a_side_that_waits_in_vain_names_the_silent_one() -> None:
    release = threading.Event()
    try:
        with pytest.raises(StageFault, match="receiver makes no progress") as caught:
            both(
                ("sender", lambda: fail(RuntimeError("Timed out waiting 10000ms"))),
                ("receiver", lambda: release.wait(15)),
                20.0,
                "sync.stuck",
            )
    finally:
        release.set()
    assert caught.value.cause == "sync.stuck"


def test_a_reason_that_comes_late_on_a_slow_machine_is_waited_for() -> None:
    def fail_late() -> None:
        time.sleep(2 * GRACE_S)
        raise ValueError("there is no module named x")

    with pytest.raises(ValueError, match="no module named x"):
        both(
            ("sender", lambda: fail(RuntimeError("Connection closed by peer"))),
            ("receiver", fail_late),
            60.0,
            "sync.stuck",
        )


@pytest.mark.parametrize(
    ("gpus", "parallel", "shares"),
    [
        (1, 1, [0.4, 0.3, 0.3]),
        (2, 1, [1, 0.5, 0.5]),
        (3, 1, [1, 1, 1]),
        (4, 2, [2, 1, 1]),
    ],
)
def test_gpus_are_shared_only_where_there_are_too_few(
    gpus: int, parallel: int, shares: list[float]
) -> None:
    needs = ray_layout.bundles(gpus, parallel)
    assert [need["GPU"] for need in needs] == shares
    assert sum(shares) <= gpus


def test_a_key_that_the_models_config_lacks_is_named() -> None:
    from transformers import AutoConfig

    from pytest_gkd.workload.engine.engine_errors import missing_key

    config = AutoConfig.for_model("minimax_m2")
    with pytest.raises(AttributeError) as caught:
        config.scoring_func  # noqa: B018 - as vLLM reads it
    fault = missing_key(caught.value, "/models/m2")
    assert fault is not None
    assert fault.cause == "config.missing-value"
    assert "reads scoring_func" in fault.message
    assert "config.json in /models/m2" in fault.message


def test_a_key_that_moved_between_releases_is_not_missing() -> None:
    from transformers import AutoConfig

    from pytest_gkd.workload.engine.engine_errors import missing_key

    config = AutoConfig.for_model("qwen3")
    with pytest.raises(AttributeError) as caught:
        config.rope_theta  # noqa: B018 - as older releases had it
    assert missing_key(caught.value, "/models/q") is None


def test_an_attribute_that_no_config_lacks_is_no_key() -> None:
    from pytest_gkd.workload.engine.engine_errors import missing_key

    with pytest.raises(AttributeError) as caught:
        object().weight  # type: ignore[attr-defined]  # noqa: B018
    assert missing_key(caught.value, "/models/q") is None


def logged_by_a_process_of_the_engine(errors: list[Exception]) -> None:
    """As vLLM's workers and core do when they cannot start."""
    for logger, error in zip(engine_errors.LOGGERS, errors, strict=True):
        logging.getLogger(logger).error("failed to start", exc_info=error)


def test_what_a_process_of_the_engine_ended_with_is_raised_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    for name in engine_errors.LOGGERS:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    engine_errors.keep()
    assert engine_errors.kept(str(tmp_path), "/models/m2") is None
    with pytest.raises(AttributeError) as caught:
        AutoConfig.for_model("minimax_m2").scoring_func  # noqa: B018
    follows = RuntimeError("WorkerProc initialization failed")
    logged_by_a_process_of_the_engine([caught.value, follows])
    fault = engine_errors.kept(str(tmp_path), "/models/m2")
    assert isinstance(fault, StageFault)
    assert fault.cause == "config.missing-value"
    assert "reads scoring_func" in fault.message
    engine_errors.forget(str(tmp_path))
    logged_by_a_process_of_the_engine([KeyError("x.weight"), follows])
    error = engine_errors.kept(str(tmp_path), "/models/m2")
    assert isinstance(error, engine_errors.EngineStartError)
    assert type(error).__name__ == "KeyError"
    assert str(error) == "'x.weight' (in a process of the engine, as it started)"
