"""--env_tags: our games play beside the engine, those of other people in processes, where they may
hang, crash and eat memory at the cost of their episode alone."""

import asyncio
import itertools
import os
import sys
from dataclasses import replace

import psutil
import pytest

from openrl.agents.build import check_agents, open_agent
from openrl.agents.environments.agent import EnvironmentFailure
from openrl.agents.setup import AgentSetup
from openrl.config.groups.agent import AgentFlags, EnvironmentTagFlags, needs_process
from openrl.config.groups.data import TemplateFlags
from openrl.errors import UserError
from openrl.extension_points import environments
from openrl.registry import load_plugins
from openrl.types import FinishReason, Prompt, Sampling
from tests.endpoint import hermes_chat, policy_of

GAME = """
import os, time
from dataclasses import dataclass

from openrl.extension_points import environments
from openrl.flags.schema import Options, flag

PARENT = os.getppid()


@dataclass(frozen=True)
class RoguishOptions(Options):
    greeting: str = flag("go", "What it says first.")
    begins: bool = flag(True, "Whether it ever does.")


@environments.register("{name}", options=RoguishOptions)
class Roguish:
    reductions = {{"pid": "last"}}

    def __init__(self, options):
        self.options = options

    def reset(self, seed):
        while not self.options.begins:
            pass
        return f"{{self.options.greeting}} {{seed}}", {{}}

    def step(self, action):
        if action == "hang":
            while True:
                pass
        if action == "die":
            os._exit(3)
        if action == "eat":
            self.eaten = [0] * 10**8
            time.sleep(1000)
        metrics = {{"pid": os.getpid()}}
        return "on", 1.0, action == "end", False, {{"metrics": metrics, "success": True}}
"""
numbers = itertools.count()


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """The name of a module, and of the environment that it registers."""
    name = f"roguish_{os.getpid()}_{next(numbers)}"
    (tmp_path / f"{name}.py").write_text(GAME.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    load_plugins((name,))
    yield name
    del environments._entries[name], sys.modules[name]


def setup(plugin, tmp_path, settings="{}", **flags):
    path = tmp_path / "settings.yaml"
    path.write_text(f"{plugin}: {settings}\n")
    tags = EnvironmentTagFlags(env_tags=(plugin, "bandit"), env_config=str(path))
    limits = {"env_step_timeout": 4.0, "env_memory_gb": 0.4} | flags
    template = TemplateFlags(apply_chat_template=True)
    return AgentSetup(AgentFlags(**limits), tags, template, plugins=(plugin,))


def play(how, *episodes):
    """What becomes of each (tag, policy), all at the same time: a trajectory or the error."""

    async def main():
        async with open_agent(how, hermes_chat().tokenizer) as agent:
            prompts = [
                Prompt(f"train:{tag}:0", [], "", source=tag, meta={"seed": 5})
                for tag, _ in episodes
            ]
            return await asyncio.gather(
                *(
                    agent.run(prompt, policy, Sampling(max_tokens=1000))
                    for prompt, (_, policy) in zip(prompts, episodes, strict=True)
                ),
                return_exceptions=True,
            )

    return asyncio.run(main())


def test_other_peoples_environments_play_in_processes(plugin, tmp_path):
    how = setup(plugin, tmp_path, "{greeting: hello}")
    said = "<answer>Phoenix</answer>"
    theirs, ours = play(how, (plugin, policy_of("on", "end")), ("bandit", policy_of(said)))
    assert (theirs.finish_reason, theirs.score.reward, theirs.score.passed) == (
        FinishReason.STOP,
        2.0,
        1.0,
    )
    assert "hello 5" in theirs.prompt.text and theirs.seed == 5
    pid = theirs.metrics[f"env/{plugin}/pid"]
    assert pid != os.getpid() and not psutil.pid_exists(int(pid))  # it has ended with the agent
    assert ours.score.reward == 0.1


@pytest.mark.full
@pytest.mark.parametrize(
    ("action", "kind", "words"),
    [
        ("hang", "timeout", "no answer within 4 s|nothing came back within 4 s"),
        ("die", "crash", "the environment process exited with status 3"),
        ("eat", "memory", r"0\.4 GiB allowed \(--env_memory_gb\)"),
    ],
)
def test_their_faults_cost_one_episode(plugin, tmp_path, action, kind, words):
    """Another episode of the same environment, and one of ours, are played meanwhile."""
    failure, sound, ours = play(
        setup(plugin, tmp_path),
        (plugin, policy_of("on", action)),
        (plugin, policy_of("on", "on", "end")),
        ("bandit", policy_of("<answer>Phoenix</answer>")),
    )
    assert isinstance(failure, EnvironmentFailure) and failure.kind == kind
    assert failure.args[0].startswith(f"environment {plugin}, seed 5: ")
    assert failure.args[0].endswith(f"; actions: ['on', '{action}']")
    with pytest.raises(EnvironmentFailure, match=words):
        raise failure
    assert sound.finish_reason is ours.finish_reason is FinishReason.STOP


def test_one_that_never_begins_is_found_before_the_start(plugin, tmp_path):
    how = setup(plugin, tmp_path, "{begins: false}")
    with pytest.raises(UserError, match=r"cannot start an episode: .*nothing came back within 4 s"):
        check_agents(how, hermes_chat().tokenizer, None, 1000)
    check_agents(setup(plugin, tmp_path), hermes_chat().tokenizer, None, 1000)


def test_which_of_ours_run_other_peoples_code():
    assert [tag for tag in environments.names() if needs_process(tag)] == ["reasoning_gym"]


def test_one_that_awaits_plays_beside_the_engine(plugin):
    class Awaits(environments[plugin].component):
        async def step(self, action):
            return super().step(action)

    entry = environments._entries[plugin]
    environments._entries[plugin] = replace(entry, component=Awaits)
    assert not needs_process(plugin)
    environments._entries[plugin] = entry
    assert needs_process(plugin)
