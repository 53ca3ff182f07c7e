"""OpenRLHF's executors: they are trained on what the engine sampled for them, and on nothing else."""

from dataclasses import replace
from functools import partial

import pytest

from openrl.agents.conversation import Reply
from openrl.agents.first_reply import FirstReply
from openrl.compat.openrlhf.executor import ExecutorResult
from openrl.compat.openrlhf.executor_agent import NotSampled, trajectory
from openrl.config.groups.agent import TurnFlags
from openrl.types import Completion, FinishReason, Score
from tests.agent_files import CHAT, END, PROMPT, ROOM, play, policy_of
from tests.marks import full_after
from tests.scripted_policy import sampled

pytestmark = pytest.mark.full


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "agent.py"
        path.write_text(text)
        return path

    return write


EXECUTOR = """
import asyncio
from copy import deepcopy

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine{images}):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ranges, log_probs = [], [0.0] * len(tokens)
        for turn in range(2):
            params = deepcopy(sampling_params)
            params.max_tokens = max_length - len(tokens)
            output = await llm_engine.{generate}(tokens, params)
            action = output.outputs[0]
            ranges.append((len(tokens), len(tokens) + len(action.token_ids)))
            tokens = tokens + action.token_ids
            log_probs += [l[i].logprob for i, l in zip(action.token_ids, action.logprobs)]
            if turn == 0:
                feedback = hf_tokenizer("\\nagain: ", add_special_tokens=False)["input_ids"]
                tokens, log_probs = tokens + feedback, log_probs + [0.0] * len(feedback)
        {spoil}
        return {{
            "prompt": prompt, "label": label, "observation_tokens": tokens, "action_ranges": ranges,
            "rollout_log_probs": log_probs, "reward": float(label in action.text), "scores": 1.0,
            "extra_logs": {{"text": len(action.text), "longest": max_length}}, "truncated": False,
        }}
"""


def executor(images="", generate="generate.remote", spoil="pass"):
    return EXECUTOR.format(images=images, generate=generate, spoil=spoil)


@pytest.mark.parametrize(
    "shape", [{"images": ", images=None"}, {"generate": "generate"}], ids=["images", "plain"]
)
def test_openrlhf_executor(write, shape):
    policy = policy_of("3", "2")
    (played,) = play(write(executor(**shape)), policy)
    assert played.segments[0].token_ids == policy.asked[1] + policy.given[1]
    assert sampled(played) == policy.given
    (segment,) = played.segments
    pairs = zip(segment.rollout_logprobs, segment.loss_mask, strict=True)
    logprobs = [logprob for logprob, mine in pairs if mine]
    assert logprobs == [-1.0] * len(policy.given[0]) + [-2.0] * len(policy.given[1])
    assert [s.version for s in segment.versions] == [1, 1]
    assert (played.finish_reason, played.turns, played.score) == (
        FinishReason.STOP,
        2,
        Score(1.0, 1.0),
    )
    assert played.metrics["env/sums/longest"] == len(PROMPT.token_ids) + 1000
    assert played.text == f"3{END}\nagain: 2{END}"
    assert {s.temperature for s in policy.sampling} == {0.7}


def test_the_check_after_the_first_sync_does_not_disturb_it(write):
    """It gets the run's own ``max_length``, and no reply that is shorter than what it asked for."""
    spoil = f"assert max_length == {len(PROMPT.token_ids) + 1000} and len(tokens) > 20"
    policy = policy_of("3")
    (checked,) = play(write(executor(spoil=spoil)), policy, wrap=partial(FirstReply, max_tokens=1))
    assert checked.segments[0].token_ids == policy.asked[0] + policy.given[0]
    assert len(policy.given[0]) == 1


def test_what_the_engine_did_not_sample_is_not_trained(write):
    spoil = "tokens = [*tokens[:-1], tokens[-1] + 1]"
    (failure,) = play(write(executor(spoil=spoil)), policy_of("3", "2"))
    assert isinstance(failure, NotSampled)
    assert "not what the engine sampled" in str(failure)


@pytest.mark.parametrize(
    ("token_ids", "ranges", "problem"),
    [
        ([9, 2, 3, 4, 5, 6], [(2, 4), (5, 6)], "tokens 2 to 4 of observation_tokens are not what"),
        ([1, 2, 3, 9, 5, 6], [(2, 4), (5, 6)], "tokens 2 to 4 of observation_tokens are not what"),
        ([1, 2, 3, 4, 9, 6], [(2, 4), (5, 6)], "tokens 5 to 6 of observation_tokens are not what"),
        ([1, 2, 3, 4, 5, 6], [(2, 6)], "tokens 2 to 6 of observation_tokens are not what"),
        ([1, 2, 3, 4, 5, 6], [(1, 4)], "tokens 1 to 4 of observation_tokens are not what"),
        ([1, 2, 3, 4, 5, 6], [(3, 4)], "tokens 3 to 4 of observation_tokens are not what"),
        ([1, 2, 3, 4, 5, 6], [(5, 6), (2, 4)], "must be ascending ranges of 6 tokens"),
        ([1, 2, 3, 4, 5, 6], [(2, 4), (5, 7)], "must be ascending ranges of 6 tokens"),
        ([1, 2, 3, 4, 5, 6], [(2, 2)], "must be ascending ranges of 6 tokens"),
        ([1, 2, 3, 4, 5, 6], [], "action_ranges is empty"),
    ],
)
def test_tokens_and_ranges_must_be_the_engines(token_ids, ranges, problem):
    """It was given 1 2 and said 3 4, then given 1 2 3 4 5 and said 6."""

    def reply(asked, said):
        return Reply("", {}, asked, Completion(said, [-1.0] * len(said), FinishReason.STOP, ()))

    replies = [reply([1, 2], [3, 4]), reply([1, 2, 3, 4, 5], [6])]
    played = ExecutorResult(1.0, token_ids=[1, 2, 3, 4, 5, 6], action_ranges=[(2, 4), (5, 6)])
    right = trajectory(PROMPT, played, replies, CHAT)
    assert right.segments[0].loss_mask == [False, False, True, True, False, True]
    with pytest.raises(NotSampled, match=problem):
        wrong = ExecutorResult(1.0, token_ids=token_ids, action_ranges=ranges)
        trajectory(PROMPT, wrong, replies, CHAT)


