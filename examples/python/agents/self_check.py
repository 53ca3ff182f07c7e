"""The agent of openai_client.py as openrl's own agents are written."""

from openrl.agents.base import Generate
from openrl.agents.conversation import Conversation, EpisodeConfig, EpisodeOver
from openrl.types import FinishReason, Prompt, Sampling, Trajectory

CHECK = "Check it. What is your final answer?"


class SelfCheck:
    def __init__(self, config: EpisodeConfig) -> None:
        self.config = config

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        conversation = Conversation(self.config, prompt, generate, sampling)
        messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        try:
            first = await conversation.reply(messages)
            check = {"role": "user", "content": CHECK}
            await conversation.reply([*messages, first.message, check])
        except EpisodeOver as over:
            return conversation.trajectory(over.finish_reason)
        return conversation.trajectory(
            FinishReason.LENGTH if conversation.is_full else FinishReason.STOP
        )
