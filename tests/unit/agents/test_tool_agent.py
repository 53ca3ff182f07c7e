"""Episodes with tools, over the chat templates of families of models."""

import asyncio

import pytest

from openrl.agents.base import Toolset
from openrl.agents.chat import TemplateError
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.tools.agent import ToolAgent, first_messages
from openrl.agents.tools.functions import FunctionTools, schema_of
from openrl.agents.tools.parsers import parser_for
from openrl.agents.tools.toolbox import Toolbox
from openrl.config.groups.agent import TurnFlags
from openrl.types import FinishReason, Prompt, Sampling
from tests.chat_templates import FAMILIES, chat_of
from tests.scripted_policy import ScriptedPolicy

QUESTION = {"role": "user", "content": "What is 2 + 2?"}
PROMPT = Prompt("train:0", [1], "What is 2 + 2?", messages=(QUESTION,), render=True)
ROOM = Sampling(max_tokens=10_000, seed=3)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def play(chat, policy, parser=None, limits=None, tools=(add,), prompt=PROMPT, sampling=ROOM):
    limits = limits or TurnFlags()
    toolbox = Toolbox([FunctionTools(tools)], limits.env_step_timeout)
    parse = parser_for(parser, chat)
    agent = ToolAgent(lambda: toolbox, EpisodeConfig(chat, parse, limits))
    return asyncio.run(agent.run(prompt, policy, sampling))


def numbers(trajectory, *names):
    return [trajectory.metrics[name] for name in names]


# What a call becomes in the next turn's chat, and the rows of an episode with one call. Mistral's
# template writes calls with ids that were not sampled, DeepSeek's forgets the "<think>" that it
# opened.
@pytest.mark.parametrize(
    "family, rows",
    [("qwen2.5", 1), ("qwen3", 1), ("llama3", 1), ("glm4", 1), ("mistral", 2), ("deepseek3", 2)],
)
def test_an_answer_with_a_call(family, rows):
    chat, words = chat_of(family), FAMILIES[family]
    policy = ScriptedPolicy(
        chat, [words.calls + (words.after_call or words.end), words.says + words.end], odd=True
    )
    trajectory = play(chat, policy)
    assert (
        trajectory.finish_reason is FinishReason.STOP
        and trajectory.turns == 2
        and trajectory.score is None
    )
    assert len(trajectory.segments) == rows
    first, last = trajectory.segments[0], trajectory.segments[-1]
    assert first.sampled_ids[: len(policy.given[0])] == policy.given[0]
    assert last.token_ids == policy.asked[1] + policy.given[1]
    told = chat.tokenizer.decode(policy.asked[1])
    assert "4" in told.rpartition("2")[2]  # behind the arguments
    assert numbers(trajectory, "tool_calls", "tool_errors", "invalid_actions") == [1, 0, 0]
    assert trajectory.metrics["forked_segments"] == rows - 1


@pytest.mark.parametrize("call", [
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>',
    '<tool_call>{"arguments": {"b":2,"a":2}, "name":"add"}</tool_call>',  # nobody writes it so
    'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>\nWait.',
])  # fmt: skip
def test_what_was_sampled_stays_however_a_call_is_written(call):
    chat = chat_of("qwen2.5")
    policy = ScriptedPolicy(chat, [call + "<|im_end|>", "It is 4.<|im_end|>"])
    trajectory = play(chat, policy)
    (row,) = trajectory.segments
    assert row.sampled_ids == policy.given[0] + policy.given[1]
    response = chat.tokenizer.decode(trajectory.response_ids)
    assert response == (
        f"{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is 4.<|im_end|>"
    )


def test_calls_at_the_same_time():
    together = asyncio.Barrier(3)

    async def meet(name: str) -> str:
        """Comes back when all have come.

        Args:
            name: Who comes.
        """
        await together.wait()
        return f"{name} was there"

    chat = chat_of("qwen2.5")
    calls = "\n".join(
        f'<tool_call>\n{{"name": "meet", "arguments": {{"name": "{name}"}}}}\n</tool_call>'
        for name in ("Ada", "Bo", "Cy")
    )
    policy = ScriptedPolicy(chat, [f"{calls}<|im_end|>", "Met.<|im_end|>"])
    trajectory = play(chat, policy, tools=[meet], limits=TurnFlags(env_step_timeout=20))
    told = chat.tokenizer.decode(policy.asked[1])
    places = [told.index(f"{name} was there") for name in ("Ada", "Bo", "Cy")]
    assert places == sorted(places)
    assert numbers(trajectory, "tool_calls", "tool_errors") == [3, 0]
    assert len(trajectory.segments) == 1


