"""Images for agents that nobody wrote for us: the rows of clients of the endpoint, of programs and of
files are what the model's own processor makes of the whole chat."""

import asyncio
import base64
import io
import shlex
import sys

import httpx
import pytest
from PIL import Image as Picture

from openrl.agents.chat import ChatFormat
from openrl.agents.command_agent import AgentCommand
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.endpoint.server import serve
from openrl.agents.files.build import agent_file, open_file_agent
from openrl.compat.openrlhf.executor_agent import NotSampled
from openrl.config.groups.vision import ImageFlags
from openrl.data.images import RowImages
from openrl.errors import BadRow
from openrl.types import FinishReason, Prompt, Sampling
from openrl.vision.pictures import make_image
from openrl.vision.processor import VisionProcessor
from tests.endpoint import run
from tests.scripted_policy import ScriptedPolicy
from tests.tiny_vision import picture, png, tiny_vision_dir

pytestmark = pytest.mark.full

ROOM = Sampling(max_tokens=10_000, max_len=10_000, seed=7)
FIRST, SECOND = png(picture(1)), png(picture(2, (40, 90)))
ASKED = "u:<image>what?<eos>a:"


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return VisionProcessor(str(tiny_vision_dir(tmp_path_factory.mktemp("m"))), {})


@pytest.fixture(scope="module")
def chat(processor):
    images = RowImages(ImageFlags(max_images_per_prompt=2), processor)
    return ChatFormat(processor.processor.tokenizer, chat=True, kwargs={}, images=images)


@pytest.fixture(scope="module")
def prompt(chat):
    ids, placed = chat.place(chat.encode(ASKED), [make_image(FIRST)], 0)
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
    return Prompt("p:0", ids, ASKED, "12", messages=(asked,), images=placed)


def policy_of(chat):
    return ScriptedPolicy(chat, ["12<eos>", "7<eos>"])


