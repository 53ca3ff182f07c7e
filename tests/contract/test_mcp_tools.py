"""Tools of MCP servers: one of the mcp package itself, and one that answers as the protocol also
allows."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from openrl.agents.base import ToolError
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.tools import mcp
from openrl.agents.tools.agent import ToolAgent
from openrl.agents.tools.build import open_toolbox
from openrl.agents.tools.mcp import McpFailed, find_tools
from openrl.agents.tools.parsers import parser_for
from openrl.errors import UserError
from openrl.types import FinishReason, Prompt, Sampling
from tests.chat_templates import chat_of
from tests.scripted_policy import ScriptedPolicy


@asynccontextmanager
async def serve(app):
    """The URL of an app on a free port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        assert not serving.done(), "the server did not start"
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        server.should_exit = True
        await serving


def real_server():
    from mcp.server import MCPServer

    server = MCPServer("arithmetic")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @server.tool()
    def divide(a: float, b: float) -> str:
        """Divides two numbers."""
        return f"{a / b}"

    @server.tool()
    def say(text: str) -> str:
        """Says a text."""
        return text

    return server


@pytest.mark.parametrize("as_json", [True, False], ids=["JSON", "events"])
@pytest.mark.parametrize("stateless", [True, False], ids=["stateless", "sessions"])
def test_the_server_of_the_mcp_package(as_json, stateless):
    async def play():
        app = real_server().streamable_http_app(json_response=as_json, stateless_http=stateless)
        async with serve(app) as url:
            toolbox = (await open_toolbox(url, 10.0))()
            names = [schema["function"]["name"] for schema in toolbox.schemas]
            results = await asyncio.gather(
                toolbox.call("add", {"a": 2, "b": 3}),
                toolbox.call("divide", {"a": 1, "b": 4}),
                toolbox.call("divide", {"a": 1, "b": 0}),
                toolbox.call("add", {"a": "two"}),
                toolbox.call("say", {"text": "\ud83d"}),
                return_exceptions=True,
            )
            results.append(await toolbox.call("say", {"text": "\U0001f600"}))
            await toolbox.close()
            return toolbox.schemas[0]["function"], names, results

    function, names, (added, divided, failed, wrong, half, said) = asyncio.run(play())
    assert names == ["add", "divide", "say"] and function["description"] == "Adds two numbers."
    assert function["parameters"]["required"] == ["a", "b"]
    assert (added, divided) == ("5", "0.25")
    assert isinstance(failed, ToolError) and "divi" in str(failed)
    assert isinstance(wrong, ToolError) and "'b' is a required property" in str(wrong)
    assert isinstance(half, ToolError) and "half of a surrogate pair" in str(half)
    assert said == "\U0001f600"


def test_an_episode_with_a_server():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'

    async def play():
        async with serve(real_server().streamable_http_app()) as url:
            chat = chat_of("qwen2.5")
            policy = ScriptedPolicy(chat, [call, "It is 4.<|im_end|>"])
            parse = parser_for("hermes", chat)
            agent = ToolAgent(await open_toolbox(url, 10.0), EpisodeConfig(chat, parse))
            prompt = Prompt("train:0", [1], "What is 2 + 2?")
            return await agent.run(prompt, policy, Sampling(max_tokens=1000))

    trajectory = asyncio.run(play())
    assert (
        trajectory.finish_reason is FinishReason.STOP and "<tool_response>\n4\n" in trajectory.text
    )


