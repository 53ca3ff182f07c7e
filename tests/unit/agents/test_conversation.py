"""Token rows of an episode, over the chat templates of eight families and more."""

import asyncio
import subprocess
import sys

import pytest

from openrl.agents.chat import ChatFormat, TemplateError
from openrl.agents.conversation import Conversation, EpisodeConfig, EpisodeOver
from openrl.config.groups.agent import TurnFlags
from openrl.types import FinishReason, Prompt, Sampling, Score
from tests.chat_templates import FAMILIES, TOOLS, chat_of
from tests.scripted_policy import ScriptedPolicy
from tests.tiny import tiny_tokenizer

ASKS = {"role": "user", "content": "What is 2 + 2?"}
GOES_ON = {"role": "user", "content": "And then?"}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "000000001", "content": "4"}
PROMPT = Prompt("train:0", [1, 2], "What is 2 + 2?")
ROOM = Sampling(max_tokens=10_000, seed=7)


def plain():
    return ChatFormat(tiny_tokenizer(), chat=False, kwargs={})


def play(chat, policy, said, tools=None, **kwargs):
    """A conversation in which ``said[i]`` is what others say before turn i."""
    sampling = kwargs.pop("sampling", ROOM)
    conversation = Conversation(EpisodeConfig(chat, **kwargs), PROMPT, policy, sampling)

    async def turns():
        messages = []
        for others in said:
            messages += others
            messages.append((await conversation.reply(messages, tools)).message)
        return messages

    return conversation, asyncio.run(turns())


def rows_of(policy):
    """The slow, obvious version: a row goes on as long as the next prompt begins with it."""
    rows = []
    for asked, sampled in zip(policy.asked, policy.given, strict=True):
        row = rows[-1] if rows and asked[: len(rows[-1][0])] == rows[-1][0] else ([], [])
        if row not in rows:
            rows.append(row)
        row[1].extend([False] * (len(asked) - len(row[0])) + [True] * len(sampled))
        row[0].extend(asked[len(row[0]) :] + sampled)
    return rows


# (family, what the policy writes): the rows of three turns. Reasoning of earlier turns is dropped
# by Qwen3, GLM and DeepSeek once a user speaks; DeepSeek opens it for the policy, too, and does not
# repeat that later. Mistral writes calls anew, with ids that the policy never sampled.
ROWS = {
    ("qwen3", "thinks"): 3,
    ("glm4", "thinks"): 3,
    ("deepseek3", "says"): 3,
    ("deepseek3", "thinks"): 3,
}


