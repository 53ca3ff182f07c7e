"""Episodes of several turns against the bare engine with the same tokens and waits.

    OMP_NUM_THREADS=1 python -m benchmarks.agents --rounds 5

64 episodes at a time, 8 turns each, 16 sampled tokens a turn; each step of the environment takes
50 ms and answers with 12 tokens. The bare loop asks the same engine for the same numbers of tokens
and sleeps as long, without chats, rows, rewards or groups. Both take turns in one process; vLLM on
a model of 0.8M parameters. Prints episodes/s of both and their ratio, round by round."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.options import model_options, parser_of
from benchmarks.step_breakdown import make_task
from openrl.agents.base import Step
from openrl.agents.build import AgentSetup
from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.environments.agent import EnvironmentAgent
from openrl.cluster.group import WorkerContext
from openrl.config.groups.agent import AgentFlags, EnvironmentFlags, TurnFlags
from openrl.config.groups.data import TemplateFlags
from openrl.config.groups.model import ModelFlags
from openrl.config.groups.reward import RewardFlags
from openrl.config.groups.rollout_engine import OneEngineFlags
from openrl.config.reward_plan import reward_plan
from openrl.rewards.build import RewardSetup
from openrl.rollout_engines.engine import EngineSpec
from openrl.types import Prompt, Sampling
from openrl.workers.rollout_worker import RolloutRequest, RolloutWorker

EPISODES, TURNS, SAMPLED, STEP_SECONDS = 64, 8, 16, 0.05
OBSERVATION = "abcdefghijkl"  # a token each


class Waits:
    """An environment whose steps take a while."""

    reductions: dict[str, str] = {}

    async def reset(self, seed: int, prompt: Prompt) -> str:
        return OBSERVATION

    async def step(self, action: str) -> Step:
        await asyncio.sleep(STEP_SECONDS)
        return Step(OBSERVATION, reward=1.0)

    async def frame(self) -> None:
        return None

    async def close(self) -> None:
        pass


async def started(model: str) -> RolloutWorker:
    spec = EngineSpec(
        ModelFlags(pretrain=model, param_dtype="fp32"),
        OneEngineFlags(vllm_max_num_seqs=EPISODES),
        longest=256,
    )
    worker = RolloutWorker(
        WorkerContext("vllm"),
        "vllm",
        spec,
        AgentSetup(AgentFlags(), EnvironmentFlags(), TemplateFlags()),
        RewardSetup(RewardFlags(), reward_plan(RewardFlags())),
    )
    await worker.start()
    chat = ChatFormat(worker.tokenizer, chat=False, kwargs={})
    limits = TurnFlags(max_turns=TURNS, max_tokens_per_turn=SAMPLED)
    worker.agent = EnvironmentAgent(lambda prompt: Waits(), EpisodeConfig(chat, limits=limits))
    return worker


def sampling(seed: int | None, tokens: int) -> Sampling:
    return Sampling(tokens, ignore_eos=True, seed=seed)


async def as_agents(worker: RolloutWorker, seed: int) -> int:
    """Tokens sampled."""
    prompt = Prompt("0", [], "", source="waits", meta={"seed": 0})
    drawn = sampling(None, 2 * TURNS * (SAMPLED + len(OBSERVATION)))
    group = await worker.play(prompt, RolloutRequest(EPISODES, drawn, seed=(seed, 0, 0)))
    assert all(t.turns == TURNS for t in group.trajectories)
    return sum(t.response_length for t in group.trajectories)


async def bare(worker: RolloutWorker, seed: int) -> int:
    observation = worker.tokenizer(OBSERVATION, add_special_tokens=False).input_ids

    async def episode(number: int) -> int:
        ids, sampled = list(observation), 0
        for turn in range(TURNS):
            drawn = sampling(seed + EPISODES * turn + number, SAMPLED)
            reply = await worker.engine.generate(ids, drawn)
            await asyncio.sleep(STEP_SECONDS)
            ids += reply.token_ids + observation
            sampled += len(reply.token_ids)
        return sampled

    return sum(await asyncio.gather(*(episode(number) for number in range(EPISODES))))


async def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_task(args, Path(folder))
        worker = await started(str(Path(folder) / "model"))
        ratios, wanted = [], EPISODES * TURNS * SAMPLED
        for number in range(args.rounds + 1):
            seconds = {}
            for play in (as_agents, bare):
                began = time.perf_counter()
                assert await play(worker, 1000 * number) == wanted
                seconds[play] = time.perf_counter() - began
            if number:  # the first round warms up
                ratios.append(seconds[bare] / seconds[as_agents])
                agents, alone = (EPISODES / seconds[play] for play in (as_agents, bare))
                print(f"agents {agents:.1f}/s, bare {alone:.1f}/s, ratio {ratios[-1]:.3f}")
        print(f"median ratio {median(ratios):.3f}")
        await worker.close()


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    model_options(parser)
    asyncio.run(main(parser.parse_args()))
