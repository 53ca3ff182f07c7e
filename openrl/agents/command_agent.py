"""The agent that is a program, started for each episode, which plays against the endpoint.

When the program exits, the episode ends, and everything that the program started is killed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
from contextlib import suppress
from typing import IO
from uuid import uuid4

from openrl.agents.base import EpisodeResult, Generate
from openrl.agents.endpoint.records import MODEL
from openrl.agents.endpoint.server import HOST, AgentEndpoint
from openrl.agents.endpoint.session import NoRequest, Session
from openrl.config.groups.agent import split_command
from openrl.processes.child import MARK, ending, kill_family, resident_bytes
from openrl.types import Prompt, Sampling, Trajectory, message_text
from openrl.vision.parts import messages_for_clients

LAST_WORDS = 2000  # bytes of a program's output that an error quotes
MOST_OUTPUT = 64 * 2**20  # bytes that a program may print
WATCH_INTERVAL = 1.0  # seconds between checks of a program
# variables that programs do not inherit, because they belong to other keys
OTHERS_KEYS = ("ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID")


class AgentCommand:
    def __init__(self, command: str, endpoint: AgentEndpoint) -> None:
        """Raises UserError for a command that cannot be started."""
        self.command, self.endpoint = split_command(command), endpoint
        self.limits = endpoint.config.limits
        self._max_concurrency = asyncio.Semaphore(self.limits.max_concurrency)

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> Trajectory:
        """Run the program for one episode. Raises RuntimeError if it fails or asks for nothing,
        with the end of its output, and if it takes too much memory or prints too much."""
        async with self._max_concurrency:
            with (
                tempfile.TemporaryFile() as output,
                tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as chat,
            ):
                # with images the chat exceeds what an environment variable may hold
                json.dump(messages_for_clients(prompt), chat, ensure_ascii=False)
                chat.flush()

                async def play(session: Session) -> EpisodeResult:
                    given = {**episode_variables(session), "OPENRL_MESSAGES_FILE": chat.name}
                    code = await self._exit_code(given, output)
                    failed = f"the agent {ending(code)}: {_output_tail(output)}"
                    return EpisodeResult(failure=failed if code else None)

                try:
                    return await self.endpoint.run(prompt, generate, sampling, play)
                except NoRequest as error:
                    tail = _output_tail(output)
                    raise RuntimeError(f"{error}; its output ends with: {tail}") from None

    async def _exit_code(self, environment: dict[str, str], output: IO[bytes]) -> int:
        """Run the program, end everything that it started, and return its exit code."""
        mark = uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if name not in OTHERS_KEYS}
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**inherited, **environment, MARK: mark},
            start_new_session=True,
        )
        try:
            while not await _wait_for_exit(process.pid, WATCH_INTERVAL):
                await self._check_limits(process.pid, output)
        finally:
            await asyncio.to_thread(kill_family, process.pid, mark)
            code = process.wait()
        return code

    async def _check_limits(self, pid: int, output: IO[bytes]) -> None:
        """Raise RuntimeError if the program takes too much memory or prints too much."""
        used = await asyncio.to_thread(resident_bytes, pid)
        if used > self.limits.memory:
            raise RuntimeError(
                f"the agent used {used / 2**30:.1f} GiB of memory, more than the"
                f" {self.limits.env_memory_gb:g} GiB allowed (--env_memory_gb)"
            )
        if os.fstat(output.fileno()).st_size > MOST_OUTPUT:
            raise RuntimeError(
                f"the agent printed more than {MOST_OUTPUT} bytes, ending with:"
                f" {_output_tail(output)}"
            )


def episode_variables(session: Session) -> dict[str, str]:
    """Return the environment variables that tell a program about its episode, as docs/endpoint.md
    describes them. The label is not among them, because it is only for rewards."""
    prompt, messages = session.prompt, session.prompt.chat
    row = {"id": prompt.id, "source": prompt.source, "meta": prompt.meta}
    local = ",".join(filter(None, [os.environ.get("NO_PROXY"), HOST]))
    return {
        "OPENAI_BASE_URL": f"{session.root}/v1",
        "OPENAI_API_KEY": session.key,
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": session.root,
        "ANTHROPIC_API_KEY": session.key,
        "ANTHROPIC_MODEL": MODEL,
        "OPENRL_REWARD_URL": f"{session.root}/v1/reward",
        "OPENRL_PROMPT": message_text(messages[-1]),
        "OPENRL_MESSAGES": json.dumps(messages, ensure_ascii=False),
        "OPENRL_ROW": json.dumps(row, ensure_ascii=False, default=str),
        "NO_PROXY": local,
        "no_proxy": local,
    }


async def _wait_for_exit(pid: int, seconds: float) -> bool:
    """Whether the process ends within this many seconds. The caller must still wait for it."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    process = os.pidfd_open(pid)
    loop.add_reader(process, ended.set)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await ended.wait()
        return ended.is_set()
    finally:
        loop.remove_reader(process)
        os.close(process)


def _output_tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - LAST_WORDS))
    return output.read().decode(errors="replace").strip() or "(no output)"
