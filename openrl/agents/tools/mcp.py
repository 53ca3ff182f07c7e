"""Tools of an MCP server, over its streamable HTTP transport."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import cache, partial
from ssl import SSLContext
from typing import Any

import httpx2
from mcp import ClientSession, MCPError, types
from mcp.client.streamable_http import streamable_http_client
from pydantic import ValidationError

from openrl.agents.base import ToolError, Toolset
from openrl.agents.time_limits import time_limit
from openrl.agents.tools.calls import schema_in_chat
from openrl.errors import UserError, short
from openrl.vision.parts import Content, Part
from openrl.waiting import cancel_all

TIMEOUT = 30.0  # seconds to connect, to open a session, to list tools, to end a session
LARGEST = 64 * 2**20  # bytes of an event; pictures take more than the default of 1 MiB
# no answer came, or none that can be read; any other error is the tool's
_NO_ANSWER = (types.PARSE_ERROR, types.INVALID_REQUEST)
# what mcp itself says with CONNECTION_CLOSED, a code that servers use for errors of their own
_CLOSED = ("Connection closed", "SSE stream ")
_CLIENT = types.Implementation(name="openrl", version="1")


class McpFailed(RuntimeError):
    """The server is gone or does not follow the protocol, which is not the policy's fault."""


async def find_tools(url: str) -> Callable[[], McpTools]:
    """Return a function that makes an episode's tools from a server. Raises UserError."""
    try:
        async with _open_session(url) as session, _in_time():
            page = await session.list_tools()
            tools = page.tools
            while page.next_cursor:
                params = types.PaginatedRequestParams(cursor=page.next_cursor)
                page = await session.list_tools(params=params)
                tools += page.tools
    except McpFailed as error:
        raise UserError(
            f"--tools: there is no MCP server at {error}",
            "start it, or give the URL of its streamable HTTP transport: http://HOST:PORT/mcp",
        ) from error
    schemas = [schema_in_chat(t.name, t.description or "", t.input_schema) for t in tools]
    return partial(McpTools, url, schemas)


class McpTools(Toolset):
    """The tools of one episode. Its first call opens a session of its own with the server."""

    def __init__(self, url: str, schemas: list[dict[str, Any]]) -> None:
        self.url, self.schemas = url, schemas
        self._session: asyncio.Future[Any]  # a ClientSession
        self._keeper: asyncio.Task[Any] | None = None  # opens and closes the session

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call a tool. Raises ToolError for its errors, and McpFailed for the server's."""
        try:
            json.dumps(arguments, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:  # which would end the session
            raise ToolError(f"{name}: an argument holds half of a surrogate pair") from error
        if self._keeper is None:
            self._session = asyncio.Future()
            self._keeper = asyncio.create_task(self._keep_session())
        await asyncio.wait({self._session, self._keeper}, return_when=asyncio.FIRST_COMPLETED)
        if self._keeper.done():
            raise self._loss("the session has ended")
        params = types.CallToolRequestParams(name=name, arguments=dict(arguments))
        request = types.CallToolRequest(params=params)
        try:
            answer = await self._session.result().send_request(request, types.CallToolResult)
        except ValidationError as error:
            raise McpFailed(f"{self.url}: {name} answers what no tool may: {error}") from error
        except MCPError as error:
            closed = error.code == types.CONNECTION_CLOSED and error.message.startswith(_CLOSED)
            if not closed and error.code not in _NO_ANSWER:
                raise ToolError(error.message) from error
            await self.close()
            raise self._loss(error.message) from error
        return _content(name, answer)

    def _loss(self, what: str) -> BaseException:
        """Return why the session, which is over, was lost."""
        assert self._keeper is not None
        known = None if self._keeper.cancelled() else self._keeper.exception()
        return known or McpFailed(f"{self.url}: {what}")

    async def _keep_session(self) -> None:
        """Open the session, and close it when this task is cancelled. Calls come from many tasks,
        but only the task that opened a session may close it."""
        async with _open_session(self.url) as session:
            self._session.set_result(session)
            await asyncio.Event().wait()

    async def close(self) -> None:
        if self._keeper is not None:
            await cancel_all([self._keeper])


@asynccontextmanager
async def _open_session(url: str) -> AsyncIterator[ClientSession]:
    """Open a session that ends with the context. Raises McpFailed if the server cannot be reached,
    answers with an HTTP error, or breaks the protocol."""
    # no limit for reading: the toolbox limits the time of a call
    limits = httpx2.Timeout(TIMEOUT, read=None)
    hooks: dict[str, list[Callable[..., Any]]]
    hooks = {"request": [_limit_end], "response": [_check_reply]}
    http = httpx2.AsyncClient(timeout=limits, verify=_certificates(), event_hooks=hooks)
    try:
        async with (
            http,
            streamable_http_client(url, http_client=http, max_sse_event_size=LARGEST) as streams,
            ClientSession(*streams, client_info=_CLIENT) as session,
        ):
            async with _in_time():
                await session.initialize()
            yield session
    except Exception as error:
        why: BaseException = error
        while isinstance(why, BaseExceptionGroup):  # of the tasks that the transport runs
            why = why.exceptions[0]
        raise McpFailed(f"{url}: {str(why) or type(why).__name__}") from error


def _in_time() -> AbstractAsyncContextManager[None]:
    return time_limit(TIMEOUT, McpFailed(f"no answer within {TIMEOUT:g} s"))


async def _limit_end(request: httpx2.Request) -> None:
    """Limit the time of the request that ends a session, which nobody else limits."""
    if request.method == "DELETE":
        request.extensions["timeout"]["read"] = TIMEOUT


async def _check_reply(reply: httpx2.Response) -> None:
    """Raise McpFailed for an HTTP error, which would otherwise look like an error of the tool, and
    for the answer to another request, after which the caller would wait. A notification may be
    refused: what needed it fails by itself."""
    request = json.loads(reply.request.content) if reply.request.method == "POST" else {}
    if not {"id", "method"} <= request.keys():
        return
    if reply.is_error:
        body = (await reply.aread()).decode(errors="replace")[:200]
        raise McpFailed(f"it answers {reply.status_code} {body}".rstrip())
    if reply.headers.get("content-type", "").lower().startswith("application/json"):
        with suppress(ValueError):  # mcp itself reports what is not JSON
            found = json.loads(await reply.aread())
            if isinstance(found, dict) and str(found.get("id")) != str(request["id"]):
                raise McpFailed(f"it answers request {request['id']} with {short(found, 300)}")


def _content(name: str, answer: types.CallToolResult) -> Content:
    """Return the result of a call. Raises ToolError if the tool failed."""
    images = [block for block in answer.content if isinstance(block, types.ImageContent)]
    text = "\n".join(_text(b) for b in answer.content if not isinstance(b, types.ImageContent))
    if not text and answer.structured_content is not None:
        text = json.dumps(answer.structured_content, ensure_ascii=False)
    if answer.is_error:
        raise ToolError(text or f"{name} failed")
    shown: list[Part] = [
        {"type": "image", "image": f"data:{block.mime_type};base64,{block.data}"}
        for block in images
    ]
    return [*shown, {"type": "text", "text": text}] if shown else text


def _text(block: types.ContentBlock) -> str:
    """Return a block of a result as text that a policy can read."""
    if isinstance(block, types.TextContent):
        return block.text
    held = block.resource if isinstance(block, types.EmbeddedResource) else block
    if isinstance(held, types.TextResourceContents):
        return held.text
    return f"[{block.type} {getattr(held, 'uri', None) or held.mime_type}]"


@cache
def _certificates() -> SSLContext:
    return httpx2.create_ssl_context()  # takes a while
