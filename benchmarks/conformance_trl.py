"""The losses of the installed TRL on the example of benchmarks/conformance.py, computed by its own
``GRPOTrainer._compute_loss``, and ours with the flags that its settings become.

The method gets a stand-in for the trainer that gives it log-probs instead of a model's; everything
after that is TRL's code."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from openrl.algorithms.masked import step_loss
from openrl.experience import LossInputs, StepCounts
from openrl.extension_points import policy_losses

LONGEST = 4  # --generate_max_len of the example: what dr_grpo divides by


@dataclass(frozen=True)
class Setting:
    """A loss of TRL, and what it is here."""

    loss_type: str
    ours: str
    mode: str
    options: dict[str, Any] = field(default_factory=dict)
    level: str = "token"  # importance_sampling_level
    epsilon_high: float = 0.2


SETTINGS = {
    "loss_type grpo": Setting("grpo", "ppo", "seq-mean-token-mean"),
    "loss_type dapo": Setting("dapo", "ppo", "token-mean"),
    "loss_type bnpo": Setting("bnpo", "ppo", "token-mean"),
    "loss_type dr_grpo": Setting("dr_grpo", "ppo", "seq-mean-token-sum-norm"),
    "gspo": Setting("grpo", "gspo", "seq-mean-token-mean", level="sequence"),
    "loss_type cispo": Setting(
        "cispo", "cispo", "token-mean", {"eps_clip_low_high": (1.0, 1.0)}, epsilon_high=2.0
    ),
    "loss_type sapo": Setting("sapo", "sapo", "seq-mean-token-mean"),
    "loss_type vespo": Setting("vespo", "vespo", "token-mean"),
    "loss_type luspo": Setting("luspo", "luspo", "seq-mean-token-sum", level="sequence"),
}


def ours(inputs: LossInputs, setting: Setting) -> float:
    """The loss of one optimizer step over the example."""
    entry = policy_losses[setting.ours]
    losses = entry.component(inputs, entry.options(**setting.options)).per_token
    mask = inputs.loss_mask
    counts = StepCounts(tokens=int(mask.sum()), trajectories=len(mask), dp_size=1)
    return float(step_loss(losses, mask, counts, setting.mode, LONGEST))


def theirs(inputs: LossInputs, setting: Setting) -> float:
    """The same by TRL."""
    with warnings.catch_warnings():  # of versions of vLLM, which takes no part here
        warnings.simplefilter("ignore")
        from trl import GRPOTrainer

    mask = inputs.loss_mask
    trainer = _trainer(setting, inputs.logprobs)
    trainer.get_gamma_weights = GRPOTrainer.get_gamma_weights
    empty = torch.zeros(len(mask), 0, dtype=torch.long)
    found = GRPOTrainer._compute_loss(
        trainer,
        SimpleNamespace(),
        {
            "prompt_ids": empty,
            "prompt_mask": empty,
            "completion_ids": torch.zeros_like(mask, dtype=torch.long),
            "completion_mask": mask.long(),
            "advantages": inputs.advantages,
            "old_per_token_logps": inputs.old_logprobs,
            "num_items_in_batch": mask.sum(),
        },
    )
    return float(found)


def _trainer(setting: Setting, logprobs: Tensor) -> SimpleNamespace:
    """What ``_compute_loss`` reads of a trainer in its first accumulated micro-batch."""
    args = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=False,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=1,
    )
    same = SimpleNamespace(
        num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value
    )
    return SimpleNamespace(
        args=args,
        accelerator=same,
        model=SimpleNamespace(training=True),
        loss_type=setting.loss_type,
        importance_sampling_level=setting.level,
        epsilon_low=0.2,
        epsilon_high=setting.epsilon_high,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
    )


def rows(inputs: LossInputs) -> Iterator[tuple[str, float, float]]:
    """Yield each setting's name, our loss, and TRL's."""
    for name, setting in SETTINGS.items():
        yield name, ours(inputs, setting), theirs(inputs, setting)


def installed() -> str:
    return f"TRL {version('trl')}"
