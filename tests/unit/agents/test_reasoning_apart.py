"""Chat templates that want reasoning apart from the content: a policy is shown the history that it
wrote, in one row where the template keeps it."""

import asyncio

import pytest

from openrl.agents.conversation import EpisodeConfig
from openrl.agents.environments.agent import EnvironmentAgent
from openrl.agents.environments.gym import GymEnvironment
from openrl.agents.probes import require_history
from openrl.config.groups.agent import TurnFlags
from openrl.data.template_forms import ReplyForm
from openrl.errors import UserError
from openrl.types import Prompt, Sampling
from tests.chat_templates import (
    APART,
    CHANNELS,
    COMMAND,
    FAMILIES,
    KIMI,
    TRL,
    chat_of,
    chat_with,
)
from tests.endpoint import run
from tests.scripted_policy import ScriptedPolicy
from tests.unit.agents.test_endpoint_openai import chat as complete
from tests.unit.agents.test_endpoint_openai import client_of, trained_as_sampled

PROMPT = Prompt("train:0", [], "", meta={"seed": 1}, source="echo")
ROOM = Sampling(max_tokens=10_000)


class Echo:
    """A game of ``turns`` turns that repeats each action."""

    def __init__(self, turns):
        self.turns = turns

    def reset(self, seed=None):
        return "Begin.", {}

    def step(self, action):
        self.turns -= 1
        return f"You said {len(action)} letters.", 1.0, not self.turns, False, {}


def play(chat, replies, end, limits=TurnFlags()):
    policy = ScriptedPolicy(chat, [reply + end for reply in replies])
    agent = EnvironmentAgent(
        lambda _: GymEnvironment(Echo(len(replies))), EpisodeConfig(chat, limits=limits)
    )
    return asyncio.run(agent.run(PROMPT, policy, ROOM)), policy


def trl(name, **kwargs):
    return chat_with((TRL / f"{name}.jinja").read_text(), **kwargs)


KEEPS = {  # what the policy writes after a prompt that opens the reasoning, or does not
    "mine": (lambda: chat_with(APART), "Two.\n</think>\n\n"),
    "qwen3_8": (lambda: trl("qwen3_8"), "Two.\n</think>\n\n"),
    "nemotron_3_nano": (
        lambda: trl("nemotron_3_nano", truncate_history_thinking=False),
        "Two.\n</think>\n\n",
    ),
    "lfm2_2_5": (lambda: trl("lfm2_2_5_v2", preserve_thinking=True), "<think>Two.</think>"),
}


@pytest.mark.parametrize("template", KEEPS)
def test_three_turns_with_reasoning_are_one_row(template):
    made, thinks = KEEPS[template]
    chat = made()
    replies = [f"{thinks}It is {n}." for n in (4, 5, 6)]
    played, policy = play(chat, replies, "<|im_end|>")
    (row,) = played.segments
    assert row.token_ids == policy.asked[2] + policy.given[2]
    assert played.metrics["forked_segments"] == 0
    shown = chat.tokenizer.decode(policy.asked[2])
    assert shown.count(f"{replies[0]}<|im_end|>") == 1 and shown.count("Two.") == 2


def test_a_reply_without_reasoning_after_a_prompt_that_opens_it():
    played, policy = play(chat_with(APART), ["\n</think>\n\nA", "\n</think>\n\nB"], "<|im_end|>")
    assert played.segments[0].token_ids == policy.asked[1] + policy.given[1]


def test_a_reply_that_was_cut_in_its_reasoning_is_shown_as_reasoning():
    chat = chat_with(APART)
    reply = "Two and two and two and two"
    _, policy = play(chat, [reply, "So.\n</think>\n\n4"], "", TurnFlags(max_tokens_per_turn=8))
    cut = chat.tokenizer.decode(policy.given[0]).strip()
    assert f"<think>\n{cut}\n</think>\n\n<|im_end|>" in chat.tokenizer.decode(policy.asked[1])


