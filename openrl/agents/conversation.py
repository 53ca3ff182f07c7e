"""The token rows of an episode. What was sampled is never tokenised again.

A row is a text and its tokens. For each turn, the whole chat is rendered. If its text begins with
that of a row, the rest is tokenised and appended to the row. If not (the template drops earlier
reasoning, or the context was compacted), the turn starts a row of its own: a fork."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from openrl.agents.base import Generate
from openrl.agents.chat import ChatFormat, Schemas, TemplateError, with_row_tools
from openrl.agents.text_row import TextRow
from openrl.agents.tools.calls import Parse, ParsedReply, message_forms
from openrl.config.groups.agent import TurnFlags
from openrl.data.privileged import is_open, privileged_chat
from openrl.types import (
    Completion,
    FinishReason,
    Image,
    Message,
    PlacedImage,
    PrivilegedContext,
    Prompt,
    RenderedTurn,
    Sampling,
    Score,
    Segment,
    Trajectory,
)
from openrl.vision.placing import unexpanded


class EpisodeOver(Exception):
    """The episode cannot go on; ``finish_reason`` says why."""

    def __init__(self, finish_reason: FinishReason) -> None:
        super().__init__(finish_reason.value)
        self.finish_reason = finish_reason


@dataclass(frozen=True)
class EpisodeConfig:
    """How every episode of a run is played."""

    chat: ChatFormat
    parse: Parse | None = None
    """Finds tool calls in what was sampled; None: the format of the model's calls is not known."""
    limits: TurnFlags = TurnFlags()
    row_per_turn: bool = False
    """Whether every turn gets a row of its own, with the earlier turns as context."""


@dataclass(frozen=True)
class Reply:
    """One turn of the policy."""

    text: str  # without the token that ends the turn
    message: Message  # as it goes into the chat
    prompt_ids: list[int]  # what the engine was given
    completion: Completion
    images: tuple[PlacedImage, ...] = ()  # in their order in ``prompt_ids``
    opened: str = ""  # the tag at the end of the prompt that begins the reasoning
    begun: str = ""  # what the prompt holds of the reply, if another has begun it