def test_what_went_wrong_is_told():
    async def sleeps() -> str:
        """Sleeps."""
        await asyncio.sleep(60)
        return ""

    def talks() -> str:
        """Talks."""
        return "x" * 9000

    chat = chat_of("qwen2.5")
    calls = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in [
            ("add", '{"a": "two", "b": 2}'), ("sleeps", "{}"), ("talks", "{}"), ("subtract", "{}"),
        ]
    )  # fmt: skip
    policy = ScriptedPolicy(chat, [f"{calls}<|im_end|>", "Well.<|im_end|>"])
    trajectory = play(
        chat, policy, tools=[add, sleeps, talks], limits=TurnFlags(env_step_timeout=0.1)
    )
    told = chat.tokenizer.decode(policy.asked[1])
    assert "Error: add: 'two' is not of type 'integer'" in told
    assert "Error: sleeps gave no answer within 0.1 s" in told
    assert "[cut: the result has 9000 characters]" in told
    assert "Error: there is no tool 'subtract', only add, sleeps, talks" in told
    assert numbers(trajectory, "tool_calls", "tool_errors", "cut_tool_results") == [4, 3, 1]
    assert trajectory.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("family", ["qwen2.5", "gemma3"])
def test_a_call_that_cannot_be_read_is_explained_and_three_are_enough(family):
    chat, end = chat_of(family), FAMILIES[family].end
    broken = '<tool_call>{"name": "add"</tool_call>'
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
    policy = ScriptedPolicy(chat, [broken + end] * 4)
    trajectory = play(chat, policy, "hermes")
    assert (trajectory.finish_reason, trajectory.turns) == (FinishReason.STOP, 3)
    assert numbers(trajectory, "tool_calls", "invalid_actions") == [0, 3]
    assert "This call cannot be read: not JSON" in chat.tokenizer.decode(policy.asked[1])
    assert len(trajectory.segments) == 1
    if family == "qwen2.5":  # a good one between starts the count again
        replies = [broken, broken, call, broken, broken, "It is 4."]
        policy = ScriptedPolicy(chat, [reply + end for reply in replies])
        trajectory = play(chat, policy)
        assert (trajectory.finish_reason, trajectory.turns) == (FinishReason.STOP, 6)
        assert numbers(trajectory, "tool_calls", "invalid_actions") == [1, 4]


class Slow(Toolset):
    """Its tools end when they are given up; ``hangs`` is what never ends besides."""

    def __init__(self, hangs=""):
        self.schemas, self.hangs, self.given_up = [schema_of(add)], hangs, 0
        self.called = asyncio.Event()

    async def call(self, name, arguments):
        if arguments["a"] == 0:
            await self.called.wait()
            raise ConnectionError("the server is gone")
        self.called.set()
        await self.wait()

    async def reward(self):
        return await self.wait() if self.hangs == "reward" else None

    async def close(self):
        return await self.wait() if self.hangs == "close" else None

    async def wait(self):
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up += 1


def of(toolset, *replies, timeout=0.0):
    chat = chat_of("qwen2.5")
    policy = ScriptedPolicy(chat, [reply + FAMILIES["qwen2.5"].end for reply in replies])
    agent = ToolAgent(
        lambda: Toolbox([toolset], timeout), EpisodeConfig(chat, parser_for("hermes", chat))
    )
    return asyncio.run(agent.run(PROMPT, policy, ROOM))


def test_a_call_that_fails_the_episode_gives_the_others_up():
    call = '<tool_call>{{"name": "add", "arguments": {{"a": {}, "b": 2}}}}</tool_call>'
    with pytest.raises(ConnectionError):
        of(slow := Slow(), call.format(0) + call.format(1))
    assert slow.given_up == 1


