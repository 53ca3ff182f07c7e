"""A teacher behind a server that speaks vLLM's completions with ``prompt_logprobs``."""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrl.config.groups.teacher import TOKEN_VARIABLE, TeacherFlags
from openrl.errors import UserError, short
from openrl.experience import ExperienceBatch
from openrl.rewards.http_client import JsonClient, Reply, RequestFailed, ServiceUrls

CONCURRENT = 32  # requests to a server at a time
MAX_REPLY = 2**30  # bytes; a token with 128 log-probs takes 10 KB
MOST = 1.001  # that probabilities, read from rounded log-probs, add up to
PROBED = 512  # tokens of the vocabulary that a server is asked about before the start

Likeliest = list[tuple[int, float]]
"""Token ids and log-probs, the likeliest first."""


class TeacherServer:
    """Asks one server for the log-probs of rows."""

    def __init__(self, url: str, flags: TeacherFlags, top_k: int | None) -> None:
        """``top_k``: how many of its likeliest tokens it gives with each token; None: none."""
        self.url, self.top_k = url, top_k
        self._flags = flags
        self._slots = asyncio.Semaphore(CONCURRENT)
        self._gone = ""  # why the server itself, not a request, has failed; empty: it has not
        self._unanswered = 0  # requests since the last reply that used up their time or attempts
        self._client: JsonClient | None = None
        self.counts = Counter[str]()  # "failures" of rows and "retries" of requests

    async def columns(
        self, batch: ExperienceBatch, rows: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the columns ``teacher_logprobs`` and, with ``top_k``, ``teacher_ids`` and
        ``teacher_support`` of the tokens to train in ``rows`` (B,) bool, 0 elsewhere; and which of
        these rows got no reply, (B,) bool. Raises UserError if none did."""
        asked = rows.nonzero()[:, 0].tolist()
        found = {"teacher_logprobs": torch.zeros(batch.token_ids.shape)}
        if (k := self.top_k) is not None:
            shape = batch.token_ids.shape
            found["teacher_ids"] = torch.zeros(*shape, k, dtype=torch.int32)
            found["teacher_support"] = torch.zeros(*shape, k + 1)
        lost = torch.zeros_like(rows)
        self._gone, self._unanswered = "", 0
        failures = await asyncio.gather(*(self._fill(found, batch, row) for row in asked))
        for row, failure in zip(asked, failures, strict=True):
            lost[row] = failure is not None
        if asked and None not in failures:
            message = f"the teacher at {self.url} gave no row its log-probs: {failures[0]}"
            raise UserError(message, "a server that answers, and --load_checkpoint")
        return found, lost

    async def _fill(self, found: dict[str, Tensor], batch: ExperienceBatch, row: int) -> str | None:
        """Fill the columns of a row. Returns why there was no reply; None if there was one. Once a
        row has used up its attempts at a server that is gone, or as many rows as are asked at a
        time have had no reply, the others are not asked: each would wait as long."""
        ids = batch.token_ids[row, : int(batch.lengths[row])].tolist()
        trained = batch.loss_mask[row].nonzero()[:, 0].tolist()
        try:
            async with self._slots:
                if self._gone:
                    self.counts["failures"] += 1
                    return self._gone
                entries = await self.ask(ids, self.top_k or 0)
        except RequestFailed as failed:
            self.counts["failures"] += 1
            self.counts["retries"] += failed.attempts - 1
            if not failed.final:
                self._unanswered += 1 if failed.suspect else CONCURRENT
            if self._unanswered >= CONCURRENT:
                self._gone = str(failed)
            return str(failed)
        self._gone, self._unanswered = "", 0
        for place in trained:
            entry = entries[place]
            found["teacher_logprobs"][row, place] = dict(entry)[ids[place]]
            if self.top_k is not None:
                likeliest = entry[: self.top_k]
                logprobs = [logprob for _, logprob in likeliest]
                support = torch.tensor([*logprobs, others(logprobs)])
                found["teacher_ids"][row, place] = torch.tensor([token for token, _ in likeliest])
                found["teacher_support"][row, place] = support
        return None

    async def ask(self, ids: list[int], count: int) -> list[Likeliest]:
        """Return what the server says of each token of a row: its log-prob, and those of the
        ``count`` likeliest in its place; nothing of the first one. Raises RequestFailed."""
        return await self._post(ids, count, lambda reply: read_entries(reply, ids, count))

    async def texts(self, ids: list[int]) -> list[str | None]:
        """Return what the tokens of a row are to the server, None where it does not say. Raises
        RequestFailed."""

        def read(reply: Any) -> list[str | None]:
            read_entries(reply, ids, self.top_k or 0)
            said = reply["choices"][0]["prompt_logprobs"][1:]
            return [
                None,
                *(e[str(t)].get("decoded_token") for e, t in zip(said, ids[1:], strict=True)),
            ]

        return await self._post(ids, self.top_k or 0, read)

    async def _post(self, ids: list[int], count: int, read: Callable[[Any], Reply]) -> Reply:
        if self._client is None:
            self._client = JsonClient(
                ServiceUrls([self.url.rstrip("/") + "/completions"]),
                timeout=self._flags.teacher_timeout,
                attempts=self._flags.teacher_max_retries,
                token=os.environ.get(TOKEN_VARIABLE, "").strip() or None,
                max_reply=MAX_REPLY,
            )
        body = {"prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": count}
        reply, attempts = await self._client.post(body, read, alone=True)
        self.counts["retries"] += attempts - 1
        return reply

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


def read_entries(reply: Any, ids: Sequence[int], count: int) -> list[Likeliest]:
    """Return what a completion says of each token of its prompt, see ``TeacherServer.ask``. Raises
    ValueError if it does not."""
    try:
        entries = reply["choices"][0]["prompt_logprobs"]
        found: list[Likeliest] = [[]]
        for token, entry in zip(ids[1:], entries[1:], strict=True):
            pairs = [(int(key), float(said["logprob"])) for key, said in entry.items()]
            pairs.sort(key=lambda pair: -pair[1])
            values = [logprob for _, logprob in pairs]
            if (
                token not in dict(pairs)
                or len(pairs) < count
                or not all(map(math.isfinite, values))
            ):
                raise ValueError(f"it says of token {token} only {short(entry)}")
            if math.fsum(math.exp(min(value, 1.0)) for value in values) > MOST:
                raise ValueError(
                    f"what it says of token {token} is no log-prob, as with --logprobs-mode"
                    f" raw_logits: {short(entry)}"
                )
            found.append(pairs)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        reason = f" ({error})" if isinstance(error, ValueError) else ""
        raise ValueError(f"the reply has no prompt_logprobs of every token{reason}") from None
    return found


def others(logprobs: Sequence[float]) -> float:
    """Return the log-prob of all other tokens together, from those of the likeliest."""
    rest = 1.0 - math.fsum(map(math.exp, logprobs))
    return math.log(rest) if rest > math.exp(-36) else -36.0  # below fp64's resolution


def check_teacher_server(
    flag: str,
    url: str,
    flags: TeacherFlags,
    longest: int,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Ask a server that ``flag`` names about tokens from all over the policy's vocabulary and
    about a row of ``longest`` tokens. Raises UserError if it does not answer, does not give their
    log-probs, knows them as other tokens, or reads no row of this length."""
    vocabulary = sorted(tokenizer.get_vocab().values())
    step = -(-len(vocabulary) // PROBED)
    ids = [*vocabulary[::step], vocabulary[-1], *tokenizer.all_special_ids][1 - longest :]
    fix = "a running server of the policy's family, by http://HOST:PORT/v1"
    if flags.top_k:
        fix += f", that gives {flags.top_k} log-probs of a token (--max-logprobs {flags.top_k})"

    shorter = (
        "shorter prompts or answers, or a server that reads the row and one token more"
        f" (--max-model-len {longest + 1})"
    )

    async def probe() -> list[str | None]:
        server = TeacherServer(url, flags, flags.top_k)
        try:
            texts = await _or_refused(server.texts(ids), flag, fix)
            await _or_refused(server.ask([*islice(cycle(ids), longest)], 0), flag, shorter)
            return texts
        finally:
            await server.close()

    texts = asyncio.run(probe())
    for token, text in zip(ids, texts, strict=True):
        own = tokenizer.decode([token])
        names = (own, tokenizer.convert_ids_to_tokens(token))
        if text is not None and "\ufffd" not in own and text not in names:
            raise UserError(
                f"--{flag}: token {token} is {text!r} to {url} and {own!r} to the policy",
                "a teacher of the policy's family: it is asked about tokens, not about text",
            )


async def _or_refused(reply: Awaitable[Reply], flag: str, fix: str) -> Reply:
    try:
        return await reply
    except RequestFailed as failed:
        raise UserError(f"--{flag}: {failed}", fix) from None
