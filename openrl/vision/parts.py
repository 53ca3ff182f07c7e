"""What environments and tools show to a policy: a text, or text and image parts as in chats."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from openrl.types import Message, Prompt
from openrl.vision.pictures import data_url, is_picture

Part = dict[str, Any]
"""{"type": "text", "text": ...} or {"type": "image", "image": ...}."""

Content = str | list[Part]
"""The content of a message: a text, or a list of parts."""


def as_content(value: Any) -> Content | None:
    """Return a text, a picture, or a list of texts, pictures and parts as the content of a message;
    None for anything else."""
    if isinstance(value, str):
        return str.__str__(value)  # a plain text, also of a subclass
    if is_picture(value):
        return [{"type": "image", "image": value}]
    if not isinstance(value, list | tuple) or not value:
        return None
    parts = [_part(item) for item in value]
    return None if None in parts else [part for part in parts if part is not None]


def _part(value: Any) -> Part | None:
    if isinstance(value, str):
        return {"type": "text", "text": str.__str__(value)}
    if is_picture(value):
        return {"type": "image", "image": value}
    known = isinstance(value, dict) and value.get("type") in ("text", "image", "image_url")
    return dict(value) if known else None


def with_pictures(value: Any) -> list[Part] | None:
    """Return the parts of a picture, or of a list of texts and pictures; None without a picture."""
    content = as_content(value)
    parts = content if isinstance(content, list) else []
    return parts if any(part["type"] != "text" for part in parts) else None


def shown(value: Any) -> Content:
    """Return the value of a tool as the policy sees it: pictures as parts, text as it is, anything
    else as JSON."""
    return with_pictures(value) or as_text(value)


def as_text(value: Any) -> str:
    """Return text as it is, and anything else as JSON."""
    if isinstance(value, str):
        return str.__str__(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def content_text(content: Any) -> str:
    """Return the content of a message as text, with "[image]" for each image."""
    if not isinstance(content, list):
        return str(content)
    return "\n".join(str(p["text"]) if p["type"] == "text" else "[image]" for p in content)


def change_parts(messages: Sequence[Message], change: Callable[[Part], Part]) -> list[Message]:
    """Return the messages with all parts that are no text changed."""
    return [
        {**m, "content": [p if p["type"] == "text" else change(p) for p in m["content"]]}
        if isinstance(m["content"], list)
        else dict(m)
        for m in messages
    ]


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Return the messages as chat templates take them, with image parts that hold no image."""
    return change_parts(messages, lambda _: {"type": "image"})


def prompt_messages(prompt: Prompt) -> list[Message]:
    """Return the prompt as a chat whose image parts hold the images."""
    waiting = iter(placed.image for placed in prompt.images)

    def with_image(part: Part) -> Part:
        return {"type": "image", "image": next(waiting)} if part["type"] == "image" else part

    return change_parts(prompt.chat, with_image)


def messages_for_clients(prompt: Prompt) -> list[Message]:
    """Return the prompt as a chat that OpenAI's clients can send unchanged."""

    def with_url(part: Part) -> Part:
        if part["type"] != "image":
            return part
        return {"type": "image_url", "image_url": {"url": data_url(part["image"].data)}}

    return change_parts(prompt_messages(prompt), with_url)
