"""Asks a language model behind an OpenAI-compatible URL for verdicts that can be read."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from openrl.config.reward_plan import ENGINES
from openrl.errors import short
from openrl.files import expanded, write_atomically
from openrl.flags.schema import REQUIRED, flag
from openrl.rewards.verifiers.base import Unavailable

TOKEN = "OPENRL_JUDGE_TOKEN"
LAST = 20_000  # characters at the end of a reply that are searched
Verdict = TypeVar("Verdict")


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    url: str = flag(
        REQUIRED, "Root of the service, e.g. http://127.0.0.1:8000/v1, or engines: the run's own."
    )
    model: str = flag(REQUIRED, "Name of the model; of the run's own engines: policy.")
    prompt_file: str | None = flag(
        None, "Text that asks the model, with the places in braces; None = a general one."
    )
    temperature: float = flag(0.0, "Of the model's sampling.", bounds=">= 0")
    max_tokens: int = flag(1024, "Tokens of its reply.", bounds="> 0")
    timeout: float = flag(
        60.0, "Seconds for one request; one that takes longer is not sent again.", bounds="> 0"
    )
    attempts: int = flag(3, "Requests before the model is taken for unavailable.", bounds="> 0")
    pause: float = flag(
        1.0,
        "Seconds before the second attempt; four times as long each time, at most 60.",
        bounds=">= 0",
    )
    repeats: int = flag(
        2, "How often a reply without a verdict is asked to be given again.", bounds=">= 0"
    )
    cache_dir: str | None = flag(
        None, "Directory of verdicts that are not asked for again, in any run; None = none."
    )

    PLACES: ClassVar[tuple[str, ...]] = ()  # that a prompt file must have
    SHOWN: ClassVar[int] = 1  # most answers in one request; 0: all siblings

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")) and self.url != ENGINES:
            raise ValueError(
                f"url must begin with http:// or https://, or be engines, got {self.url!r}"
            )
        if self.cache_dir is not None and self.url == ENGINES:
            raise ValueError("cache_dir: verdicts of the run's own engines change with each sync")
        if self.cache_dir is not None and expanded(self.cache_dir).is_file():
            raise ValueError(f"cache_dir: {self.cache_dir} is a file")
        own = None if self.prompt_file is None else file_text(self.prompt_file)
        absent = [place for place in self.PLACES if own is not None and f"{{{place}}}" not in own]
        if absent:
            raise ValueError(f"there is no {{{absent[0]}}} in {self.prompt_file}")

    def render(self, general: str, **places: str) -> str:
        """Fill in the places of the prompt file, or of the ``general`` text without one."""
        text = general if self.prompt_file is None else file_text(self.prompt_file)
        return re.sub(r"\{(\w+)\}", lambda found: places.get(found[1], found[0]), text)


class Judge:
    """Asks within one call of a verifier, and counts what it asks."""

    def __init__(self, options: ServiceOptions) -> None:
        """Raises Unavailable."""
        token = os.environ.get(TOKEN, "").strip()
        if not (token.isascii() and token.isprintable()):
            raise Unavailable(f"${TOKEN} holds characters that a header cannot carry")
        self.options = options
        self._loop, self._client = connect(
            options.url, options.timeout, options.attempts, options.pause, token
        )
        self.calls = self.cached = self.unreadable = 0
        self.tokens: int | None = 0  # None once the service did not count those of a reply

    def counts(self, answers: int = 1) -> dict[str, float]:
        """Return the counts so far as parts of a score, for each of so many answers."""
        counts = {
            "judge/calls": self.calls,
            "judge/cached": self.cached,
            "judge/unreadable": self.unreadable,
        }
        if self.tokens is not None:
            counts["judge/tokens"] = self.tokens
        return {name: count / answers for name, count in counts.items()}

    def run(self, asking: Coroutine[Any, Any, Verdict]) -> Verdict:
        """Wait for verdicts. Raises Unavailable, with the counts so far."""
        try:
            return self._loop.run_until_complete(asking)
        except Unavailable as error:
            raise Unavailable(str(error), self.counts()) from None

    async def ask(self, text: str, read: Callable[[str], Verdict]) -> Verdict:
        """Return what ``read`` makes of the model's reply. ``read`` raises ValueError, which the
        model gets to see, if the reply holds no verdict. Raises Unavailable."""
        options = self.options
        messages = [{"role": "user", "content": text}]
        body = {
            "model": options.model,
            "messages": messages,
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        }
        kept = cached_reply(options, body)
        if kept is not None:
            try:
                verdict = read(await asyncio.to_thread(read_kept, kept))
            except ValueError:
                pass
            else:
                self.cached += 1
                return verdict
        for again in range(options.repeats + 1):
            self.calls += 1
            try:
                (reply, tokens), _ = await self._client.post(body, message_of, alone=True)
            except Exception as error:
                raise Unavailable(f"the judge at {error or type(error).__name__}") from None
            known = self.tokens is not None and tokens is not None
            self.tokens = self.tokens + tokens if known else None
            try:
                verdict = read(reply[-LAST:])
            except ValueError as error:
                self.unreadable += 1
                if again == options.repeats:
                    message = f"the judge gave no verdict: {error}; it ended in {reply[-200:]!r}"
                    raise Unavailable(message) from None
                before = [{"role": "assistant", "content": reply}] if reply.strip() else []
                remark = f"This cannot be read: {error}. Answer again, in the form asked for."
                body["messages"] = [*messages, *before, {"role": "user", "content": remark}]
                continue
            if kept is not None:
                await asyncio.to_thread(keep, kept, reply[-LAST:])
            return verdict
        raise AssertionError("a loop over at least one reply returns or raises")


def cached_reply(options: ServiceOptions, body: dict[str, Any]) -> Path | None:
    """Return where the reply to a request is kept; None without a cache."""
    if options.cache_dir is None:
        return None
    key = json.dumps([options.url, body], sort_keys=True).encode()
    name = hashlib.blake2b(key, digest_size=16).hexdigest()
    return expanded(options.cache_dir) / name[:2] / f"{name}.json"


def read_kept(path: Path) -> str:
    """Return the reply that is kept in a file. Raises ValueError if there is none."""
    try:
        return str(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ValueError(f"nothing is kept: {error}") from None


def keep(path: Path, reply: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(reply))


def message_of(reply: Any) -> tuple[str, int | None]:
    """Return the text of a chat completion, and how many tokens prompt and reply have, None if the
    service does not say. Raises ValueError if the reply is not one."""
    try:
        text = str(reply["choices"][0]["message"]["content"] or "")
    except (LookupError, TypeError):
        raise ValueError(f"the reply is not a chat completion: {short(reply)}") from None
    usage = reply.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return text, tokens if isinstance(tokens, int) else None


@cache
def connect(
    root: str, timeout: float, attempts: int, pause: float, token: str
) -> tuple[asyncio.AbstractEventLoop, Any]:
    """Return an event loop and a client that lives in it. Its connections last as long as the
    process."""
    from openrl.rewards.http_client import JsonClient, ServiceUrls

    urls = ServiceUrls([root.rstrip("/") + "/chat/completions"], first_pause=pause)
    client = JsonClient(urls, timeout=timeout, attempts=attempts, token=token)
    return asyncio.new_event_loop(), client


@cache
def file_text(path: str) -> str:
    """Return the text of a prompt file. Raises ValueError if the file cannot be read."""
    try:
        return Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompt file {path}: {error}") from None


def shown(label: Any) -> str:
    """Return a label as the model sees it."""
    if label is None:
        return "none"
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False, default=str)
