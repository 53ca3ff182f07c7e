"""A backbone with a scalar head: the critic (a value per token) or a reward model (one per row)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import one_hot
from transformers import AutoModel, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from openrl.config.groups.model import LoadFlags
from openrl.errors import UserError
from openrl.models.causal_lm import Loading, load_pretrained
from openrl.models.headed import HeadedModel
from openrl.models.logits import Outputs, placed
from openrl.models.logprobs import shift_left, shift_right
from openrl.models.lora import peft_name
from openrl.models.packing import Rows
from openrl.models.sequence_parallel import Part
from openrl.models.stored import load_config
from openrl.models.vision import build_vision

HEAD_FIELD = "value_head_prefix"  # field in the config.json of a saved scalar model


@dataclass(frozen=True)
class Head:
    """The scalar head of a checkpoint."""

    name: str
    weight: Tensor | None  # (1, H); None: there is no head
    bias: Tensor | None = None  # (1,)

    def copy_to(self, layer: nn.Linear) -> nn.Linear:
        """Copy what there is into a layer, whose bias is 0 if there is none. Return the layer."""
        with torch.no_grad():
            if self.weight is not None:
                layer.weight.copy_(self.weight)
            if layer.bias is not None:
                layer.bias.copy_(torch.zeros(1) if self.bias is None else self.bias)
        return layer


class ScalarModel(HeadedModel):
    """A backbone whose last hidden states pass through one linear head, which has a bias if one is
    stored."""

    def __init__(
        self,
        hf: PreTrainedModel,
        head: Head,
        *,
        fp32_head: bool = False,
        packing: bool = False,
    ) -> None:
        super().__init__(hf, packing)
        self.head_name = head.name
        kind = FullPrecisionLinear if fp32_head else nn.Linear
        assert head.weight is not None
        size, bias = head.weight.shape[1], head.bias is not None
        self.head = head.copy_to(kind(size, 1, bias=bias, dtype=hf.dtype))

    def scalars(self, hidden: Tensor, part: Part, wanted: Tensor) -> Tensor:
        """Return the head's output, (R, S) in at least fp32; 0 where not ``wanted`` (R, S) bool."""
        own = part.take(wanted)
        column = self.head(hidden[own])[..., 0]
        return part.whole(placed(column.to(torch.promote_types(column.dtype, torch.float32)), own))

    @property
    def adapted_modules(self) -> list[str]:  # type: ignore[override]
        """The head: it is trained, and saved, whole."""
        return [self.head_name]

    @property
    def architecture(self) -> str:
        """The class that config.json names. With the head "score", transformers loads it."""
        return type(self.hf).__name__.removesuffix("Model") + "ForSequenceClassification"

    def to_checkpoint(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        head = {
            self._head_in_file(name): t for name, t in named.items() if name.startswith("head.")
        }
        body = {name.removeprefix("hf."): t for name, t in named.items() if name.startswith("hf.")}
        prefix = f"{self.hf.base_model_prefix}."
        body = self.adapters.merged(body) if self.adapters else body
        body = revert_weight_conversion(self.hf, body) if body else {}
        return {prefix + name.removeprefix(prefix): t for name, t in body.items()} | head

    def to_adapter(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        names = {name: name.replace("hf.", f"{self.hf.base_model_prefix}.", 1) for name in named}
        heads = [name for name in named if name.startswith("head.")]
        names |= {name: self._head_in_file(name) for name in heads}
        return {peft_name(names[name]): t for name, t in named.items()}

    def _head_in_file(self, name: str) -> str:
        """Return the name in files of a parameter of the head."""
        return f"{self.head_name}.{name.removeprefix('head.')}"


class FullPrecisionLinear(nn.Linear):
    """A linear layer that multiplies in fp32 whatever the dtype of its weight."""

    def forward(self, states: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(states.float(), self.weight.float(), bias)


class ValueModel(ScalarModel):
    def read(self, hidden: Tensor, rows: Rows, part: Part, *others: object) -> Outputs:
        """The output holds values, (b, T) fp32. Index t holds V of the state *before* token t was
        sampled, which the hidden state at t-1 describes. Values are 0 at index 0 and on padding."""
        scalars = self.scalars(hidden, part, shift_left(rows.predicted))
        return rows.to_batch(shift_right(scalars)), {}


class RewardModel(ScalarModel):
    mean, std = 0.0, 1.0  # of its rewards; set if they are to be normalised

    def scored(self, attention_mask: Tensor, wanted: Tensor | None) -> Tensor:
        """Return the last real token of each row."""
        return one_hot(attention_mask.sum(-1) - 1, attention_mask.shape[1]).bool()

    def read(self, hidden: Tensor, rows: Rows, part: Part, *others: object) -> Outputs:
        """The output holds rewards, (b,) fp32: the scalar at each row's last token, normalised."""
        scalars = self.scalars(hidden, part, torch.ones_like(rows.predicted))
        return (rows.to_batch(scalars).sum(1) - self.mean) / self.std, {}


Kind = TypeVar("Kind", bound=ScalarModel)


def load_scalar_model(
    kind: type[Kind],
    path: str,
    loading: Loading,
    head_prefix: str,
    *,
    fresh_head_seed: int | None = None,
    fp32_head: bool = False,
) -> Kind:
    """Load a backbone and its scalar head. A head name in config.json wins over ``head_prefix``.

    A model that will be trained may start from a checkpoint without a head (a language model). It
    then gets a fresh one from ``fresh_head_seed``: normal, with standard deviation 1 / (hidden size
    + 1). Without a seed, a missing head raises UserError. ``fp32_head`` makes the head multiply in
    fp32.
    """
    flags = loading.flags
    hf = load_pretrained(AutoModel, path, loading)
    head = stored_head(path, flags, head_prefix)
    if head.weight is None:
        if fresh_head_seed is None:
            raise UserError(
                f"{path}: no weights named {head.name}.weight, so this is not a reward model",
                "train one with a scalar head, or name its head with --value_head_prefix",
            )
        size = hf.config.get_text_config().hidden_size
        random = torch.Generator().manual_seed(fresh_head_seed)
        head = Head(head.name, torch.randn(1, size, generator=random) / (size + 1))
    setattr(hf.config, HEAD_FIELD, head.name)
    hf.config.num_labels = 1
    model = kind(hf, head, fp32_head=fp32_head, packing=loading.packing)
    model.vision = build_vision(hf, path, loading.vision, flags.trust_remote_code)
    return model


def stored_head(path: str, flags: LoadFlags, head_prefix: str) -> Head:
    """Return the scalar head of a checkpoint."""
    config = load_config(path, flags.trust_remote_code)
    name = getattr(config, HEAD_FIELD, None) or head_prefix
    return Head(name, _stored_tensor(path, f"{name}.weight"), _stored_tensor(path, f"{name}.bias"))


def stored_moments(path: str, trust_remote_code: bool = False) -> tuple[float, float]:
    """Return mean and std of rewards from a model's config.json. Raises UserError without them."""
    config = load_config(path, trust_remote_code)
    mean, std = getattr(config, "mean", None), getattr(config, "std", None)
    if mean is None or std is None or not std > 0:
        found = "has no mean and std" if mean is None or std is None else f"has the std {std}"
        problem = f"--normalize_reward: {path}/config.json {found}"
        raise UserError(problem, "train_rm stores them; or leave it out")
    return float(mean), float(std)


def _stored_tensor(path: str, name: str) -> Tensor | None:
    """Return one tensor of a safetensors checkpoint, whole or sharded; None if it is not there."""
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    file: str | None = SAFE_WEIGHTS_NAME
    if index is not None:
        file = json.loads(Path(index).read_text())["weight_map"].get(name)
    stored = file and cached_file(path, file, _raise_exceptions_for_missing_entries=False)
    if not stored:
        return None
    with safe_open(stored, framework="pt") as tensors:
        return tensors.get_tensor(name) if name in tensors.keys() else None  # noqa: SIM118
