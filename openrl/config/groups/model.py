"""Flags that say which models are loaded, and how."""

from __future__ import annotations

from typing import Any, Literal

from openrl.config.conditions import CRITIC, HEADS, PREFERENCE_REFERENCE, REFERENCE, REWARD_MODEL
from openrl.flags.schema import REQUIRED, Conditions, flag, group

Dtype = Literal["bf16", "fp16", "fp32"]


@group("Model")
class WeightFlags:
    """The form of weights, whatever they are used for."""

    param_dtype: Dtype = flag(
        "bf16",
        "Type of weights, forward and backward passes; master weights stay fp32.",
        shorthands={"bf16": "bf16"},
    )
    trust_remote_code: bool = flag(
        False, "Allow model and tokenizer repositories to run their own Python code."
    )
    use_ms: bool = flag(
        False,
        "Download what flags name from ModelScope, not from the Hugging Face Hub, into its cache"
        " (MODELSCOPE_CACHE) before anything starts; all nodes must see the cache. Needs"
        " modelscope-hub.",
    )


@group("Model")
class LoadFlags(WeightFlags):
    """How a model that computes is loaded."""

    attn_implementation: str | None = flag(
        None,
        "Attention of Hugging Face models. None: flash_attention_2 on a GPU with flash-attn"
        " installed; else sdpa, or for packed rows varlen, which computes each sample separately.",
        shorthands={"flash_attn": "flash_attention_2"},
    )
    disable_fast_tokenizer: bool = flag(
        False, "Load the slow (Python) tokenizer; warns if transformers no longer has one."
    )


@group("Model")
class ModelFlags(LoadFlags):
    pretrain: str = flag(REQUIRED, "Hugging Face name or local directory of the model.")
    tokenizer_path: str | None = flag(
        None, "Hub name or directory of the tokenizer. None: that of --pretrain."
    )


@group("Model")
class ModelChangeFlags:
    """Changes to --pretrain in every role that loads it."""

    model_config_overrides: dict[str, Any] = flag(
        {},
        "Fields to replace in the config of --pretrain before loading it, in engines too, e.g."
        ' {"rope_theta": 1e6}.',
    )
    freeze_modules: str | None = flag(
        None,
        "Regular expression; parameters of --pretrain whose names match are not trained. None:"
        " all are trained.",
    )
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm"] | None = flag(
        None,
        "How a mixture of experts multiplies: one expert after another, one batch with copied"
        " weights, or one grouped matrix product. None: transformers chooses.",
    )
    use_liger_kernel: bool = flag(
        False,
        "Use Liger kernels for norms, rotary embeddings and MLPs of --pretrain, but not for the"
        " loss. Needs a GPU.",
    )


def scalar_head(only_if: Conditions = ()) -> Any:
    help = "Name of the scalar head of critic and reward models."
    return flag("score", help, only_if=only_if)


def normalized_reward() -> Any:
    help = (
        "Shift and scale the reward model's output by the mean and std that train_rm stored in its"
        " config.json."
    )
    return flag(False, help, only_if=REWARD_MODEL)


def reference_model(only_if: Conditions) -> Any:
    help = "Frozen reference model. None: the original --pretrain, even after a resume."
    return flag(None, help, only_if=only_if)


@group("Other models")
class ReferenceFlags:
    ref_pretrain: str | None = reference_model(PREFERENCE_REFERENCE)


@group("Other models")
class ScalarHeadFlags:
    value_head_prefix: str = scalar_head()


@group("Other models")
class OtherModelFlags:
    ref_pretrain: str | None = reference_model(REFERENCE)
    value_head_prefix: str = scalar_head(only_if=HEADS)
    critic_pretrain: str | None = flag(
        None,
        "Model that the critic starts from; without a scalar head it gets a fresh one. None:"
        " --pretrain.",
        only_if=CRITIC,
    )
    reward_pretrain: str | None = flag(
        None,
        "Reward models with a scalar head, comma separated; they run as a Ray role, each as one"
        " reward source.",
    )
    normalize_reward: bool = normalized_reward()