@pytest.mark.parametrize("what", ["reward", "close"])
def test_tools_that_never_end_cost_their_episode(what):
    with pytest.raises(RuntimeError, match=f"{what} gave no answer within 0.01 s"):
        of(slow := Slow(hangs=what), "4", timeout=0.01)
    assert slow.given_up == 1


def test_half_a_surrogate_pair_in_a_result_is_a_question_mark():
    """The policy can write one into a call, as JSON; no tokenizer takes it back."""

    def echo(text: str) -> str:
        """Says it again.

        Args:
            text: What to say.
        """
        return f"said {text}"

    chat = chat_of("qwen2.5")
    call = '<tool_call>\n{"name": "echo", "arguments": {"text": "a\\ud800b"}}\n</tool_call>'
    policy = ScriptedPolicy(chat, [call + "<|im_end|>", "Well.<|im_end|>"])
    trajectory = play(chat, policy, tools=[echo])
    assert trajectory.finish_reason is FinishReason.STOP and len(trajectory.segments) == 1
    assert "said a?b" in chat.tokenizer.decode(policy.asked[1])


def test_limits():
    chat = chat_of("qwen2.5")
    call = FAMILIES["qwen2.5"].calls + "<|im_end|>"
    policy = ScriptedPolicy(chat, [call] * 9)
    trajectory = play(chat, policy, limits=TurnFlags(max_turns=2))
    assert (trajectory.finish_reason, trajectory.turns) == (FinishReason.MAX_TURNS, 2)
    assert trajectory.metrics["tool_calls"] == 2  # what was asked for was done

    policy = ScriptedPolicy(chat, [call] * 9)
    trajectory = play(chat, policy, sampling=Sampling(max_tokens=len(call)))
    assert trajectory.finish_reason is FinishReason.LENGTH

    policy = ScriptedPolicy(chat, ["A long answer.<|im_end|>"])
    trajectory = play(chat, policy, limits=TurnFlags(max_tokens_per_turn=2))
    assert (trajectory.finish_reason, trajectory.response_length) == (FinishReason.LENGTH, 2)


@pytest.mark.parametrize("limit", ["turn_timeout", "episode_timeout"])
def test_time_runs_out(limit):
    async def sleeps() -> str:
        """Sleeps."""
        await asyncio.sleep(60)
        return ""

    chat = chat_of("qwen2.5")
    call = '<tool_call>\n{"name": "sleeps"}\n</tool_call><|im_end|>'
    policy = ScriptedPolicy(chat, [call])
    trajectory = play(chat, policy, tools=[sleeps], limits=TurnFlags(**{limit: 0.2}))
    assert trajectory.finish_reason is FinishReason.TIMEOUT
    assert trajectory.segments[0].sampled_ids == policy.given[0]  # what was played is kept


def test_a_template_that_takes_no_results():
    chat = chat_of("gemma3")
    policy = ScriptedPolicy(chat, [FAMILIES["gemma3"].calls + "<end_of_turn>"])
    with pytest.raises(TemplateError):
        play(chat, policy, "hermes")


def test_turns_for_people():
    chat, words = chat_of("qwen2.5"), FAMILIES["qwen2.5"]
    policy = ScriptedPolicy(chat, [words.calls + words.end, words.says + words.end])
    first, second, last = play(chat, policy).rendered
    assert first.messages == (QUESTION,) and first.action == words.calls
    assert second.messages[0]["content"] == "4" and second.action == "It is 4."
    assert last.messages == () and last.action is None


def test_the_first_chat():
    assert first_messages(PROMPT, "") == [QUESTION]
    assert first_messages(PROMPT, " Hurry.")[0]["content"] == "What is 2 + 2? Hurry."
    assert PROMPT.messages == (QUESTION,) and QUESTION["content"] == "What is 2 + 2?"
    plain = Prompt("train:1", [1], "Hello")
    assert first_messages(plain, "") == [{"role": "user", "content": "Hello"}]
    parts = [{"type": "text", "text": "Look"}]
    seen = Prompt("train:2", [1], "", messages=({"role": "user", "content": parts},))
    assert first_messages(seen, "!")[0]["content"] == [*parts, {"type": "text", "text": "!"}]
    system = Prompt("train:3", [1], "", messages=({"role": "system", "content": "Be."},))
    assert first_messages(system, "Go.")[1] == {"role": "user", "content": "Go."}