class Conversation:
    """Asks the policy for replies and keeps the rows of an episode.

    ``sampling.max_tokens`` limits all tokens after the first turn's prompt, and ``max_len`` limits
    every row. With ``any_prompt``, where each chat may begin differently, ``max_tokens`` limits
    only the sampled tokens."""

    def __init__(
        self,
        config: EpisodeConfig,
        prompt: Prompt,
        generate: Generate,
        sampling: Sampling,
        any_prompt: bool = False,
    ) -> None:
        self.chat, self.limits = config.chat, config.limits
        self.row_per_turn = config.row_per_turn
        self.prompt, self.generate, self.sampling = prompt, generate, sampling
        self.any_prompt = any_prompt
        given = dict(prompt.variables)
        self._row_tools: Schemas = given.pop("tools", ())
        self._variables = given
        self.turns, self.forks = 0, 0
        self.rendered: list[RenderedTurn] = []
        self._asking = 0  # turns that are being sampled
        self._rows: list[TextRow] = []
        self._last: TextRow | None = None  # the row of the last turn
        self._longest = sampling.max_len or 2**31  # most tokens of a row

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Schemas | None = None,
        state: str | None = None,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        continued: bool = False,
    ) -> Reply:
        """Return the policy's reply to a chat that ends with somebody else's message or, if that is
        to be ``continued``, with the beginning of the reply. ``state`` is the key of what the
        policy sees, used if the turn starts a row. ``max_tokens`` and ``stop`` are further limits
        of this turn.

        Raises EpisodeOver if there is no room for a token or a turn, and TemplateError."""
        self._require_turn()
        row, rest, ids, placed = self._continuation(messages, tools, continued)
        before = len(row.segment.token_ids) + len(ids)
        sampling = self._sampling(before, max_tokens, stop)
        if not row.segment.token_ids:
            row.segment.privileged = self._privileged(messages, tools, len(ids), continued)
        shown = row.text + rest
        reply = await self._turn(row, rest, ids, placed, sampling, state)
        return self._with_beginning(reply, shown, messages, tools) if continued else reply

    def _with_beginning(
        self, reply: Reply, shown: str, messages: Sequence[Message], tools: Schemas | None
    ) -> Reply:
        """Return a reply as the end of the last message, which the text ``shown`` ends with."""
        begun, opened = str(messages[-1]["content"]), ""
        with suppress(TemplateError):
            prompt = self._render(messages[:-1], tools)
            if shown.startswith(prompt):  # with what a template writes before the content
                begun, opened = shown[len(prompt) :], self.chat.opened(prompt)
        whole = {**reply.message, "content": f"{begun}{reply.message['content']}"}
        return replace(reply, message=whole, begun=begun, opened=opened)

    def count_tokens(
        self, messages: Sequence[Message], tools: Schemas | None = None, continued: bool = False
    ) -> int:
        """Count the tokens that the policy would be given for a chat. Raises TemplateError."""
        row, _, ids, _ = self._continuation(messages, tools, continued)
        return len(row.segment.token_ids) + len(ids)

    def _continuation(
        self, messages: Sequence[Message], tools: Schemas | None, continued: bool
    ) -> tuple[TextRow, str, list[int], tuple[PlacedImage, ...]]:
        """Return the row that a chat continues, and what it adds: text, tokens and images."""
        text, images = self._render(messages, tools, continued), self.chat.images_in(messages)
        row = self._row_for(lambda row: row.is_continued_by(text, images))
        held, rest = row.segment.token_ids, text[len(row.text) :]
        ids = self.chat.encode_after(held, rest) if held else self.chat.encode(rest)
        ids, placed = self.chat.place(ids, images[len(row.images) :], len(held))
        return row, rest, ids, placed

    def _privileged(
        self, messages: Sequence[Message], tools: Schemas | None, length: int, continued: bool
    ) -> PrivilegedContext | None:
        """Return what a teacher reads in place of a chat of ``length`` tokens; None if it is told
        nothing, or if the chat does not hold the prompt."""
        if self.prompt.privileged is None:
            return None
        chat = privileged_chat(messages, self.prompt)
        if chat is None:
            return None
        text = self._render(chat, tools, continued)
        ids, placed = self.chat.place(self.chat.encode(text), self.chat.images_in(chat), 0)
        return PrivilegedContext(length, ids, placed, text if is_open(text) else "")

    async def reply_to_tokens(
        self,
        token_ids: list[int],
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        images: Sequence[Image] = (),
    ) -> Reply:
        """Return the policy's reply to a chat that is already tokens, with one placeholder for each
        of ``images``. Raises EpisodeOver, and BadRow if there are more or fewer images."""
        self._require_turn()
        images = self.chat.check_image_count(list(images))
        token_ids, placed = self.chat.place(token_ids, images, 0)

        def is_held(row: TextRow) -> bool:
            held, known = row.segment.token_ids, row.images
            return token_ids[: len(held)] == held and images[: len(known)] == known

        row = self._row_for(is_held)
        held = row.segment.token_ids
        added, new = token_ids[len(held) :], placed[len(row.images) :]
        marked = unexpanded(added, [image.moved(-len(held)) for image in new])
        text = self.chat.decode_after(held, marked)
        sampling = self._sampling(len(token_ids), max_tokens, stop)
        return await self._turn(row, text, added, new, sampling)

    async def _turn(
        self,
        row: TextRow,
        text: str,
        token_ids: list[int],
        images: tuple[PlacedImage, ...],
        sampling: Sampling,
        state: str | None = None,
    ) -> Reply:
        """Sample a reply after the row and what the turn adds to it before the reply: a text with
        placeholders of images, its tokens and its images. Add that and the reply to the row."""
        segment = row.segment
        prompt_ids, shown = [*segment.token_ids, *token_ids], (*segment.images, *images)
        row.busy = True
        self._asking += 1
        try:
            completion = await self.generate(prompt_ids, sampling, shown)
        finally:
            row.busy = False
            self._asking -= 1
        if row not in self._rows:
            segment.state = state
            self.forks += bool(self._rows) and not segment.token_ids
            self._rows.append(row)
        sampled_ids = completion.token_ids
        segment.observe(token_ids, images)
        found = completion.logprobs, completion.versions, completion.kept, completion.routes
        segment.sample(sampled_ids, *found)
        sampled = self.chat.decode_after(prompt_ids, sampled_ids)
        before = row.text
        row.text += text + sampled
        self.turns += 1
        self._last = row
        # a template ends the turn itself; without one, the text ends as it was sampled
        reply = self.chat.reply_text(prompt_ids, sampled_ids)
        message = {"role": "assistant", "content": reply if self.chat.chat else sampled}
        opened = self.chat.opened(before + text)
        return Reply(reply, message, prompt_ids, completion, shown, opened)

    def message_forms(self, reply: Reply, parsed: ParsedReply | None = None) -> list[Message]:
        """Return the forms that a reply may have in the chat, best first. ``parsed`` has its
        calls."""
        if not self.chat.chat:
            return [reply.message]
        parsed = parsed or ParsedReply(reply.text)
        return message_forms(reply.message, parsed, self.chat.forms.reply, reply.opened)

    def take_back(self, prompt_ids: list[int], completion: Completion) -> bool:
        """Remove a turn with what it added before the reply, if its row ends with it. Return
        whether it did."""
        whole = [*prompt_ids, *completion.token_ids]
        row = next((row for row in self._rows if row.segment.token_ids == whole), None)
        if row is None:
            return False
        sampled = [at for at, mine in enumerate(row.segment.loss_mask[: len(prompt_ids)]) if mine]
        self.turns -= 1
        if sampled:
            row.segment.cut(sampled[-1] + 1)
        else:
            self._rows.remove(row)
        return True

    def choose(
        self,
        chats: Sequence[Sequence[Message]],
        tools: Schemas | None = None,
        continued: bool = False,
    ) -> list[Message]:
        """Return the chat that continues the longest row, the first among equals; if none can be
        rendered, the last. ``continued`` says whether their last message is to be continued."""
        best, most = chats[-1], -1
        longest = max((len(row.text) for row in self._rows), default=0)
        for chat in chats:
            if most == longest or len(chats) == 1:
                break
            with suppress(TemplateError):
                text = self._render(chat, tools, continued)
                images = self.chat.images_in(chat)
                rows = (row for row in self._rows if row.is_continued_by(text, images))
                if (held := max((len(row.text) for row in rows), default=0)) > most:
                    best, most = chat, held
        return list(best)

    def _render(
        self, messages: Sequence[Message], tools: Schemas | None, continued: bool = False
    ) -> str:
        """Render a chat with what the prompt's row gives to the template. A client of the endpoint
        says itself which tools there are. Raises TemplateError."""
        shown = tools if self.any_prompt else with_row_tools(tools, self._row_tools)
        return self.chat.render(messages, shown, variables=self._variables, continued=continued)

    def _require_turn(self) -> None:
        if self.turns + self._asking >= (self.limits.max_turns or 2**31):
            raise EpisodeOver(FinishReason.MAX_TURNS)

    def _row_for(self, is_held: Callable[[TextRow], bool]) -> TextRow:
        """Return the longest row that the turn continues, or a new one."""
        fitting = [row for row in self._rows if not row.busy and is_held(row)]
        if not fitting:
            return TextRow()
        row = max(fitting, key=lambda row: len(row.text))
        return row.as_context() if self.row_per_turn else row

    def _sampling(self, before: int, max_tokens: int | None, stop: tuple[str, ...]) -> Sampling:
        """Return the sampling of the next turn, which follows ``before`` tokens. Raises EpisodeOver
        if there is no room for it."""
        if not self._rows and not self.any_prompt:
            # several concurrent calls may be the first turn
            self._longest = min(self._longest, before + self.sampling.max_tokens)
        left = min(self.sampling.max_tokens - self.sampled, self._longest - before)
        if left < 1:
            raise EpisodeOver(FinishReason.LENGTH)
        bounds = (left, self.limits.max_tokens_per_turn, max_tokens)
        return replace(
            self.sampling,
            max_tokens=min(bound for bound in bounds if bound),
            max_len=None,
            stop=(*self.sampling.stop, *stop),
        )

    @property
    def sampled(self) -> int:
        """The number of sampled tokens of all turns."""
        return sum(sum(row.segment.loss_mask) for row in self._rows)

    @property
    def is_full(self) -> bool:
        """Whether the episode has no room for another token."""
        longest = max((len(row.segment.token_ids) for row in self._rows), default=0)
        return self.sampled >= self.sampling.max_tokens or longest >= self._longest

    def require_room_after(self, reply: Reply) -> None:
        """Raise EpisodeOver if the engine failed, or cut the reply because the episode is full."""
        reason = reply.completion.finish_reason
        if reason.is_failure or (reason is FinishReason.LENGTH and self.is_full):
            raise EpisodeOver(reason)

    def credit(self, reward: float) -> None:
        """Credit a reward to the last token of the last turn."""
        assert self._last is not None, "no turn to credit"
        at = len(self._last.segment.token_ids) - 1
        self._last.rewards[at] = self._last.rewards.get(at, 0.0) + reward

    def render_turn(
        self, new: Sequence[Message], frame: Image | None = None, action: str | None = None
    ) -> None:
        """Record for people what a turn shows the policy, if the prompt asks for that."""
        if self.prompt.render:
            self.rendered.append(RenderedTurn(tuple(new), frame, action))

    def render_action(self, action: str, reward: float = 0.0) -> None:
        """Record for people what the policy does in the turn that was shown last."""
        if self.rendered:
            self.rendered[-1] = replace(self.rendered[-1], action=action, reward=reward)

    def trajectory(
        self,
        finish_reason: FinishReason,
        score: Score | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """Return the episode as a trajectory. After several turns, ``score`` also gets the rewards
        credited to them, as token rewards."""
        nothing = Segment.answer(self.prompt.token_ids, [], images=self.prompt.images)
        rows = self._rows or [TextRow("", nothing)]
        if score is not None and any(row.rewards for row in rows) and self.turns > 1:
            earned = [
                row.rewards.get(at, 0.0) for row in rows for at in range(len(row.segment.token_ids))
            ]
            score = replace(score, token_rewards=earned)
        counted = {"turns": float(self.turns), "forked_segments": float(self.forks)}
        prompt = self.prompt
        if not prompt.token_ids and self._rows:  # it is a seed: show what the episode began with
            first = rows[0].segment
            ids = first.token_ids[: first.context_length]
            images = tuple(image for image in first.images if image.end <= len(ids))
            text = self.chat.decode_after([], unexpanded(ids, images))
            prompt = replace(prompt, token_ids=ids, text=text, images=images)
        return Trajectory(
            prompt,
            [row.segment for row in rows],
            finish_reason,
            text=self._text(),
            turns=self.turns,
            score=score,
            metrics={**counted, **(metrics or {})},
            rendered=tuple(self.rendered),
        )

    def _text(self) -> str:
        """Return the text from the first reply on; of later rows, only what they add."""
        parts, earlier = [], ""
        for row in self._rows:
            if earlier and row.text.startswith(
                earlier
            ):  # a turn with the turns before it as context
                parts.append(row.text[len(earlier) :])
            else:
                parts.append(self._after_context(row.segment))
            earlier = row.text
        return "".join(parts)

    def _after_context(self, row: Segment) -> str:
        """Return the text from the first sampled token on, with a placeholder for each image."""
        first = row.context_length
        later = [image.moved(-first) for image in row.images if image.start >= first]
        ids = unexpanded(row.token_ids[first:], later)
        return self.chat.decode_after(row.token_ids[:first], ids)
