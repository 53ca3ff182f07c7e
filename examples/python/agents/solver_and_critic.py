"""Two agents in one episode: a solver answers, a critic judges, the solver answers again.

    --agent_func_path examples/agents/solver_and_critic.py --apply_chat_template

Both are the policy. Each leaves a trajectory under its own name, so that a solver is compared with
solvers and a critic with critics. The label of a prompt is the answer."""

from __future__ import annotations

from openrl.agents.base import Generate
from openrl.agents.conversation import Conversation, Play
from openrl.types import End, Prompt, Sampling, Score, Trajectory


class SolverAndCritic:
    def __init__(self, play: Play) -> None:
        self.play = play

    async def run(self, prompt: Prompt, generate: Generate, sampling: Sampling) -> list[Trajectory]:
        solver = Conversation(self.play, prompt, generate, sampling)
        critic = Conversation(self.play, prompt, generate, sampling)
        task = prompt.messages or ({"role": "user", "content": prompt.text},)
        first = await solver.reply(task)
        judge = f"{task[-1]['content']}\nIs this right, yes or no: {first.text}"
        verdict = await critic.reply([{"role": "user", "content": judge}])
        told = {"role": "user", "content": f"A critic says: {verdict.text}\nAnswer again."}
        last = await solver.reply([*task, first.message, told])

        was_right = is_right(first.text, prompt.label)
        solved = is_right(last.text, prompt.label)
        agreed = ("yes" in verdict.text.lower()) == was_right
        played = {
            "solver": solver.trajectory(End.STOP, Score(float(solved), float(solved))),
            "critic": critic.trajectory(End.STOP, Score(float(agreed), float(agreed))),
        }
        for name, trajectory in played.items():
            trajectory.agent = name
        return list(played.values())


def is_right(text: str, label: object) -> bool:
    return str(label) in text.split()
