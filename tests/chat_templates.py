"""Chat templates of eight families, what a policy of each writes, and a tokenizer for all of them.

Most are the templates that the models came with, as trl keeps them; Mistral's has the shape of its
own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from openrl.agents.chat import ChatFormat

TRL = Path(trl.__file__).parent / "chat_templates"

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

MISTRAL = """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == "user" %}
  {%- if tools and loop.last %}{{- "[AVAILABLE_TOOLS] " ~ (tools | tojson) ~ "[/AVAILABLE_TOOLS]" }}{% endif %}
  {{- "[INST] " ~ m.content ~ "[/INST]" }}
{%- elif m.role == "assistant" and m.tool_calls %}
  {{- "[TOOL_CALLS] [" }}
  {%- for call in m.tool_calls %}
    {%- if call.id | length != 9 %}{{- raise_exception("ids have nine characters") }}{% endif %}
    {{- '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) }}
    {{- ', "id": "' ~ call.id ~ '"}' ~ ("" if loop.last else ", ") }}
  {%- endfor %}
  {{- "]" ~ eos_token }}
{%- elif m.role == "assistant" %}
  {{- " " ~ m.content | trim ~ eos_token }}
{%- elif m.role == "tool" %}
  {{- "[TOOL_RESULTS] " ~ ({"content": m.content, "call_id": m.tool_call_id} | tojson) }}
  {{- "[/TOOL_RESULTS]" }}
{%- else %}
  {{- raise_exception("only user, assistant and tool roles") }}
{%- endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Family:
    """A template, and what a policy that was trained on it writes, without the end of its turn."""

    template: str
    end: str  # what ends a turn
    says: str  # an answer
    thinks: str  # an answer with reasoning in front
    calls: str  # a call of add(a=2, b=2)
    after_call: str = ""  # what ends a turn with a call, if it is something else


def _trl(name: str) -> str:
    return (TRL / f"{name}.jinja").read_text()


HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
THINKS = "<think>\nTwo and two.\n</think>\n\nIt is 4."
GLM_CALL = (
    "\n<think>Two and two.</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
DEEPSEEK_CALL = (
    "Two and two.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"a": 2, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)

FAMILIES = {
    "chatml": Family(CHATML, "<|im_end|>", "It is 4.", THINKS, HERMES_CALL),
    "qwen2.5": Family(_trl("qwen2_5"), "<|im_end|>", "It is 4.", THINKS, HERMES_CALL),
    "qwen3": Family(
        _trl("qwen3"), "<|im_end|>", "It is 4.", THINKS, f"<think>\nTwo.\n</think>\n\n{HERMES_CALL}"
    ),
    "llama3": Family(
        _trl("llama3_1"), "<|eot_id|>", "It is 4.", THINKS, '{"name": "add", "parameters": {"a": 2, "b": 2}}'
    ),
    "mistral": Family(
        MISTRAL, "</s>", " It is 4.", f" {THINKS}", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 2}}]'
    ),
    "gemma3": Family(_trl("gemma3"), "<end_of_turn>", "It is 4.", THINKS, HERMES_CALL),
    "phi3": Family(_trl("phi3_5"), "<|end|>", "It is 4.", THINKS, HERMES_CALL),
    "glm4": Family(
        _trl("glm4moe"), "<|user|>", "\n<think></think>\nIt is 4.",
        "\n<think>Two and two.</think>\nIt is 4.", GLM_CALL, after_call="<|observation|>",
    ),
    "deepseek3": Family(
        _trl("deepseekv3"), "<｜end▁of▁sentence｜>", "It is 4.", "Two and two.\n</think>\n\nIt is 4.",
        DEEPSEEK_CALL,
    ),
}  # fmt: skip


def tool(name: str, **properties: dict) -> dict:
    """The schema of a tool as chat templates and parsers get it."""
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": "A tool.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "integer", "description": "The second."},
                },
                "required": ["a", "b"],
            },
        },
    }
]

SPECIAL = (
    "<|endoftext|>", "<bos>", "<s>", "</s>", "<eos>", "<|im_start|>", "<|im_end|>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
    "<|observation|>", "[gMASK]", "<sop>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
ADDED = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip


@cache
def _backend() -> str:
    """Pairs of bytes, as Qwen, Llama 3 and DeepSeek have, with merges from the templates' text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        show_progress=False,
    )
    backend.train_from_iterator([family.template for family in FAMILIES.values()], trainer)
    backend.add_tokens([AddedToken(token, special=False) for token in ADDED])
    # as Phi's, it swallows the space behind it
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return str(backend.to_str())


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        eos_token=family.end,
        bos_token="<bos>",
        pad_token="<|endoftext|>",
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )


def chat_of(family: str) -> ChatFormat:
    return ChatFormat(family_tokenizer(family), chat=True, kwargs={})
