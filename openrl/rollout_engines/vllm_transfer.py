"""A weight-transfer engine through which vLLM's workers receive weights, registered with vLLM as
``BACKEND``.

vLLM's worker manages the session (start, any number of updates, finish) and rejects calls out of
order. This engine opens buckets by any transport of ``openrl.weights`` and loads them with vLLM's
layerwise reload, as vLLM's own engines do. We do not use those, because none supports checksums or
reports which parameters got no weight, and because their trainer sides change from version to
version."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from openrl.weights.buckets import Bucket
from openrl.weights.transport import Receiver, Route, corrupted_tensors, make_receiver, read_message

BACKEND = "openrl"


class Refused(Exception):
    """Buckets cannot be loaded, and nothing of them was."""

    def __init__(self, lost: list[str], changed: list[str]) -> None:
        super().__init__(lost, changed)
        self.lost, self.changed = lost, changed


@dataclass
class RouteInitInfo(WeightTransferInitInfo):
    """The arguments of a connection. ``first_rank`` is the rank of this engine's first worker in a
    broadcast group."""

    route: dict[str, Any]
    first_rank: int


@dataclass
class Buckets(WeightTransferUpdateInfo):
    messages: list[dict[str, Any]]  # see ``SentBucket.message``


class BucketTransfer(WeightTransferEngine[RouteInitInfo, Buckets]):
    """The transfer engine of one worker. vLLM builds it when it loads the model, and sets
    ``model``, ``model_config`` and ``device``."""

    init_info_cls = RouteInitInfo
    update_info_cls = Buckets
    supports_draft_weight_update = False

    _receiver: Receiver
    _kept: tuple[str, ...] = ()  # name prefixes of parameters that syncs do not bring
    # parameters of the model; None: no session has loaded a bucket since the last one was finished
    _wanted: set[str] | None = None
    _loaded: set[str] | None = None  # those that got a weight; None: the model does not report it
    absent: tuple[str, ...] = ()
    """Parameters that got no weight in the last finished session. vLLM itself only logs them."""

    def init_transfer_engine(self, init_info: RouteInitInfo) -> None:
        rank, route = init_info.first_rank + self.parallel_config.rank, Route(**init_info.route)
        self._receiver = make_receiver(route, rank, self.device)
        self._kept = _of_tower(self.model) if route.keeps_tower else ()

    def start_weight_update(self) -> None:
        """Start a session. The model keeps its weights until the first bucket is open, unless the
        last session broke off after that."""
        if self._wanted is not None:
            # or layers that it left incomplete would count the same weights twice
            finalize_layerwise_reload(self.model, self.model_config)
        self._wanted = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a message of buckets. This overrides vLLM's method to work on any kind of device."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Buckets) -> None:
        """Load buckets into the model. Raises Refused if they are lost or corrupted, with the model
        unchanged by them. For unknown names or shapes vLLM raises its own errors; the model is then
        half loaded and must not be used."""
        sent = [read_message(message) for message in update_info.messages]
        try:
            buckets = [Bucket(one.manifest, self._receiver.open(one)) for one in sent]
        except OSError as error:
            raise Refused([str(error)], []) from error
        pairs = zip(sent, buckets, strict=True)
        if changed := [name for pair in pairs for name in corrupted_tensors(*pair)]:
            raise Refused([], changed)
        if self._wanted is None:
            self._wanted = wanted_parameters(self.model)
            self._loaded = set()
            _forget_expert_kernels(self.model)
            initialize_layerwise_reload(self.model)
        named = chain.from_iterable(bucket.tensors() for bucket in buckets)
        loaded = self.model.load_weights(named)
        if self._loaded is not None:
            self._loaded = None if loaded is None else self._loaded | {*map(parameter_key, loaded)}

    def finish_weight_update(self) -> None:
        if self._wanted is None:
            self.absent = tuple(name for name, _ in self.model.named_parameters())
            return
        past = _written_past_loaders(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_heads(self.model)
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()  # for the trainer, which may share the GPU
        missing = set() if self._loaded is None else self._wanted - (self._loaded - past)
        self.absent = tuple(sorted(n for n in missing if not n.startswith(self._kept)))
        self._wanted = None

    def shutdown(self) -> None:
        """Do nothing: a receiver owns nothing, it only borrows the sender's memory."""

    # abstract in vLLM 0.26, where one class has both sides; our sending side is a ``Sender``
    trainer_send_weights = None


def _of_tower(model: nn.Module) -> tuple[str, ...]:
    """Return the name prefixes of the parameters of the vision tower and of its connector to the
    language model."""
    parts = model.get_mm_mapping()
    return (*parts.tower_model, *parts.connector)


def wanted_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that a sync has to bring. As in vLLM's own loader, layers
    that are quantised while they load are left out, because no checkpoint has their scales; so are
    the parameters of attention layers themselves, which are computed when a reload ends (with
    latent attention, W_UK_T and W_UV from ``kv_b_proj``)."""
    made_here = set()
    for name, module in model.named_modules():
        quantised = getattr(getattr(module, "quant_method", None), "uses_meta_device", False)
        # layers with a state are AttentionLayerBase too, but nothing is computed for them
        attends = isinstance(module, AttentionLayerBase) and hasattr(
            module, "process_weights_after_loading"
        )
        if quantised or attends:
            inner = module.named_parameters(recurse=quantised)
            made_here |= {f"{name}.{parameter}" for parameter, _ in inner}
    return {parameter_key(name) for name, _ in model.named_parameters() if name not in made_here}


def _written_past_loaders(model: nn.Module) -> set[str]:
    """Return the parameters that no weight loader wrote in the running reload. The reload restores
    their old values, even if ``load_weights`` reports them as loaded because it wrote into them
    itself (as that of gpt-oss does with experts, read in vLLM 0.32)."""
    past = set()
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        if info.can_load():  # else every value of this layer came, and it was put in place
            written = {parameter for parameter, _ in info.loaded_weights}
            own = {parameter for parameter, _ in module.named_parameters(recurse=False)}
            past |= {parameter_key(f"{name}.{parameter}") for parameter in own - written}
    return past


def parameter_key(name: str) -> str:
    """Return a parameter's name in a form that all versions' ``load_weights`` agree on. For
    experts, vLLM 0.28 leaves out the inner module, 0.32 does not."""
    return name.replace(".routed_experts.", ".")


# vLLM's CPU kernels work on packed copies of the weights. A reload repacks linear layers, but not
# the following two kinds.


def _forget_expert_kernels(model: nn.Module) -> None:
    """Make the reload rebuild the kernels of mixtures of experts. They pack their weights when the
    kernel is built, which otherwise happens only once."""
    for module in _on_cpu(model):
        if getattr(module.quant_method, "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def _repack_heads(model: nn.Module) -> None:
    """Repack output heads. A head tied to the embedding gets no weights of its own, so the reload
    skips it."""
    for module in _on_cpu(model):
        # numel 0: the original was dropped after packing
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _on_cpu(model: nn.Module) -> list[nn.Module]:
    """Return the modules with a kernel if the model is on a CPU; else none, since CUDA kernels keep
    no copies."""
    if next(model.parameters()).device.type != "cpu":
        return []
    return [m for m in model.modules() if getattr(m, "quant_method", None) is not None]


WeightTransferEngineFactory.register_engine(BACKEND, BucketTransfer)
