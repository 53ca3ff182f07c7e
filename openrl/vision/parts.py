"""What environments and tools show to a policy: text, or parts of text and pictures as messages of
chats have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrl.types import Message, Prompt
from openrl.vision.pictures import is_picture

Part = dict[str, Any]
"""{"type": "text", "text": ...} or {"type": "image", "image": ...}."""

Content = str | list[Part]
"""Of a message."""


def as_content(value: Any) -> Content | None:
    """A text, a picture, or a list of both and of parts; None for anything else."""
    if isinstance(value, str):
        return value
    if is_picture(value):
        return [{"type": "image", "image": value}]
    if not isinstance(value, list | tuple) or not value:
        return None
    parts = [_part(item) for item in value]
    return None if None in parts else [part for part in parts if part is not None]


def _part(value: Any) -> Part | None:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if is_picture(value):
        return {"type": "image", "image": value}
    known = isinstance(value, dict) and value.get("type") in ("text", "image", "image_url")
    return dict(value) if known else None


def with_pictures(value: Any) -> list[Part] | None:
    """The parts of a picture, or of a list of texts and pictures; None if there is no picture."""
    content = as_content(value)
    parts = content if isinstance(content, list) else []
    return parts if any(part["type"] != "text" for part in parts) else None


def content_text(content: Any) -> str:
    """The content of a message as text, its images only named."""
    if not isinstance(content, list):
        return str(content)
    return "\n".join(str(p["text"]) if p["type"] == "text" else "[image]" for p in content)


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Messages as chat templates take them: a part says that an image stands there, not which."""
    return [
        {**m, "content": [p if p["type"] == "text" else {"type": "image"} for p in m["content"]]}
        if isinstance(m["content"], list)
        else dict(m)
        for m in messages
    ]


def prompt_messages(prompt: Prompt) -> list[Message]:
    """The prompt as a chat, whose parts hold its images."""
    messages = [dict(message) for message in prompt.messages]
    waiting = iter(placed.image for placed in prompt.images)
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = [
                {"type": "image", "image": next(waiting)} if part["type"] == "image" else part
                for part in message["content"]
            ]
    return messages or [{"role": "user", "content": prompt.text}]
