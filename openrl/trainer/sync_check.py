"""The check that the engines hold the policy's weights, once per run after the first sync."""

from __future__ import annotations

from openrl.algorithms.collate import collate
from openrl.errors import UserError
from openrl.trainer.learning.learner import ForwardRequest, Learner
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.types import Sampling
from openrl.weights.gap import check_gap
from openrl.workers.rollout_worker import RolloutRequest

PROMPTS, TOKENS = 8, 16  # prompts to compare on, and the most tokens of each


async def check_sync(rollouts: Rollouts, learner: Learner, version: int) -> None:
    """Sample a little and compare the engines' log-probs with the trainer's: the first tokens of
    the first reply in each episode, which has the limits of the run. Engines and trainer run one
    after the other, since each may have to sleep while the other runs.

    Raises UserError if they are not the same model, see ``check_gap``, or nothing was sampled."""
    drawn = rollouts.request.sampling
    plain = Sampling(
        drawn.max_tokens, drawn.temperature, max_len=drawn.max_len, routes=drawn.routes
    )
    seed = (learner.settings.seed, 0, 0)
    request = RolloutRequest(1, plain, seed, scored=False, first_reply=TOKENS)
    prompts = rollouts.buffer.prompts.peek(PROMPTS)
    async with rollouts.generating():
        groups = await rollouts.play_all(prompts, request, lambda done, total: None)
    batch = collate(groups, learner.pad_id)
    if not batch.loss_mask.any() and (why := groups[0].trajectories[0].failure):
        message = f"no prompt could be played to compare engine and trainer: {why}"
        raise UserError(message, "fix the failure above and restart")
    policy = ForwardRequest("logprobs", learner.roles.policy)
    logprobs = (await learner.forward(policy, batch))["output"]
    mask = batch.loss_mask
    dtype = learner.settings.dtype
    check_gap(batch.rollout_logprobs[mask], logprobs[mask], dtype, version)
