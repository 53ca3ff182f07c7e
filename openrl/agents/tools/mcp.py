"""Tools of an MCP server, over its streamable HTTP transport.

One POST carries one JSON-RPC message. The reply is JSON, or a stream of events that ends with the
answer. Each episode has a session of its own with the server, which its first call opens."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from ssl import SSLContext
from typing import Any

import httpx

from openrl.agents.base import ToolError, Toolset
from openrl.errors import UserError
from openrl.vision.parts import Content, Part

PROTOCOL = "2025-06-18"
TIMEOUT = 30.0  # seconds to connect, to open a session, to list tools
_CLIENT = {"name": "openrl", "version": "1"}


class McpFailed(RuntimeError):
    """The server is gone or does not follow the protocol, which is not the policy's fault."""


async def find_tools(url: str) -> Callable[[], McpTools]:
    """Return a function that makes the tools of an episode from the server at ``url``. Raises
    UserError that names the URL."""
    session = McpSession(url)
    try:
        async with asyncio.timeout(TIMEOUT):
            await session.open()
            tools = [tool async for tool in session.list_tools()]
    except (McpFailed, ToolError, TimeoutError, KeyError, TypeError) as error:
        why = str(error) or f"no answer within {TIMEOUT:g} s"
        raise UserError(
            f"--tools: there is no MCP server at {url}: {why}",
            "start it, or give the URL of its streamable HTTP transport: http://HOST:PORT/mcp",
        ) from error
    finally:
        await session.close()
    return partial(McpTools, url, [_schema(tool) for tool in tools])


class McpTools(Toolset):
    """The tools of one episode."""

    def __init__(self, url: str, schemas: list[dict[str, Any]]) -> None:
        self.url, self.schemas = url, schemas
        self._session: McpSession | None = None
        self._opening = asyncio.Lock()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call a tool. Raises ToolError for an error that the server reports, and McpFailed if the
        server itself fails."""
        async with self._opening:
            if self._session is None:
                self._session = await self._opened()
        return await self._session.call_tool(name, arguments)

    async def _opened(self) -> McpSession:
        session = McpSession(self.url)
        try:
            await session.open()
        except BaseException:  # perhaps the call's time is over; the next call tries again
            await session.close()
            raise
        return session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class McpSession:
    """The client of one session. Its methods raise McpFailed if the server is gone, and ToolError
    with the server's message if it answers with an error."""

    def __init__(self, url: str) -> None:
        self.url = url
        # no limit for reading: the toolbox limits the time of a call
        limits = httpx.Timeout(TIMEOUT, read=None)
        self._http = httpx.AsyncClient(timeout=limits, verify=_certificates())
        self._headers = {"Accept": "application/json, text/event-stream"}
        self._ids = itertools.count(1)

    async def open(self) -> None:
        about = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": _CLIENT}
        answer = await self._ask("initialize", about)
        self._headers["MCP-Protocol-Version"] = str(answer.get("protocolVersion", PROTOCOL))
        await self._post({"method": "notifications/initialized"})

    async def list_tools(self) -> AsyncIterator[dict[str, Any]]:
        cursor: dict[str, Any] = {}
        while True:
            page = await self._ask("tools/list", cursor)
            for tool in page.get("tools", []):
                yield tool
            if not page.get("nextCursor"):
                return
            cursor = {"cursor": page["nextCursor"]}

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Content:
        params = {"name": name, "arguments": dict(arguments)}
        answer = await self._ask("tools/call", params)
        blocks = answer.get("content", [])
        text = "\n".join(_text(block) for block in blocks if block.get("type") != "image")
        if not text and "structuredContent" in answer:
            text = json.dumps(answer["structuredContent"], ensure_ascii=False)
        if answer.get("isError"):
            raise ToolError(text or f"{name} failed")
        shown = [_image(block) for block in blocks if block.get("type") == "image"]
        return [*shown, {"type": "text", "text": text}] if shown else text

    async def close(self) -> None:
        """End the session, if the server still knows it."""
        with suppress(httpx.HTTPError, TimeoutError):
            if "Mcp-Session-Id" in self._headers:
                await self._http.delete(self.url, headers=self._headers, timeout=TIMEOUT)
        await self._http.aclose()

    async def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its result."""
        message = {"id": next(self._ids), "method": method, "params": params}
        answer = await self._post(message)
        if answer is None:
            raise McpFailed(f"{method} at {self.url} has no answer")
        if "error" in answer:
            raise ToolError(str(answer["error"].get("message", answer["error"])))
        return answer.get("result") or {}

    async def _post(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Send a message and return the answer; None if there is none."""
        body = {"jsonrpc": "2.0", **message}
        try:
            async with self._http.stream(
                "POST", self.url, json=body, headers=self._headers
            ) as reply:
                if reply.status_code >= 400:
                    said = (await reply.aread()).decode(errors="replace")[:200]
                    raise McpFailed(f"{self.url} answers {reply.status_code} {said}".rstrip())
                if session := reply.headers.get("Mcp-Session-Id"):
                    self._headers["Mcp-Session-Id"] = session
                return await _answer(reply, message.get("id"))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            what = str(error) or type(error).__name__
            raise McpFailed(f"{self.url}: {what}") from error


async def _answer(reply: httpx.Response, wanted: int | None) -> dict[str, Any] | None:
    """Return the message with the id ``wanted`` from a body or a stream of events."""
    if wanted is None:
        return None
    if reply.headers.get("Content-Type", "").startswith("text/event-stream"):
        async for data in _events(reply):
            message = json.loads(data)
            if message.get("id") == wanted and "method" not in message:
                return message
        return None
    return json.loads(await reply.aread())


async def _events(reply: httpx.Response) -> AsyncIterator[str]:
    """Yield the data of server-sent events."""
    data: list[str] = []
    async for line in reply.aiter_lines():
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []


def _text(block: dict[str, Any]) -> str:
    """Return a block of a result as text that a policy can read."""
    if block.get("type") == "text":
        return str(block.get("text", ""))
    resource = block.get("resource", {})
    if "text" in resource:
        return str(resource["text"])
    return f"[{block.get('type')} {block.get('uri') or block.get('mimeType') or ''}]"


def _image(block: dict[str, Any]) -> Part:
    return {"type": "image", "image": f"data:{block.get('mimeType')};base64,{block['data']}"}


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool["inputSchema"],
    }
    return {"type": "function", "function": function}


@cache
def _certificates() -> SSLContext:
    return httpx.create_ssl_context()  # takes a while
