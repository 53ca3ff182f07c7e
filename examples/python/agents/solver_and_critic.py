"""Two agents in one episode: a solver answers, a critic judges, the solver answers again.

    --agent_func_path examples/python/agents/solver_and_critic.py --apply_chat_template

Both are the policy. Each leaves a trajectory under its own name, so that a solver is compared with
solvers and a critic with critics. The label of a prompt is the answer."""

from __future__ import annotations

from openrl.agents.base import Generate
from openrl.agents.conversation import Conversation, EpisodeConfig, EpisodeOver
from openrl.types import FinishReason, Prompt, Sampling, Score, Trajectory

NOTHING = Score(0.0, 0.0)


class SolverAndCritic:
    def __init__(self, config: EpisodeConfig) -> None:
        self.config = config

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> list[Trajectory]:
        solver = Conversation(self.config, prompt, generate, sampling)
        critic = Conversation(self.config, prompt, generate, sampling)
        task = prompt.messages or ({"role": "user", "content": prompt.text},)
        try:
            first = await solver.reply(task)
            judge = f"{task[-1]['content']}\nIs this right, yes or no: {first.text}"
            verdict = await critic.reply([{"role": "user", "content": judge}])
            told = {"role": "user", "content": f"A critic says: {verdict.text}\nAnswer again."}
            last = await solver.reply([*task, first.message, told])
        except EpisodeOver as over:  # out of tokens: nobody has earned anything
            return named(
                solver.trajectory(over.finish_reason, NOTHING),
                critic.trajectory(over.finish_reason, NOTHING),
            )

        was_right = is_right(first.text, prompt.label)
        solved = is_right(last.text, prompt.label)
        agreed = ("yes" in verdict.text.lower()) == was_right
        return named(
            solver.trajectory(FinishReason.STOP, Score(float(solved), float(solved))),
            critic.trajectory(FinishReason.STOP, Score(float(agreed), float(agreed))),
        )


def named(solver: Trajectory, critic: Trajectory) -> list[Trajectory]:
    solver.agent, critic.agent = "solver", "critic"
    return [solver, critic]


def is_right(text: str, label: object) -> bool:
    return str(label) in text.split()
