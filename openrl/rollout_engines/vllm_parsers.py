"""vLLM's parsers of tool calls, for formats that ``agents.tools.formats`` does not read.

They are classes that need a tokenizer and no server. Importing them takes seconds, so it is done
only if no other format reads what the chat template writes, or if one is named."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from openrl.agents.chat import Schemas
from openrl.agents.tools.calls import Parse, ParsedReply, ToolCall
from openrl.agents.tools.formats import CallFormat, after_reasoning
from openrl.agents.tools.values import Malformed, call_in
from openrl.errors import UserError, short
from openrl.extension_points import tool_parsers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMES = [
    "apertus",
    "dots",
    "ernie45",
    "functiongemma",
    "gigachat3",
    "hunyuan_a13b",
    "hy_v3",
    "hy_v4",
    "inkling",
    "internlm",
    "jamba",
    "k2_horizon",
    "kimi_k3",
    "ling3",
    "longcat",
    "mimo",
    "minicpm5",
    "minimax_m3",
    "muse_glimmer",
    "olmo3",
    "plamo3",
    "poolside_v1",
    "step3",
    "step3p5",
    "xlam",
]


def make(name: str, tokenizer: PreTrainedTokenizerBase) -> Parse:
    """Return vLLM's parser ``name`` for a tokenizer. Raises UserError if it cannot be used."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        parser = ToolParserManager.get_tool_parser(name)
        parser(tokenizer, [])
    except Exception as error:  # it misses tokens, or vLLM is another version
        message = f"--tool_parser vllm_{name}: {type(error).__name__}: {short(error)}"
        raise UserError(message, "the name of another format") from error

    def parse(text: str, schemas: Schemas = ()) -> ParsedReply:
        thought, rest = after_reasoning(text)
        chat = [{"role": "user", "content": ""}]
        request = ChatCompletionRequest(model="", messages=chat, tools=[*schemas] or None)
        try:
            found = parser(tokenizer, request.tools).extract_tool_calls(rest, request)
            calls = [
                _read(call.function.name, call.function.arguments) for call in found.tool_calls
            ]
        except Exception as error:  # whatever a parser raises on what a policy may write
            return ParsedReply(text, error=f"{type(error).__name__}: {short(error)}")
        if not calls:
            return ParsedReply(text)
        return ParsedReply((thought + (found.content or "")).rstrip(), tuple(calls))

    return parse


def _read(name: str, arguments: str) -> ToolCall:
    try:
        return call_in({"name": name, "arguments": arguments or "{}"})
    except Malformed as error:
        raise ValueError(str(error)) from error


for _name in NAMES:
    tool_parsers.add(f"vllm_{_name}", CallFormat(partial(make, _name), library="vllm"))