def test_an_executor_may_leave_replies_out_and_cut_them(write):
    spoil = "ranges = [(ranges[1][0], ranges[1][1] - 1)]; tokens = tokens[:-1]"
    policy = policy_of("3", "24")
    (played,) = play(write(executor(spoil=spoil)), policy)
    assert sampled(played) == [policy.given[1][:-1]]
    assert played.metrics["untrained_replies"] == 1.0
    assert played.segments[0].versions[0].end == len(played.segments[0].token_ids)


@pytest.mark.full
@pytest.mark.parametrize(
    ("limits", "room", "end", "turns"),
    [
        (TurnFlags(max_turns=1), 1000, FinishReason.MAX_TURNS, 1),
        (TurnFlags(), 2, FinishReason.LENGTH, 1),
        (TurnFlags(episode_timeout=2.0), 1000, FinishReason.TIMEOUT, 2),
    ],
)
def test_an_executor_that_is_cut_leaves_what_was_sampled(write, limits, room, end, turns):
    policy, path = policy_of("3", "2"), write(executor(spoil="await asyncio.sleep(1000)"))
    (played,) = play(path, policy, limits=limits, sampling=replace(ROOM, max_tokens=room))
    assert (played.finish_reason, played.score) == (end, None)
    assert [i for run in sampled(played) for i in run] == [i for ids in policy.given for i in ids]
    assert played.turns == len(policy.given) <= turns


def test_the_engines_failure_is_the_engines(write):
    async def broken(token_ids, sampling, images=()):
        raise ConnectionError("the engine is gone")

    failed, played = play(write(executor()), broken, policy_of("3", "2"))
    assert isinstance(failed, ConnectionError)
    assert played.finish_reason is FinishReason.STOP


SINGLE = """
from openrlhf.utils.agent import SingleTurnAgentExecutor

class AgentExecutor(SingleTurnAgentExecutor):
    async def execute(self, *args, **kwargs):
        output = await super().execute(*args, **kwargs)
        output["reward"] = len(output["action_ranges"])
        return output
"""


def test_an_executor_that_goes_on_from_one_turn(write):
    policy = policy_of("2")
    (played,) = play(write(SINGLE), policy)
    assert sampled(played) == policy.given
    assert played.score == Score(1.0)


def test_an_executor_may_leave_the_reward_to_others(write):
    """As the one does that serves an API of its own."""
    text = SINGLE.replace('len(output["action_ranges"])', "None")
    (played,) = play(write(text), policy_of("2"))
    assert played.score is None and played.finish_reason is FinishReason.STOP


FAULTY = """
import os, time
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        output = await llm_engine.generate(tokens, sampling_params)
        said = output.outputs[0]
        {fault}
        whole = tokens + said.token_ids
        return {{"observation_tokens": whole, "action_ranges": [(len(tokens), len(whole))], "reward": 1.0}}
"""


@pytest.mark.parametrize(
    ("fault", "kind"),
    full_after(
        1,
        [
            ("time.sleep(1000)", r"nothing came back within 4 s \(--env_step_timeout\)"),
            ("os._exit(3)", "the agent process exited with status 3"),
            ("raise ValueError('odd')", r"ValueError: odd \(executor.py, line 10\)"),
            ("return None", "execute must return a dict with observation_tokens and action_ranges"),
            (
                "return {'observation_tokens': tokens, 'action_ranges': [], 'reward': float('nan')}",
                "ValueError: the reward is nan, not a finite number",
            ),
            (
                "return {'observation_tokens': tokens, 'action_ranges': [], 'reward': 10**400}",
                "ValueError: the reward is an integer that no float can hold",
            ),
            (
                "return {'observation_tokens': tokens, 'action_ranges': [], 'reward': 2, 'scores': 3}",
                "ValueError: scores are verdicts between 0 and 1, it returned 3",
            ),
        ],
    ),
)
def test_a_fault_of_an_executor_costs_its_episode(tmp_path, fault, kind):
    path = tmp_path / "executor.py"
    path.write_text(FAULTY.format(fault=f"if said.text.startswith('bad'): {fault}"))
    policies = [policy_of("bad"), policy_of("good")]
    failure, played = play(path, *policies, limits=TurnFlags(env_step_timeout=4.0))
    assert played.finish_reason is FinishReason.STOP
    with pytest.raises(Exception, match=kind):
        raise failure