class PlainServer:
    """Sessions that count calls; tools on two pages; answers behind other events; errors."""

    def __init__(self):
        self.sessions, self.ended, self.app = {}, [], FastAPI()
        self.speaks, self.lets_go = asyncio.Event(), asyncio.Event()
        self.speaks.set()
        self.lets_go.set()
        self.notes = 202  # the status that notifications get
        self.code = -32602  # of the error that a tool reports
        self.app.post("/mcp")(self.post)
        self.app.delete("/mcp")(self.delete)

    async def post(self, request: Request):
        message = await request.json()
        method, params = message["method"], message.get("params", {})
        session = request.headers.get("mcp-session-id")
        if method == "initialize":
            await self.speaks.wait()
            assert params["protocolVersion"] and params["clientInfo"]["name"] == "openrl"
            session = f"s{len(self.sessions)}"
            self.sessions[session] = 0
            result = {
                "protocolVersion": "2025-03-26",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "plain", "version": "1"},
            }
            return self.json(message, result, {"Mcp-Session-Id": session})
        if session not in self.sessions:
            return Response(status_code=404)
        assert request.headers["mcp-protocol-version"] == "2025-03-26"
        assert "text/event-stream" in request.headers["accept"]
        if "id" not in message:
            return Response(status_code=self.notes)
        if method == "tools/list":
            second = params.get("cursor") == "2"
            return self.json(
                message,
                {"tools": [tool("fails")]} if second
                else {"tools": [tool("count"), tool("shows"), tool("ends")], "nextCursor": "2"},
            )  # fmt: skip
        self.sessions[session] += 1
        if params["name"] in UNREADABLE:
            return UNREADABLE[params["name"]]()
        if params["name"] == "shapeless":
            return self.json(message, {"content": [{"type": "hologram"}]})
        if params["name"] == "paints":
            picture = {"type": "image", "data": "A" * 2 * 2**20, "mimeType": "image/png"}
            answer = {"jsonrpc": "2.0", "id": message["id"], "result": {"content": [picture]}}
            return StreamingResponse(
                iter([f"data: {json.dumps(answer)}\n\n"]), media_type="text/event-stream"
            )
        if params["name"] == "fails":
            error = {"code": self.code, "message": "nothing can be done"}
            return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "error": error})
        if params["name"] == "mixes_up":
            return self.json({"id": message["id"] + 1}, {"content": []})
        if params["name"] == "ends":
            return StreamingResponse(iter([]), media_type="text/event-stream")
        if params["name"] == "shows":
            blocks = [
                {"type": "image", "data": "AAAA", "mimeType": "image/png"},
                {"type": "resource", "resource": {"uri": "file:///a", "text": "a's text"}},
                {"type": "resource_link", "uri": "file:///b", "name": "b"},
            ]
            return self.json(message, {"content": blocks})
        return StreamingResponse(
            self.events(message, self.sessions[session]), media_type="text/event-stream"
        )

    async def delete(self, request: Request):
        await self.lets_go.wait()
        self.ended.append(request.headers["mcp-session-id"])
        return Response(status_code=204)

    @staticmethod
    def json(message, result, headers=None):
        return JSONResponse(
            {"jsonrpc": "2.0", "id": message["id"], "result": result}, headers=headers
        )

    @staticmethod
    async def events(message, count):
        yield ": a comment\n\n"
        progress = {
            "jsonrpc": "2.0",
            "method": "notifications/message",
            "params": {"level": "info", "data": 1},
        }
        yield f"event: message\ndata: {json.dumps(progress)}\n\n"
        result = {"content": [], "structuredContent": {"count": count}}
        answer = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        first, second = json.dumps(answer, indent=1).split("\n", 1)  # data of several lines
        rest = "".join(f"data: {line}\r\n" for line in second.split("\n"))
        yield f"id: 7\r\ndata:{first}\r\n{rest}\r\n"


def tool(name):
    return {"name": name, "description": name, "inputSchema": {"type": "object"}}


