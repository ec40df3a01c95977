"""Runs inside the engine's own processes (vLLM's ``worker_extension_cls``).

vLLM adds the methods of ``WeightReceiver`` to its worker; ``collective_rpc`` calls them
by name. Arguments and results are plain data, because they travel between processes.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pytest_gkd.workload.engine import engine_errors, load_times
from pytest_gkd.workload.sync import broadcast, parameters

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def keep_weights_in_place() -> None:
    """On CPU, keep linear weights as they were loaded.

    There vLLM packs them into closures and leaves empty parameters behind, so that
    ``load_weights`` fails half-way and nothing can be compared. On a GPU they are kept,
    which is the behaviour under test. The layers look the function up when called.
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        utils.dispatch_cpu_unquantized_gemm = _plain_linear


@contextlib.contextmanager
def trainers_classes_kept(architectures: Iterable[str]) -> Iterator[list[str]]:
    """Where the trainer shares this process, leave its model's class as it is.

    An architecture for which vLLM has no code of its own runs on transformers' class,
    which vLLM modifies in place for torch.compile: its instances, whether created
    before or after, can then neither run nor train. Our engines compile nothing. Gives
    the names of the classes that an engine started in this context would have changed.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    served_by = [
        str(getattr(ModelRegistry.models.get(name), "module_name", ".transformers"))
        for name in architectures
    ]
    kept: list[str] = []

    def keep(self: Any, cls: type, *args: Any, **kwargs: Any) -> None:
        del self, args, kwargs
        kept.append(cls.__name__)

    change = None
    if any(".transformers" in module for module in served_by):  # else 0.7 s are saved
        from vllm.model_executor.models.transformers.base import Base

        change = getattr(Base, "_decorate_cls_for_torch_compile", None)
    if change is None:
        yield kept
        return
    Base._decorate_cls_for_torch_compile = keep
    try:
        yield kept
    finally:
        Base._decorate_cls_for_torch_compile = change


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear


def _pack_experts_again(model: Any) -> None:
    """On CPU, repeat what vLLM (0.32) does only on the first load of experts."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)


# In an engine of several processes this module is first imported in the worker, before
# the model is loaded.
keep_weights_in_place()
load_times.measure()
engine_errors.keep()


class WeightReceiver:
    """Methods that a vLLM worker gains; the attributes are the worker's own."""

    model_runner: Any
    rank: int
    reload_weights: Any

    @property
    def _gkd_device(self) -> torch.device:
        """Where the weights are; on a CPU vLLM 0.22's worker has no device itself."""
        found: torch.device = self.model_runner.device
        return found

    def gkd_identity(self) -> dict[str, str]:
        """The device that holds the weights, and what tells it from other devices."""
        import torch

        device = self._gkd_device
        if device.type != "cuda":
            return {"device": str(device), "uuid": str(device)}
        properties = torch.cuda.get_device_properties(device)
        return {"device": properties.name, "uuid": str(properties.uuid)}

    def gkd_load_times(self) -> dict[str, float]:
        """How this process loaded its weights: the fields of LoadTimes."""
        return asdict(load_times.last())

    def gkd_parameters(self, names: list[str]) -> dict[str, Any]:
        """``parameters``: name -> [dtype, shape]; ``engine_names``: by trainer's name.

        Names are those before fusion; the latter leaves out what is unknown here.
        """
        model = self.model_runner.get_model()
        views = parameters.unfused(model)
        return {
            "parameters": {
                name: [str(view.dtype).removeprefix("torch."), list(view.shape)]
                for name, view in views.items()
            },
            "engine_names": parameters.engine_names(model, names),
        }

    def gkd_digests(
        self, engine_names: dict[str, str], by_content: list[str]
    ) -> dict[str, str]:
        """A digest per trainer name; ``engine_names`` maps it to the engine's name.

        For names in ``by_content`` the checksum of this rank's part. The parameters
        that no name maps to have one checksum together under ``*``.
        """
        views = parameters.unfused(self.model_runner.get_model())
        named = {name: views[engine_name] for name, engine_name in engine_names.items()}
        taken = set(engine_names.values())
        others = [view for name, view in views.items() if name not in taken]
        return parameters.digests(named, set(by_content), others)

    def gkd_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load ``weights`` in place; only for an engine in the caller's process."""
        self._gkd_load(weights)

    def gkd_receive(self, infos: list[Any], rendezvous: dict[str, Any]) -> None:
        """Join the trainer's broadcast and load what it sends."""
        announced = [(name, dtype, tuple(shape)) for name, dtype, shape in infos]
        where = broadcast.Rendezvous(**rendezvous)
        group = broadcast.join(where, 1 + self.rank, self._gkd_device)
        # A failure has to end the group immediately: the sender then learns of it at
        # once instead of waiting for its timeout.
        with (
            contextlib.closing(group),
            contextlib.closing(broadcast.receive(group, announced)) as weights,
        ):
            self._gkd_load(weights)

    def gkd_import(self, infos: list[Any], handles: str) -> None:
        """Load from memory that the trainer shares on the same GPU (CUDA IPC).

        ``handles`` is our trainer's own pickle, made for this call.
        """
        import torch

        names = (name for name, _, _ in infos)
        self._gkd_load(zip(names, self._gkd_shared(handles), strict=True))
        # The trainer frees the memory once this call returns.
        torch.cuda.synchronize(self._gkd_device)

    def gkd_open(self, handles: str) -> list[float] | str:
        """The values of the first tensor behind ``handles``, or why there are none.

        What is raised here could end the engine's process.
        """
        try:
            found: list[float] = next(iter(self._gkd_shared(handles))).tolist()
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        return found

    def _gkd_shared(self, handles: str) -> Iterator[Tensor]:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        for arguments in pickle.loads(base64.b64decode(handles)):  # noqa: S301
            here = list(arguments)
            # The seventh is the sender's number of the GPU; ours may differ.
            here[6] = self._gkd_device.index
            yield rebuild_cuda_tensor(*here)

    def _gkd_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        device = self._gkd_device
        on_device = ((name, tensor.to(device)) for name, tensor in weights)
        model = self.model_runner.get_model()
        rewritten = ("w13_weight", *parameters.DERIVED)
        if any(hasattr(m, name) for m in model.modules() for name in rewritten):
            # Experts lie in the order their kernel likes, and latent attention keeps
            # products of its weights; load_weights knows of neither, and would leave
            # a jumble or the old products, without a word.
            self.reload_weights(weights_iterator=on_device)
            _pack_experts_again(model)
        else:
            model.load_weights(on_device)
