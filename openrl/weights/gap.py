"""How far log-probs of engine and trainer may be apart while both hold the same weights."""

from __future__ import annotations

import torch
from torch import Tensor

from openrl.errors import UserError

# Per dtype: which statistic of the gaps is judged, and its limit in nats. In fp32 two summation
# orders differ by 1e-6 to 1e-4, so more than 1e-3 means a different computation. In half precision
# one rounding is 2^-9 (bf16) or 2^-12 (fp16) of a logit of order ten. A single unlikely token can
# move by 0.2 in bf16, so only the mean can be judged: a sharp random model of five layers shows
# 0.03 in bf16 and 0.004 in fp16, trained models less. One stale matrix (a tied head, packed
# experts) shifts the mean by 0.3 to 5.
TOLERANCES = {"fp32": ("largest", 1e-3), "fp16": ("mean", 0.02), "bf16": ("mean", 0.1)}


def check_gap(engine_logprobs: Tensor, trainer_logprobs: Tensor, dtype: str, version: int) -> float:
    """Return the largest gap, in nats, between the log-probs (n,) that engine and trainer give to
    the same sampled tokens.

    ``dtype`` ("fp32", "bf16" or "fp16") is the type in which both compute, ``version`` the version
    of the weights that both should hold. Raises UserError if the gaps exceed the tolerance of
    ``dtype``: then the engine does not generate with the trainer's weights; or if there are no
    tokens."""
    if engine_logprobs.shape != trainer_logprobs.shape:
        shapes = tuple(engine_logprobs.shape), tuple(trainer_logprobs.shape)
        raise ValueError(f"cannot compare {shapes[0]} with {shapes[1]} log-probs")
    if not engine_logprobs.numel():
        raise UserError(
            "no token was sampled for the run's first prompts: what the policy is shown, with the"
            " rules of a game or the descriptions of tools, leaves no room for one",
            "a larger --prompt_max_len, or --max_len",
        )
    gaps = (engine_logprobs.float() - trainer_logprobs.float()).abs()
    # both are NaN if one gap is, and NaN passes no tolerance
    found = {"largest": gaps.max().item(), "mean": gaps.mean().item()}
    judged, tolerance = TOLERANCES[dtype]
    if found[judged] <= tolerance:
        return found["largest"]
    worst = int(torch.where(gaps.isnan(), torch.inf, gaps).argmax())
    raise UserError(
        f"after the weight sync to version {version} the rollout engine and the trainer disagree:"
        f" over {gaps.numel()} sampled tokens their log-probs differ by {found['mean']:.2g} in the"
        f" mean and {found['largest']:.2g} at most (allowed in {dtype}: {judged} {tolerance:g}); at"
        f" the worst the engine says {engine_logprobs[worst].item():.4f}, the trainer"
        f" {trainer_logprobs[worst].item():.4f}. Training would follow another policy than the one"
        " that samples. Likely causes: the engine keeps an old copy of some weights (a tied output"
        " head, packed experts), reads a name differently, or implements this architecture"
        " differently (attention scaling, rotary embedding, router), or it speculates"
        " (speculative_config in --vllm_engine_kwargs)",
        "--rollout_backend hf, which generates with the trainer's own implementation",
    )
