"""The check that the engines hold the policy's weights, once per run after the first publish."""

from __future__ import annotations

from openrl.algorithms.collate import collate
from openrl.cluster.rollout_worker import RolloutRequest
from openrl.config.groups.model import Dtype
from openrl.trainer.learning.learner import ColumnRequest, Learner
from openrl.trainer.playing.rollouts import Rollouts
from openrl.types import Sampling
from openrl.weights.sync import check_gap


async def check_sync(rollouts: Rollouts, learner: Learner, version: int, dtype: Dtype) -> float:
    """Sample a little, compare the engines' log-probs with the trainer's, and return the largest
    gap in nats. Engines and trainer run one after the other, since each may have to sleep while the
    other runs.

    Raises UserError if they are not the same model (see ``weights/sync.py``)."""
    drawn = rollouts.settings.request.sampling
    plain = Sampling(min(16, drawn.max_tokens), drawn.temperature)
    request = RolloutRequest(1, plain, seed=(learner.settings.seed, 0, 0), scored=False)
    prompts = rollouts.buffer.prompts.peek(8)
    async with rollouts.generating():
        groups = await rollouts.play_all(prompts, request, lambda done, total: None)
    batch = collate(groups, learner.pad_id)
    policy = ColumnRequest("logprobs", learner.roles.policy)
    logprobs = (await learner.columns(policy, batch))["column"]
    mask = batch.loss_mask
    return check_gap(batch.rollout_logprobs[mask], logprobs[mask], dtype, version)