@pytest.mark.parametrize("odd", [False, True], ids=["as encoded", "by characters"])
@pytest.mark.parametrize("kind", ["says", "thinks"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_of_three_turns(family, kind, odd):
    chat, words = chat_of(family), FAMILIES[family]
    policy = ScriptedPolicy(chat, [getattr(words, kind) + words.end] * 3, odd)
    conversation, messages = play(chat, policy, [[ASKS], [GOES_ON], [GOES_ON]])
    segments = conversation.trajectory(FinishReason.STOP).segments
    assert [(s.token_ids, s.loss_mask) for s in segments] == rows_of(policy)
    assert len(segments) == ROWS.get((family, kind), 1)
    assert conversation.forks == len(segments) - 1
    if not odd:
        for turn, row in enumerate(segments if len(segments) > 1 else [*segments] * 3):
            text = chat.render(messages[: 2 * turn + 1])
            whole = chat.encode(text) + policy.given[turn]
            assert row.token_ids[: len(whole)] == whole  # what a full rendering would be


# Gemma's refuses what does not alternate between two, Mistral's what is not in its form
RAW_CALLS = {"chatml": 1, "qwen2.5": 1, "qwen3": 1, "llama3": 1, "glm4": 1, "phi3": 1, "mistral": 2}


@pytest.mark.parametrize("family, rows", RAW_CALLS.items())
def test_calls_that_go_back_as_they_were_sampled(family, rows):
    chat, words = chat_of(family), FAMILIES[family]
    call = words.calls + (words.after_call or words.end)
    policy = ScriptedPolicy(chat, [call, words.says + words.end])
    conversation, messages = play(chat, policy, [[ASKS], [RESULT]], TOOLS)
    segments = conversation.trajectory(FinishReason.STOP).segments
    assert [(s.token_ids, s.loss_mask) for s in segments] == rows_of(policy)
    assert len(segments) == rows
    whole = chat.encode(chat.render(messages[:3], TOOLS)) + policy.given[1]
    assert segments[-1].token_ids == whole


def test_the_messages_that_go_on():
    chat = chat_of("qwen2.5")
    function = {"name": "add", "arguments": {"a": 2, "b": 2}}
    structured = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    for arguments, same in [('{"a": 2, "b": 2}', True), ('{"a":2,"b":2}', False)]:
        call = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
        policy = ScriptedPolicy(chat, [call + "<|im_end|>"])
        conversation, messages = play(chat, policy, [[ASKS]], TOOLS)
        chats = [[ASKS, structured, RESULT], [*messages, RESULT]]
        assert conversation.choose(chats, TOOLS) == chats[0 if same else 1]
        assert conversation.choose(chats[::-1], TOOLS) == chats[1]
        # neither goes on without the tools' descriptions
        assert conversation.choose(chats) == chats[0]


def test_the_messages_that_go_on_after_the_turn_of_another_chat():
    """Agents that share an episode take turns: a call goes back after somebody else has spoken."""
    chat, arguments = chat_of("qwen2.5"), {"a": 2, "b": 2}
    structured = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": arguments}}],
    }
    call = '<tool_call>\n{"name": "add", "arguments": {"a":2,"b":2}}\n</tool_call>'
    policy = ScriptedPolicy(chat, [call + "<|im_end|>", "It is 4.<|im_end|>"])
    conversation, messages = play(chat, policy, [[ASKS]], TOOLS)
    asyncio.run(conversation.reply([GOES_ON], TOOLS))
    as_sampled = [*messages, RESULT]
    assert conversation.choose([[ASKS, structured, RESULT], as_sampled], TOOLS) == as_sampled


def test_what_a_template_refuses():
    chat = chat_of("gemma3")
    policy = ScriptedPolicy(chat, ["It is 4.<end_of_turn>"] * 2)
    with pytest.raises(TemplateError, match="roles must alternate"):
        play(chat, policy, [[ASKS], [RESULT]])
    conversation, messages = play(chat, policy, [[ASKS]])
    assert conversation.choose([[*messages, RESULT], [ASKS]]) == [ASKS]
    assert conversation.choose([[ASKS], [*messages, RESULT]]) == [ASKS]


def test_a_reply_that_is_cut_within_a_character():
    chat = chat_of("qwen2.5")
    policy = ScriptedPolicy(chat, ["It is \N{EURO SIGN}", "4.<|im_end|>"], odd=True)
    conversation, messages = play(
        chat, policy, [[ASKS], [GOES_ON]], limits=TurnFlags(max_tokens_per_turn=8)
    )
    assert [len(ids) for ids in policy.given] == [8, 3]  # six letters, two of three bytes
    assert messages[1]["content"] == "It is \N{REPLACEMENT CHARACTER}"
    (row,) = conversation.trajectory(FinishReason.STOP).segments
    assert [(row.token_ids, row.loss_mask)] == rows_of(policy)
    assert row.token_ids[len(policy.asked[0]) :][:8] == policy.given[0]


def test_plain_text_goes_on_behind_the_end_of_a_turn():
    chat = plain()
    policy = ScriptedPolicy(chat, ["b<eos>", "d", "f<eos>"])
    said = [[{"role": "user", "content": text}] for text in ("a", "c", "e")]
    conversation, _ = play(chat, policy, said)
    (row,) = conversation.trajectory(FinishReason.STOP).segments
    assert chat.tokenizer.decode(row.token_ids) == "ab<eos>cdef<eos>"
    assert row.loss_mask == [False, True, True, False, True, False, True, True]
    assert row.rollout_logprobs == [0, -1, -1, 0, -2, 0, -3, -3]
    assert [(s.start, s.end) for s in row.versions] == [(1, 3), (4, 5), (6, 8)]
    assert conversation.trajectory(FinishReason.STOP).text == "b<eos>cdef<eos>"


def test_a_row_for_each_turn():
    policy = ScriptedPolicy(plain(), ["b<eos>", "d"])
    said = [[{"role": "user", "content": text}] for text in ("a", "c")]
    conversation, _ = play(plain(), policy, said, row_per_turn=True)
    trajectory = conversation.trajectory(FinishReason.STOP)
    first, second = trajectory.segments
    assert trajectory.text == "b<eos>cd"
    assert second.token_ids[:3] == first.token_ids
    assert (first.loss_mask, second.loss_mask) == ([0, 1, 1], [0, 0, 0, 0, 1])
    assert second.rollout_logprobs == [0, 0, 0, 0, -2]
    assert conversation.forks == 0


def test_tokens_run_out():
    said = [[{"role": "user", "content": "a"}]] * 3
    for sampling in (Sampling(max_tokens=4), Sampling(max_tokens=90, max_len=5)):
        policy = ScriptedPolicy(plain(), ["bb", "bbbbb", "b"])
        conversation = Conversation(EpisodeConfig(plain()), PROMPT, policy, sampling)
        messages = []
        with pytest.raises(EpisodeOver) as over:
            for others in said:
                messages += others
                messages.append(asyncio.run(conversation.reply(messages)).message)
        assert over.value.finish_reason is FinishReason.LENGTH and conversation.is_full
        # a bb a b: the observation takes from the row, too
        assert [s.max_tokens for s in policy.sampling] == [4, 1]
        assert [len(ids) for ids in policy.given] == [2, 1]


def test_a_turn_has_room_of_its_own():
    policy = ScriptedPolicy(plain(), ["bbbbb", "b<eos>"])
    said = [[{"role": "user", "content": "a"}]] * 2
    conversation, _ = play(plain(), policy, said, limits=TurnFlags(max_tokens_per_turn=3))
    assert [len(ids) for ids in policy.given] == [3, 2] and not conversation.is_full


def test_turns_at_the_same_time_have_a_row_each():
    policy = ScriptedPolicy(plain(), ["b<eos>"] * 4)
    said = [[{"role": "user", "content": "a"}]] * 2
    conversation, messages = play(plain(), policy, said)

    async def twice():
        more = [*messages, {"role": "user", "content": "c"}]
        return await asyncio.gather(conversation.reply(more), conversation.reply(more))

    asyncio.run(twice())
    assert (
        len(conversation.trajectory(FinishReason.STOP).segments) == 2
    )  # nobody waited for the other


def test_turns_run_out():
    policy, said = ScriptedPolicy(plain(), ["b<eos>"] * 3), {"role": "user", "content": "a"}
    limits = TurnFlags(max_turns=3)
    conversation, messages = play(plain(), policy, [[said]], limits=limits)

    async def thrice():
        chats = ([*messages, {"role": "user", "content": text}] for text in "xyz")
        return await asyncio.gather(*map(conversation.reply, chats), return_exceptions=True)

    *_, last = asyncio.run(thrice())
    assert isinstance(last, EpisodeOver) and last.finish_reason is FinishReason.MAX_TURNS
    assert conversation.turns == 3


def test_a_turn_that_fails_leaves_nothing():
    policy = ScriptedPolicy(plain(), ["b<eos>"])
    conversation, messages = play(plain(), policy, [[{"role": "user", "content": "a"}]])
    before = conversation.trajectory(FinishReason.STOP).segments[0].token_ids[:]
    more = [*messages, {"role": "user", "content": "c"}]
    with pytest.raises(IndexError):  # nothing is left to say
        asyncio.run(conversation.reply(more))
    policy.replies.append("d")
    assert conversation.trajectory(FinishReason.STOP).segments[0].token_ids == before
    asyncio.run(conversation.reply(more))
    (row,) = conversation.trajectory(FinishReason.STOP).segments
    assert plain().tokenizer.decode(row.token_ids) == "ab<eos>cd"


def test_what_a_turn_earns_stands_on_its_last_token():
    policy = ScriptedPolicy(plain(), ["b<eos>", "d"])
    conversation = Conversation(EpisodeConfig(plain()), PROMPT, policy, ROOM)
    messages = []
    for text, reward in (("a", 0.5), ("c", 2.0)):
        messages.append({"role": "user", "content": text})
        messages.append(asyncio.run(conversation.reply(messages)).message)
        conversation.credit(reward)
    conversation.credit(1.0)
    score = conversation.trajectory(FinishReason.STOP, Score(3.5)).score
    assert score == Score(3.5, token_rewards=[0, 0, 0.5, 0, 3.0])


def test_nothing_was_played():
    conversation = Conversation(EpisodeConfig(plain()), PROMPT, ScriptedPolicy(plain(), []), ROOM)
    trajectory = conversation.trajectory(FinishReason.ENVIRONMENT_ERROR)
    assert trajectory.segments[0].token_ids == [1, 2] and trajectory.response_length == 0


def test_the_process_of_an_agent_starts_without_heavy_libraries():
    """A file that plays by ``Conversation`` is loaded in a process of its own."""
    heavy = ("torch", "transformers", "datasets", "numpy")
    use = f"import openrl.agents.conversation, sys; print(*({{*{heavy}}} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("row_per_turn", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_a_teacher_reads_the_same_turns_after_another_prompt(family, row_per_turn):
    """With tools in the system message, and in several rows: what differs is only what the teacher
    is told."""
    chat, words = chat_of(family), FAMILIES[family]
    hinted = {**ASKS, "content": "It is 4.\n\nWhat is 2 + 2?"}
    told = Prompt("train:0", [3], "", messages=(hinted,))
    prompt = Prompt("train:0", [1, 2], "", messages=(ASKS,), privileged=told)
    policy = ScriptedPolicy(chat, [words.says + words.end] * 2)
    config = EpisodeConfig(chat, row_per_turn=row_per_turn)
    conversation = Conversation(config, prompt, policy, ROOM)

    async def turns():
        messages = [ASKS]
        for _ in range(2):
            reply = await conversation.reply(messages, TOOLS)
            messages += [reply.message, GOES_ON]

    asyncio.run(turns())
    asked = chat.encode(chat.render([ASKS], TOOLS))
    for segment in conversation.trajectory(FinishReason.STOP).segments:
        assert segment.token_ids[: len(asked)] == asked
        own = segment.privileged
        assert own.length == len(asked)
        assert own.token_ids == chat.encode(chat.render([hinted], TOOLS))
