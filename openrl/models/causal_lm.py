"""A language model that scores tokens: (b, T) token ids in, (b, T) log-probs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from openrl.config.groups.model import LoadFlags
from openrl.config.groups.vision import VisionFlags
from openrl.errors import UserError
from openrl.models.attention import VARLEN, asked_attention, use_varlen
from openrl.models.headed import HeadedModel
from openrl.models.kept import KeptIds
from openrl.models.logits import LogitTransform, Other, Output, Outputs
from openrl.models.logprobs import LogprobHead, shift_left, shift_right
from openrl.models.lora import keep_differentiable, nf4, peft_name
from openrl.models.packing import Rows
from openrl.models.sequence_parallel import Part
from openrl.models.states import keep_states_apart
from openrl.models.stored import load_config
from openrl.models.towers import language_model_class, require_backbone
from openrl.models.trial import Trial
from openrl.models.vision import build_vision

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class CausalLM(HeadedModel):
    """A language model whose output head scores tokens chunk by chunk."""

    adapted_modules = None

    def __init__(
        self, hf: PreTrainedModel, temperature: float, chunk_size: int, packing: bool = False
    ) -> None:
        super().__init__(hf, packing)
        require_backbone(hf, hf.config.name_or_path)
        transform = logit_transform(hf.config, temperature)
        head = LogprobHead(hf.get_output_embeddings(), transform, chunk_size)
        hf.set_output_embeddings(head)
        if hf.get_output_embeddings() is not head:
            problem = f"{type(hf).__name__} does not let its output head be replaced"
            raise UserError(problem, "use another architecture")

    def read(
        self,
        hidden: Tensor,
        rows: Rows,
        part: Part,
        outputs: Sequence[Output],
        compared: Mapping[Other, Sequence[Tensor]],
        kept: KeptIds | None,
    ) -> Outputs:
        """The output holds log-probs, (b, T) fp32. The head skips tokens that are not scored."""
        predicts = part.take(shift_left(rows.predicted))

        def beside(column: Tensor) -> Tensor:
            return part.take(shift_left(rows.arranged(column)))[predicts]

        logprobs, more = self.hf.get_output_embeddings()(
            hidden,
            part.take(shift_left(rows.token_ids)),
            predicts,
            outputs,
            {other: [*map(beside, columns)] for other, columns in compared.items()},
            kept and kept.at(beside),
        )

        def to_rows(column: Tensor) -> Tensor:
            return rows.to_batch(shift_right(part.whole(column)))

        return to_rows(logprobs), {name: to_rows(column) for name, column in more.items()}

    @property
    def architecture(self) -> str:
        return type(self.hf).__name__

    def to_checkpoint(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        body = {name.removeprefix("hf."): t for name, t in named.items()}
        return revert_weight_conversion(
            self.hf, self.adapters.merged(body) if self.adapters else body
        )

    def to_adapter(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        return {peft_name(name.removeprefix("hf.")): t for name, t in named.items()}


@dataclass(frozen=True)
class Loading:
    """How a checkpoint becomes a model, whatever it computes."""

    flags: LoadFlags
    device: str  # where the model will run; it is loaded on the CPU
    packing: bool = False  # it will run packed rows
    load_in_4bit: bool = False
    vision: VisionFlags | None = None  # None: a model with a vision tower reads only text
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's config, or other arguments of ``from_pretrained``."""


def load_causal_lm(path: str, loading: Loading, temperature: float, chunk_size: int) -> CausalLM:
    """Load a model from a local directory or the Hub.

    Raises UserError if the model is missing, incomplete, or changes logits in unknown ways.
    """
    flags = loading.flags
    kind = language_model_class(load_config(path, flags.trust_remote_code))
    hf = load_pretrained(kind, path, loading)
    with torch.no_grad(), eager_attention(hf):
        tokens = Trial.of(hf.config, DTYPES[flags.param_dtype]).tokens[None].to(hf.device)
        expected = _plain_logprobs(hf, tokens)
        model = CausalLM(hf, 1.0, chunk_size, loading.packing).eval()
        found, _ = model(tokens, torch.ones_like(tokens, dtype=torch.bool))
        gap = float((found[:, 1:] - expected).abs().mean())
    if not gap <= (1e-3 if flags.param_dtype == "fp32" else 0.1):
        raise UserError(
            f"{path}: log-probs from the output head differ by {gap:.2g} from the model's own"
            f" forward: {type(hf).__name__} changes its logits in a way that is not known here",
            "use another architecture, or add its rule to logit_transform",
        )
    model.vision = build_vision(hf, path, loading.vision, flags.trust_remote_code)
    banned = model.vision.media_tokens if model.vision else ()
    hf.get_output_embeddings().transform = logit_transform(hf.config, temperature, banned)
    return model


def load_pretrained(kind: type, path: str, loading: Loading, may_lack: str = "") -> PreTrainedModel:
    """Call ``kind.from_pretrained``; return the model on the CPU, without dropout. Every weight
    except ``may_lack`` must be in the checkpoint.

    Raises UserError if there is no such model."""
    flags, device = loading.flags, loading.device
    try:
        model, report = kind.from_pretrained(  # type: ignore[attr-defined]
            path,
            dtype=DTYPES[flags.param_dtype],
            attn_implementation=asked_attention(flags, device),
            trust_remote_code=flags.trust_remote_code,
            quantization_config=nf4(DTYPES[flags.param_dtype]) if loading.load_in_4bit else None,
            output_loading_info=True,
            **loading.settings,
        )
    # KeyError means that no attention has that name
    except (OSError, ValueError, ImportError, KeyError) as error:
        remedy = "check the path and --attn_implementation"
        if flags.attn_implementation == VARLEN:
            remedy += ", or leave --prefix_grouper out, which asks for varlen"
        raise UserError(f"cannot load a model from {path!r}: {error}", remedy) from error
    if missing := sorted(set(report["missing_keys"]) - {may_lack}):
        raise UserError(
            f"{path}: {len(missing)} weights are not in the checkpoint, e.g. {missing[0]}",
            "point the flag at a complete checkpoint of this architecture",
        )
    if loading.packing:
        use_varlen(model, flags, device)
        keep_states_apart(path, model)
    _disable_dropout(model)
    keep_differentiable(model)
    return model.eval()


def logit_transform(
    config: PretrainedConfig, temperature: float, banned: tuple[int, ...] = ()
) -> LogitTransform:
    """Read what the architecture does to its logits. ``banned`` tokens are never sampled."""
    text = config.get_text_config()
    scale = getattr(text, "logit_scale", None) or 1.0  # Cohere
    scale *= getattr(text, "lm_head_multiplier", None) or 1.0  # Falcon-H1
    divisor = getattr(text, "logits_scaling", None) or 1.0  # Granite
    return LogitTransform(
        scale / divisor, getattr(text, "final_logit_softcapping", None), temperature, banned
    )


@contextmanager
def eager_attention(hf: PreTrainedModel) -> Iterator[None]:
    """Use eager attention inside: the model is on the CPU, where flash attention does not run."""
    chosen = hf.config._attn_implementation
    hf.set_attn_implementation("eager")
    yield
    hf.set_attn_implementation(chosen)


def _plain_logprobs(hf: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the model's own log-probs of a row of tokens, to compare the output head with."""
    logits = hf(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def _disable_dropout(model: nn.Module) -> None:
    """Switch dropout off: in comparisons with earlier log-probs its noise would look like drift."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
