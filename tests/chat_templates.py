"""Chat templates of eight families, what a policy of each writes, and a tokenizer for all of them.

Most are the templates that the models came with, as trl keeps them; Mistral's has the shape of its
own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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

# as Qwen 3.8: every turn has a place for reasoning, which stands in a key of its own
APART = """
{%- for m in messages %}
{%- if m.role == "assistant" %}
  {{- "<|im_start|>assistant\\n<think>\\n" ~ (m.reasoning_content or "") | trim }}
  {{- "\\n</think>\\n\\n" ~ m.content | trim ~ "<|im_end|>\\n" }}
{%- else %}
  {{- "<|im_start|>" ~ m.role ~ "\\n" ~ m.content ~ "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n<think>\\n" }}{% endif %}"""

# as gpt-oss: reasoning in "thinking", of the last turn only; no channels in the content
CHANNELS = """
{%- for m in messages %}
{%- if m.role == "assistant" %}
  {%- if "<|channel|>" in m.content %}{{- raise_exception("channels in the content") }}{% endif %}
  {%- if m.thinking and (m.tool_calls or (loop.last and not add_generation_prompt)) %}
    {{- "<|start|>assistant<|channel|>analysis<|message|>" ~ m.thinking ~ "<|end|>" }}
  {%- endif %}
  {%- if m.tool_calls %}
    {%- set call = m.tool_calls[0].function %}
    {{- "<|start|>assistant to=functions." ~ call.name ~ "<|channel|>commentary json<|message|>" }}
    {{- call.arguments | tojson ~ "<|call|>" }}
  {%- else %}
    {{- "<|start|>assistant<|channel|>final<|message|>" ~ m.content }}
    {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}
  {%- endif %}
{%- else %}
  {{- "<|start|>" ~ m.role ~ "<|message|>" ~ m.content ~ "<|end|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{% endif %}"""

# as Kimi K2 Thinking: reasoning is shown only until the next answer without a call
KIMI = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
  {%- if m.role == "assistant" and not m.tool_calls %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{{- "<|im_start|>" ~ m.role ~ "\\n" }}
{%- if m.role == "assistant" %}
  {{- "<think>" ~ (m.reasoning_content or "" if loop.index0 > ns.last else "") ~ "</think>" }}
  {{- m.content }}
  {%- if m.tool_calls %}
    {{- "<|tool_calls_section_begin|>" }}
    {%- for c in m.tool_calls %}
      {{- "<|tool_call_begin|>" ~ c.id ~ "<|tool_call_argument_begin|>" }}
      {{- c.function.arguments | tojson ~ "<|tool_call_end|>" }}
    {%- endfor %}
    {{- "<|tool_calls_section_end|>" }}
  {%- endif %}
{%- elif m.role == "tool" %}
  {{- "## Return of " ~ m.tool_call_id ~ "\\n" ~ m.content }}
{%- else %}
  {{- m.content }}
{%- endif %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{% endif %}"""

# as Command R7B: reasoning beside calls only, and marks around an answer
COMMAND = """
{%- for m in messages %}
{%- if m.role == "assistant" and m.tool_calls %}
  {{- "<|START_THINKING|>" ~ m.tool_plan ~ "<|END_THINKING|><|START_ACTION|>[" }}
  {%- for c in m.tool_calls %}
    {{- '{"tool_call_id": "' ~ loop.index0 ~ '", "tool_name": "' ~ c.function.name }}
    {{- '", "parameters": ' ~ c.function.arguments | tojson ~ "}" ~ ("" if loop.last else ", ") }}
  {%- endfor %}
  {{- "]<|END_ACTION|><|im_end|>" }}
{%- elif m.role == "assistant" %}
  {{- "<|im_start|>assistant\\n<|START_RESPONSE|>" ~ m.content ~ "<|END_RESPONSE|><|im_end|>" }}
{%- else %}
  {{- "<|im_start|>" ~ m.role ~ "\\n" ~ m.content ~ "<|im_end|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{% endif %}"""


def _calling(before: str, call: str, after: str = "", between: str = "") -> str:
    """A template that writes calls in this way. ``call`` sees its name ``f`` and arguments ``a``."""
    calls = (
        "{% for c in m.tool_calls %}{% set f = c.function.name %}{% set a = c.function.arguments %}"
        f"{call}{{{{ '{between}' if not loop.last }}}}{{% endfor %}}"
    )
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        f"{{% if m.tool_calls %}}{before}{calls}{after}{{% endif %}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


_EACH = "{% for k, v in a.items() %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_JSON = '{"name": "{{ f }}", "arguments": {{ a | tojson }}}'
# as Functionary 3.2, whose prompts end in the mark of the first message
FUNCTIONARY = """
{%- for m in messages %}
{{- "<|im_start|>" ~ m.role ~ "\\n" }}
{%- if m.role != "assistant" %}
  {{- m.content }}
{%- else %}
  {{- ">>>all\\n" ~ m.content if m.content }}
  {%- for c in m.tool_calls %}{{- ">>>" ~ c.function.name ~ "\\n" ~ c.function.arguments }}{% endfor %}
{%- endif %}
{{- "<|im_end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n>>>" }}{% endif %}"""

CALL_TEMPLATES = {
    "apriel": _calling("\n<tool_calls>[", _JSON, "]</tool_calls>", ", "),
    "granite": _calling("<|tool_call|>[", _JSON, "]", ", "),
    "minimax": _calling(
        "<minimax:tool_call>\n",
        f'<invoke name="{{{{ f }}}}">\n{_EACH}<parameter name="{{{{ k }}}}">{_VALUE}</parameter>\n'
        "{% endfor %}</invoke>\n",
        "</minimax:tool_call>",
    ),
    "deepseek_dsml": _calling(
        "\n\n<｜DSML｜function_calls>\n",
        f'<｜DSML｜invoke name="{{{{ f }}}}">\n{_EACH}<｜DSML｜parameter name="{{{{ k }}}}" string='
        f'"{{{{ "true" if v is string else "false" }}}}">{_VALUE}</｜DSML｜parameter>\n{{% endfor %}}'
        "</｜DSML｜invoke>\n",
        "</｜DSML｜function_calls>",
    ),
    "seed_oss": _calling(
        "",
        f"\n<seed:tool_call>\n<function={{{{ f }}}}>\n{_EACH}<parameter={{{{ k }}}}>{{{{ v }}}}"
        "</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
    ),
    "gemma4": _calling(
        "",
        f"<|tool_call>call:{{{{ f }}}}{{{{ '{{' }}}}{_EACH}{{{{ k }}}}:"
        """{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}"""
        "{{ ',' if not loop.last }}{% endfor %}}<tool_call|>",
    ),
    "pythonic": _calling(
        "<|tool_call_start|>[",
        f"{{{{ f }}}}({_EACH}{{{{ k }}}}={{{{ v | tojson }}}}{{{{ ', ' if not loop.last }}}}"
        "{% endfor %})",
        "]<|tool_call_end|>",
        ", ",
    ),
    "llama_custom": _calling("", "<function={{ f }}>{{ a | tojson }}</function>"),
    "functionary": FUNCTIONARY,
    "command": COMMAND,
    "gpt_oss": CHANNELS,
    "kimi": KIMI,
}
"""By the parser of their calls."""


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


def tokenizer_with(template: str | dict[str, str], end: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        eos_token=end,
        bos_token="<bos>",
        pad_token="<|endoftext|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    return tokenizer_with(FAMILIES[name].template, FAMILIES[name].end)


def chat_of(family: str) -> ChatFormat:
    return ChatFormat(family_tokenizer(family), chat=True, kwargs={})


def chat_with(template: str | dict[str, str], end: str = "<|im_end|>", **kwargs: Any) -> ChatFormat:
    """The format of chats with any template, whose turns ``end`` so. ``kwargs`` go to it."""
    return ChatFormat(tokenizer_with(template, end), chat=True, kwargs=kwargs)