UNREADABLE = {
    "garbles": lambda: Response("{no JSON", media_type="application/json"),
    "garbles_events": lambda: StreamingResponse(
        iter(["data: {no JSON\n\n"]), media_type="text/event-stream"
    ),
    "shows_a_page": lambda: Response("<html>log in</html>", media_type="text/html"),
    "sends_elsewhere": lambda: Response(
        status_code=307, headers={"Location": "http://elsewhere.invalid/mcp"}
    ),
    "accepts": lambda: Response(status_code=202),
    "has_lost_the_id": lambda: JSONResponse(
        {"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "it is garbled"}}
    ),
}


@pytest.mark.parametrize("name", [*UNREADABLE, "shapeless", "mixes_up"])
def test_an_answer_that_cannot_be_read_is_not_the_policys_fault(name):
    said = "it is garbled" if name == "has_lost_the_id" else ""

    async def play():
        async with serve(PlainServer().app) as url:
            toolset = (await find_tools(url))()
            with pytest.raises(McpFailed, match=rf"^http://127.*/mcp: \w.*{said}"):
                await toolset.call(name, {})
            await toolset.close()

    asyncio.run(play())


def test_a_notification_that_is_refused_ends_no_session():
    async def play():
        server = PlainServer()
        server.notes = 400
        async with serve(server.app) as url:
            toolset = (await find_tools(url))()
            assert await toolset.call("count", {}) == '{"count": 1}'
            assert await toolset.call("count", {}) == '{"count": 2}'
            await toolset.close()

    asyncio.run(play())


def test_a_picture_of_two_megabytes_in_an_event():
    async def play():
        async with serve(PlainServer().app) as url:
            toolset = (await find_tools(url))()
            shown = await toolset.call("paints", {})
            await toolset.close()
            return shown

    picture, _ = asyncio.run(play())
    assert picture["image"] == "data:image/png;base64," + "A" * 2 * 2**20


@pytest.mark.parametrize("silent", ["speaks", "lets_go"])
def test_nobody_waits_for_a_server_that_is_silent(silent, monkeypatch):
    """Whether it says nothing when a session begins or when it ends."""
    monkeypatch.setattr(mcp, "TIMEOUT", 0.5)

    async def play():
        server = PlainServer()
        async with serve(server.app) as url:
            getattr(server, silent).clear()
            if silent == "speaks":
                with pytest.raises(UserError, match=r"/mcp: no answer within 0.5 s"):
                    await open_toolbox(url, 0.0)
            else:
                toolbox = (await open_toolbox(url, 0.0))()
                assert await toolbox.call("count", {}) == '{"count": 1}'
                await toolbox.close()
            getattr(server, silent).set()

    asyncio.run(play())


def test_what_the_protocol_also_allows():
    server = PlainServer()

    async def play():
        async with serve(server.app) as url:
            make = await open_toolbox(url, 10.0)
            first, second, unused = make(), make(), make()
            assert await first.call("count", {}) == '{"count": 1}'
            assert await first.call("count", {}) == '{"count": 2}'
            assert await second.call("count", {}) == '{"count": 1}'  # an episode of its own
            shown = await second.call("shows", {})
            for server.code in (-32602, -32000):  # the latter is mcp's for a lost connection
                with pytest.raises(ToolError, match="nothing can be done"):
                    await first.call("fails", {})
            assert await first.call("count", {}) == '{"count": 5}'  # the session goes on
            for toolbox in (first, unused):
                await toolbox.close()
            with pytest.raises(McpFailed, match="ended without a response"):
                await second.call("ends", {})
            with pytest.raises(McpFailed, match="the session has ended"):
                await second.call("count", {})
            lost = make()
            await lost.call("count", {})
            server.sessions.clear()
            with pytest.raises(McpFailed, match=r"/mcp: it answers 404"):
                await lost.call("count", {})
            await lost.close()
            return shown, [schema["function"]["name"] for schema in first.schemas]

    shown, names = asyncio.run(play())
    assert names == ["count", "shows", "ends", "fails"]
    image = {"type": "image", "image": "data:image/png;base64,AAAA"}
    text = "a's text\n[resource_link file:///b]"
    assert shown == [image, {"type": "text", "text": text}]
    assert server.ended == ["s0", "s1", "s2"]  # of s3, the server knew nothing


def test_a_session_opens_although_its_first_call_gave_up():
    """The first call has no time left while the server says nothing; the second one waits for the
    same session."""
    server = PlainServer()

    async def play():
        async with serve(server.app) as url:
            toolset = (await find_tools(url))()
            server.speaks.clear()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await toolset.call("count", {})
            server.speaks.set()
            assert await toolset.call("count", {}) == '{"count": 1}'
            await toolset.close()
            assert server.ended == ["s0", "s1"]

    asyncio.run(play())


def test_a_server_that_is_not_there():
    async def port_of_nobody():
        async with serve(FastAPI()) as url:
            with pytest.raises(UserError, match=r"no MCP server at http://127.*: it answers 404"):
                await open_toolbox(url, 1.0)
            return url

    gone = asyncio.run(port_of_nobody())
    for url in (gone, "http://"):
        with pytest.raises(UserError, match=f"there is no MCP server at {url}: "):
            asyncio.run(open_toolbox(url, 1.0))


def test_a_server_that_fails_later():
    async def play():
        async with serve(real_server().streamable_http_app()) as url:
            make = await open_toolbox(url, 10.0)
        toolbox = make()
        with pytest.raises(McpFailed, match=r"127\.0\.0\.1"):
            await toolbox.call("add", {"a": 1, "b": 1})
        await toolbox.close()

    asyncio.run(play())