def url(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def assert_row(processor, trajectory, text, files, policy):
    """One row of this text with these images, in which what was sampled is trained."""
    (row,) = trajectory.segments
    images = [placed.image for placed in row.images]
    assert images == [make_image(file) for file in files]
    assert [image.data for image in images] == files
    processor.check(text, row.token_ids, images)  # raises if they differ
    assert row.sampled_ids == [token for ids in policy.given for token in ids]
    assert policy.shown[-1] == row.images


# -- the endpoint ----------------------------------------------------------------------------------

TEXT = "u:<image>what?<eos>a:12<eos>u:and<image><eos>a:7<eos>"


def completions(data):
    return {"type": "image_url", "image_url": {"url": url(data)}}


def anthropics(data):
    source = {"type": "base64", "media_type": "image/png", "data": url(data).partition(",")[2]}
    return {"type": "image", "source": source}


def chats(image, text, key="messages"):
    """The bodies of two turns."""
    said = {"role": "assistant", "content": "12"}
    asked = {"role": "user", "content": [image(FIRST), {"type": text, "text": "what?"}]}
    more = {"role": "user", "content": [{"type": text, "text": "and"}, image(SECOND)]}
    return [{key: [asked], "max_tokens": 99}, {key: [asked, said, more], "max_tokens": 99}]


@pytest.mark.parametrize(
    ("path", "bodies"),
    [
        ("chat/completions", chats(completions, "text")),
        ("messages", chats(anthropics, "text")),
        (
            "responses",
            chats(lambda d: {"type": "input_image", "image_url": url(d)}, "input_text", "input"),
        ),
    ],
)
def test_clients_show_images_in_their_own_ways(processor, chat, path, bodies):
    async def talk(session):
        headers = {"Authorization": f"Bearer {session.key}"}
        async with httpx.AsyncClient(headers=headers, timeout=30) as client:
            for body in bodies:
                reply = await client.post(f"{session.root}/v1/{path}", json=body)
                assert reply.status_code == 200, reply.text

    policy = policy_of(chat)
    session = run(talk, policy, sampling=ROOM, config=EpisodeConfig(chat))
    assert_row(processor, session.trajectory(), TEXT, [FIRST, SECOND], policy)


def refused(chat, *parts):
    """What the endpoint says to a message of these parts."""

    async def talk(session):
        body = {"messages": [{"role": "user", "content": list(parts)}]}
        headers = {"Authorization": f"Bearer {session.key}"}
        async with httpx.AsyncClient(headers=headers, timeout=30) as client:
            reply = await client.post(f"{session.root}/v1/chat/completions", json=body)
        assert reply.status_code == 400
        said.append(reply.json()["error"]["message"])

    said = []
    run(talk, policy_of(chat), sampling=ROOM, config=EpisodeConfig(chat))
    return said[0]


def test_images_that_clients_are_refused(processor, chat, tmp_path):
    file = tmp_path / "own.png"
    file.write_bytes(FIRST)

    def named(address):
        return {"type": "image_url", "image_url": {"url": address}}

    for path in (str(file), f"file://{file}"):
        assert "begins with data:, http://, https://" in refused(chat, named(path))
    assert "cannot be read" in refused(chat, named(url(b"no image")))
    assert "without base64" in refused(chat, named("data:image/png,abc"))
    assert "is the private address 127.0.0.1" in refused(chat, named("http://127.0.0.1:9/a.png"))
    mark = {"type": "text", "text": "a <image> of mine"}
    assert "2 places for images in the text, and 1 images" in refused(
        chat, completions(FIRST), mark
    )
    blind = ChatFormat(processor.processor.tokenizer, chat=True, kwargs={})
    assert "can only read text" in refused(blind, completions(FIRST))


# -- programs --------------------------------------------------------------------------------------

PROGRAM = """
import json, os, urllib.request
body = json.dumps({"messages": json.load(open(os.environ["OPENRL_MESSAGES_FILE"]))}).encode()
head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
assert json.loads(os.environ["OPENRL_MESSAGES"])[0]["content"][0] == {"type": "image"}
urllib.request.urlopen(request, timeout=30)
"""


def test_a_program_finds_the_images_of_its_row(processor, chat, prompt):
    policy = policy_of(chat)

    async def main():
        async with serve(EpisodeConfig(chat)) as endpoint:
            agent = AgentCommand(shlex.join([sys.executable, "-c", PROGRAM]), endpoint)
            return await agent.run(prompt, policy, ROOM)

    trajectory = asyncio.run(asyncio.wait_for(main(), 60))
    assert_row(processor, trajectory, ASKED + "12<eos>", [FIRST], policy)
    assert trajectory.segments[0].images == prompt.images


# -- files -----------------------------------------------------------------------------------------


def play_file(tmp_path, chat, prompt, text):
    """The trajectory of a file, or what failed; and its policy."""
    path, policy = tmp_path / "agent.py", policy_of(chat)
    path.write_text(text)

    async def main():
        config = EpisodeConfig(chat)
        async with (
            serve(config) as endpoint,
            open_file_agent(agent_file(str(path)), config, endpoint) as agent,
        ):
            one = asyncio.gather(agent.run(prompt, policy, ROOM), return_exceptions=True)
            return (await one)[0]

    return asyncio.run(asyncio.wait_for(main(), 120)), policy


RUN = """
import httpx

class Agent:
    async def run(self, data, base_url, api_key):
        async with httpx.AsyncClient(headers={"Authorization": "Bearer " + api_key}) as client:
            url = base_url + "/chat/completions"
            reply = await client.post(url, json={"messages": data["messages"]}, timeout=30)
        return float(reply.status_code == 200)
"""

CHAT_AGENT = """
import httpx
from molt.agents.base import Result
from molt.agents.chat_agent import ChatAgent

class Agent(ChatAgent):
    async def run(self, ctx):
        assert ctx.prompt == "what?"
        async with httpx.AsyncClient() as client:
            url = ctx.base_url + "/chat/completions"
            reply = await client.post(url, json={"messages": ctx.messages}, timeout=30)
        return Result(reward=float(reply.status_code == 200 and ctx.images[0].size == (80, 60)))
"""


@pytest.mark.parametrize("text", [RUN, CHAT_AGENT], ids=["run", "molt"])
def test_agents_of_the_endpoint_send_their_messages_as_they_are(
    tmp_path, processor, chat, prompt, text
):
    trajectory, policy = play_file(tmp_path, chat, prompt, text)
    assert_row(processor, trajectory, ASKED + "12<eos>", [FIRST], policy)
    assert trajectory.score.reward == 1.0


EXECUTOR = """
import io
from PIL import Image
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        first = (await llm_engine.generate.remote(tokens, sampling_params)).outputs[0].token_ids
        ranges = [(len(tokens), len(tokens) + len(first))]
        tokens = tokens + first
        assert [image.size for image in images] == [(80, 60)]
        if {more}:
            tokens = tokens + hf_tokenizer("u:and<image><eos>a:", add_special_tokens=False)["input_ids"]
            seen = {{"image": [*images, Image.open(io.BytesIO({second}))]}}
            output = await llm_engine.generate(tokens, sampling_params, multi_modal_data=seen)
            ranges.append((len(tokens), len(tokens) + len(output.outputs[0].token_ids)))
            tokens = tokens + output.outputs[0].token_ids
        {spoil}
        return {{"observation_tokens": tokens, "action_ranges": ranges, "reward": 1.0}}
"""


def executor(more=False, spoil="pass"):
    return EXECUTOR.format(more=more, second=SECOND, spoil=spoil)


def test_an_executor_is_given_the_images_of_its_row(tmp_path, processor, chat, prompt):
    trajectory, policy = play_file(tmp_path, chat, prompt, executor())
    assert_row(processor, trajectory, ASKED + "12<eos>", [FIRST], policy)
    assert (trajectory.finish_reason, trajectory.text) == (FinishReason.STOP, "12<eos>")
    (row,) = trajectory.segments
    assert (
        row.images == prompt.images and row.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    )
    assert (row.versions[0].start, row.versions[0].end) == (
        len(prompt.token_ids),
        len(row.token_ids),
    )


def test_an_executor_shows_images_of_its_own(tmp_path, processor, chat, prompt):
    trajectory, policy = play_file(tmp_path, chat, prompt, executor(more=True))
    (row,) = trajectory.segments
    images = [placed.image for placed in row.images]
    processor.check(TEXT, row.token_ids, images)
    assert images[0] == prompt.images[0].image  # the row's own, by the object that it was given
    own, theirs = (Picture.open(io.BytesIO(data)) for data in (images[1].data, SECOND))
    assert own.tobytes() == theirs.tobytes()
    assert row.sampled_ids == policy.given[0] + policy.given[1]
    sampled = [i for i, mine in enumerate(row.loss_mask) if mine]
    assert [row.rollout_logprobs[i] for i in sampled] == [-1.0] * 3 + [-2.0] * 2
    assert trajectory.text == TEXT.removeprefix(ASKED)  # with one mark for each image


INSTANCE = """
from openrlhf.utils.agent import AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        assert [image.size for image in states["images"]] == [(80, 60)]
        self.left = 1
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.left -= 1
        done = self.left < 0
        more = {} if done else {"environment_images": [SECOND]}
        feedback = "" if done else "u:and<image><eos>a:"
        return {"rewards": 1.0, "environment_feedback": feedback, "done": done, **more}
"""
ENV = """
from molt.agents.base import Env, Result

class AgentRunner(Env):
    left = 1

    async def step(self, state):
        self.left -= 1
        if self.left < 0:
            return Result(1.0)
        return Result(1.0, "u:and<image><eos>a:", terminated=False, images=[SECOND])
"""


@pytest.mark.parametrize("text", [INSTANCE, ENV], ids=["openrlhf", "molt"])
def test_agents_of_texts_mark_their_images_themselves(tmp_path, processor, chat, prompt, text):
    text = text.replace("SECOND", repr(SECOND))
    trajectory, policy = play_file(tmp_path, chat, prompt, text)
    assert_row(processor, trajectory, TEXT, [FIRST, SECOND], policy)
    assert trajectory.score.reward == 2.0


@pytest.mark.parametrize(
    ("spoil", "kind", "problem"),
    [
        ("tokens = [tokens[-1], *tokens]; ranges = [(s + 1, e + 1) for s, e in ranges]", NotSampled,
         "not what the engine sampled"),
        ("tokens = tokens + hf_tokenizer('<image>', add_special_tokens=False)['input_ids']", BadRow,
         "2 places for images in the text, and 1 images"),
    ],
)  # fmt: skip
def test_what_no_turn_was_shown_is_not_trained(tmp_path, chat, prompt, spoil, kind, problem):
    failure, _ = play_file(tmp_path, chat, prompt, executor(spoil=spoil))
    assert isinstance(failure, kind) and problem in str(failure)
