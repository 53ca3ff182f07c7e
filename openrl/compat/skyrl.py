"""SkyRL: its environments of text.

BaseTextEnv   init(prompt) -> (messages, metadata),
              step(action) -> {"observations", "reward", "done", "metadata"}"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrl.agents.base import Environment, Step
from openrl.agents.files import user_code
from openrl.agents.files.environments import EnvironmentAdapter
from openrl.agents.interfaces import AgentInterface
from openrl.extension_points import agent_interfaces, stand_ins
from openrl.processes.interfaces import Signature
from openrl.types import Prompt

stand_ins.add("SkyRL", {"skyrl_gym.envs.base_text_env": __name__})

agent_interfaces.add(
    "skyrl",
    AgentInterface(
        "SkyRL's BaseTextEnv: init(prompt), step(action)",
        f"{__name__}:adapt",
        "openrl.agents.files.build:play_environment",
        {"init": (Signature(2),), "step": (Signature(2),)},
        offered=("env_config", "extras"),
    ),
)


class BaseTextEnv:
    def init(self, prompt: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        return prompt, {}

    def close(self) -> None:
        pass

    def get_metrics(self) -> dict[str, Any]:
        return {}


BaseTextEnvStepOutput = dict
ConversationType = list


def adapt(made: type) -> EnvironmentAdapter:
    return EnvironmentAdapter(lambda prompt, sampling: SkyRLEnvironment(made))


class SkyRLEnvironment(Environment):
    def __init__(self, made: type) -> None:
        self._class = made
        self._game: Any = None

    async def reset(self, seed: int, prompt: Prompt) -> Sequence[Any]:
        self._game = await user_code.construct(self._class, env_config={}, extras=dict(prompt.meta))
        first, _ = await user_code.result(self._game.init(user_code.chat_for_clients(prompt)))
        return list(first)

    async def step(self, action: str) -> Step:
        found = await user_code.result(self._game.step(action))
        done = bool(found["done"])
        metrics = (
            user_code.numbers(await user_code.result(self._game.get_metrics())) if done else {}
        )
        return Step(
            list(found["observations"]),
            reward=user_code.scalar(found["reward"], "the reward"),
            done=done,
            metrics=metrics,
            state=None if found["observations"] else "",
        )

    async def close(self) -> None:
        if self._game is not None:
            await user_code.result(self._game.close())
