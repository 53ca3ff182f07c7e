"""Environments on OpenEnv's servers. The server's schema says how the policy's text becomes an
action. Text that does not fit leaves the environment as it is, and the policy is told so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openrl.agents.base import Generate, Step
from openrl.agents.conversation import Play
from openrl.agents.environment_agent import EnvironmentAgent
from openrl.agents.openenv.wire import INVALID, Ask, Connections, Server, ServerError
from openrl.errors import UserError
from openrl.types import Prompt, Sampling, Trajectory

_READ = {"integer": int, "number": float, "string": str}
_OURS = ("metadata",)  # fields of every action that the policy does not write


class InvalidAction(Exception):
    """The policy wrote something that is not an action. The policy reads the message."""


@dataclass(frozen=True)
class ActionReader:
    """Turns the policy's text into the fields of an action."""

    field: str | None  # the only field to fill; None: the text is a JSON object of fields
    kind: str = "string"
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> ActionReader:
        """Return the reader for a schema of actions. Raises UserError for a schema without
        fields."""
        fields = {k: v for k, v in schema.get("properties", {}).items() if k not in _OURS}
        required = [name for name in schema.get("required", []) if name in fields]
        if not fields:
            raise UserError("openenv: the actions have no field that a policy could write")
        for only in (required, list(fields)):
            if len(only) == 1 and fields[only[0]].get("type") in _READ:
                return cls(only[0], fields[only[0]]["type"])
        return cls(None, names=tuple(fields))

    def __call__(self, text: str) -> dict[str, Any]:
        """Return the fields of the action. Raises InvalidAction."""
        if self.field is None:
            return self._object(text)
        try:
            return {self.field: text if self.kind == "string" else _READ[self.kind](text.strip())}
        except ValueError:
            raise InvalidAction(f"An action is one {self.kind}.") from None

    def _object(self, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise InvalidAction(f"An action is a JSON object of {', '.join(self.names)}.")
        return found


class OpenEnvEnvironment:
    """The environment of one episode, on a connection of its own."""

    reductions: Mapping[str, str] = {}

    def __init__(self, ask: Ask, read: ActionReader) -> None:
        self._ask, self._read = ask, read

    async def reset(self, seed: int, prompt: Prompt) -> str:
        row = {**prompt.meta, "seed": seed, "episode_id": prompt.id}
        told = await self._ask("reset", row)  # a server takes the fields it knows
        return observation_text(told["observation"])

    async def step(self, action: str) -> Step:
        try:
            told = await self._ask("step", self._read(action))
        except InvalidAction as invalid:
            return Step(str(invalid), valid=False)
        except ServerError as error:
            if error.code != INVALID:
                raise
            return Step(f"This is no valid action: {error.message}", valid=False)
        reward = told.get("reward")
        return Step(
            observation_text(told["observation"]),
            reward=0.0 if reward is None else float(reward),
            done=bool(told["done"]),
        )

    async def frame(self) -> None:
        return None

    async def close(self) -> None:
        """Do nothing: the environment ends with its connection."""


def observation_text(observation: Any) -> str:
    """Return an observation as text: text as it is, also if it is the only field that says
    something; anything else as JSON."""
    if isinstance(observation, Mapping):
        said = [v for k, v in observation.items() if k not in _OURS and v not in (None, "", [], {})]
        observation = said[0] if len(said) == 1 and isinstance(said[0], str) else observation
    return observation if isinstance(observation, str) else json.dumps(observation, default=str)


class OpenEnvAgent:
    """Plays the environments of a server. An episode's time begins once the server has room."""

    def __init__(self, server: Server, play: Play) -> None:
        """Raises UserError if a policy cannot write the server's actions."""
        self.connections, self.read = Connections(server), ActionReader.of(server.action)
        self.how = play

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        """Play an episode. Raises EnvironmentFailure, ServerFull, and OSError if the server is
        gone."""
        async with self.connections.open() as (ask, waits):
            environment = OpenEnvEnvironment(ask, self.read)
            agent = EnvironmentAgent(lambda _: environment, self.how)
            trajectory = await agent.run(prompt, generate, sampling)
        trajectory.metrics["waits_for_room"] = float(waits)
        return trajectory