def test_channels_of_earlier_turns():
    """gpt-oss, which refuses them in the content and drops the reasoning of earlier turns."""
    thinks = (
        "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>"
    )
    answer = "<|channel|>final<|message|>"
    for chat in (chat_with(CHANNELS, "<|return|>"), trl("gptoss", end="<|return|>")):
        replies = [f"{thinks}It is 4.", f"{answer}It is 5.", f"{thinks}It is 6."]
        played, policy = play(chat, replies, "<|return|>")
        shown = chat.tokenizer.decode(policy.asked[2])
        for said in ("It is 4.", "It is 5."):
            assert f"<|start|>assistant<|channel|>final<|message|>{said}<|end|>" in shown
        assert "analysis<|message|>" not in shown
        assert len(played.segments) == 3  # as the template ends turns in another way than policies


def test_answers_between_marks():
    """Command R7B writes the marks around an answer itself."""
    answer = "<|START_RESPONSE|>It is 4.<|END_RESPONSE|>"
    played, policy = play(chat_with(COMMAND), [answer, answer], "<|im_end|>")
    (row,) = played.segments
    assert row.token_ids == policy.asked[1] + policy.given[1]


def test_a_client_that_sends_replies_back_as_it_got_them():
    chat = chat_with(APART)
    thinks = [f"Two.\n</think>\n\nIt is {n}.<|im_end|>" for n in (4, 5)]
    policy = ScriptedPolicy(chat, thinks)
    ask = {"role": "user", "content": "2 + 2?"}

    async def talk(session):
        async with client_of(session) as client:
            said = (await complete(client, [ask])).choices[0].message
            await complete(client, [ask, said, {"role": "user", "content": "Sure?"}])

    session = run(talk, policy, config=EpisodeConfig(chat))
    trained_as_sampled(session, policy, 1)


# -- before a run ----------------------------------------------------------------------------------

ZOO = [path.stem for path in sorted(TRL.glob("*.jinja")) if "training" not in path.stem]
NO_TEXT = {"idefics3", "smolvlm", "llava_next"}  # they show only lists of parts


@pytest.mark.parametrize("template", sorted({*ZOO} - NO_TEXT))
def test_real_templates_show_a_policy_its_history(template):
    require_history(trl(template))


@pytest.mark.parametrize("template", [*FAMILIES, APART, CHANNELS, COMMAND, KIMI])
def test_templates_of_every_form_show_a_policy_its_history(template):
    require_history(chat_of(template) if template in FAMILIES else chat_with(template))


def test_a_template_that_has_no_form_for_a_reply_is_refused():
    """It puts an empty block of reasoning before every reply, and reads no reasoning."""
    template = APART.replace("m.reasoning_content", "none")
    with pytest.raises(
        UserError, match=r"its own earlier replies[\s\S]*--tokenizer_chat_template"
    ) as error:
        require_history(chat_with(template))
    assert "its reasoning would stand" in error.value.message
    refuses = APART.replace('m.content | trim ~ "', 'raise_exception("no replies") ~ "')
    with pytest.raises(UserError, match="no replies"):
        require_history(chat_with(refuses))


FORM = ReplyForm("reasoning_content", "<think>\n", False, "\n</think>\n\n", "", "")
OPENED = ReplyForm("reasoning", "", True, "\n</think>\n\n", "", "<|END|>")


@pytest.mark.parametrize(
    "form, text, split",
    [
        (FORM, "<think>\nTwo.\n</think>\n\n4 ", {"reasoning_content": "Two.", "content": "4 "}),
        (FORM, " <think> Two. </think> 4", {"reasoning_content": "Two.", "content": "4"}),
        (FORM, "<think>\nTwo.", {"reasoning_content": "Two.", "content": ""}),
        (FORM, "<think>\n\n</think>\n\n4", {"content": "4"}),
        (FORM, "4", None),
        (FORM, "I think </b> 4", None),
        (OPENED, "Two.\n</think>\n\n4<|END|>", {"reasoning": "Two.", "content": "4"}),
        (OPENED, "Two.", {"reasoning": "Two.", "content": ""}),
        (ReplyForm(), "<think>\nTwo.\n</think>\n\n4", None),
        (ReplyForm(leading="[A]", trailing="[/A]"), "[A]4[/A]", {"content": "4"}),
    ],
)
def test_what_a_reply_is_made_of(form, text, split):
    assert form.split(text) == split
