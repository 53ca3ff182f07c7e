"""The rows of a micro-batch as a backbone sees them: a padded rectangle, or packed into one row.

In a packed row, the real tokens of all rows stand end to end and positions start at 0 again with
each row. Attention must not cross such a start: transformers derives a block-diagonal mask from the
positions (eager, sdpa, flex_attention), and flash attention takes the boundaries as
``cu_seq_lens``. ``check_packing`` finds models that ignore both. ``states`` does the same for
layers that carry a state.

On request, the prompt of a group's rows is computed once, and every row attends to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from openrl.algorithms.row_sizes import common_prefixes, saved_tokens
from openrl.errors import UserError
from openrl.models.logits import like, placed
from openrl.models.trial import Run, Trial

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Rows:
    """The input of a backbone, and the way back. (R, S) is (b, T) unchanged, or (1, N) packed."""

    token_ids: Tensor  # (R, S) int64
    predicted: Tensor  # scored tokens whose predecessor in the row predicts them
    inputs: dict[str, Any]  # of the backbone's forward pass, besides the tokens
    # values per token, (R, S, ...) -> (b, T, ...), 0 where nothing is scored
    to_batch: Callable[[Tensor], Tensor]
    arranged: Callable[[Tensor], Tensor]  # the other way, (b, T, ...) -> (R, S, ...)
    # in a packed row: (N, ...) -> one value for each real token of all rows
    real: Callable[[Tensor], Tensor] = lambda values: values


def arrange(
    token_ids: Tensor,
    attention_mask: Tensor,
    packing: bool,
    groups: Tensor | None = None,
    scored: Tensor | None = None,
    axes: Tensor | None = None,
) -> Rows:
    """Arrange right-padded token_ids (b, T) int64 and attention_mask (b, T) bool.

    With ``groups`` (b,), neighbouring packed rows of equal number share their common prefix.
    ``scored`` (b, T) bool marks the tokens whose results are wanted; None means all. ``axes``
    (3, b, T) are the positions of a model that counts image tokens in time, height and width; such
    rows share nothing.
    """
    scored = attention_mask if scored is None else attention_mask & scored
    if not packing:
        return _padded(token_ids, scored, axes)
    if groups is None:
        return _packed(token_ids, attention_mask, scored, axes)
    return _shared(token_ids, attention_mask, scored, groups)


def _padded(token_ids: Tensor, scored: Tensor, axes: Tensor | None) -> Rows:
    """Keep the rectangle, without a mask: causal attention never looks at padding on the right."""
    predicted = scored.clone()
    predicted[:, 0] = False
    along = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
    return Rows(
        token_ids,
        predicted,
        {} if axes is None else {"position_ids": torch.cat([along[None], axes])},
        lambda values: values.masked_fill(~like(scored, values), 0),
        lambda values: values,
    )


def _packed(token_ids: Tensor, attention_mask: Tensor, scored: Tensor, axes: Tensor | None) -> Rows:
    index = torch.arange(token_ids.shape[1], device=token_ids.device)
    positions = index.expand_as(token_ids)[attention_mask][None]
    # the first of the four says where rows begin
    given = positions if axes is None else torch.cat([positions, axes[:, attention_mask]])[:, None]
    return Rows(
        token_ids[attention_mask][None],
        (positions > 0) & scored[attention_mask],
        {"position_ids": given} | _boundaries(attention_mask.sum(-1)),
        lambda values: placed(values[0][scored[attention_mask]], scored),
        lambda values: values[attention_mask][None],
    )


def _boundaries(queries: Tensor, keys: Tensor | None = None) -> dict[str, Any]:
    """Return the boundaries of sequences with these numbers of queries and keys; the last query of
    a sequence sees all its keys. None means as many keys as queries."""
    found: dict[str, Any] = {}
    for side, lengths in (("q", queries), ("k", queries if keys is None else keys)):
        found[f"cu_seq_lens_{side}"] = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        found[f"max_length_{side}"] = int(lengths.max())
    return found


def _shared(token_ids: Tensor, attention_mask: Tensor, scored: Tensor, groups: Tensor) -> Rows:
    """Pack neighbouring rows of a group as [common prefix | own part | own part | ...].

    An own part continues the prefix's positions and attends to the prefix and to itself:
    ``key_places`` gathers its keys. It begins with a copy of the last shared token, which stands
    before the row's first own token and so predicts it; everywhere else a token's predecessor is
    its neighbour, as in other packed rows. A shared token is scored if any row asks for it.
    """
    index = torch.arange(token_ids.shape[1], device=token_ids.device)
    run = F.pad((groups[1:] != groups[:-1]).cumsum(0), (1, 0))
    # the first row of each run holds the shared prefix
    heads = F.pad(run[1:] != run[:-1], (1, 0), value=True)
    head, siblings = (x[run] for x in (heads.nonzero()[:, 0], run.bincount()))
    shared = common_prefixes(token_ids, attention_mask, run)[:, None]
    shared = shared.where(saved_tokens(siblings[:, None], shared) > 0, 0)
    first = (shared - 1).clamp(min=0)  # start of the row's own part

    # two parts of each row, (b, 2, T): the prefix it holds for its run, and its own part
    parts = torch.stack([(index < shared) & heads[:, None], attention_mask & (index >= first)], 1)
    number = (parts.flatten().cumsum(0) - 1).view(parts.shape)
    # the place of each real token in the packed row
    place = number[head, 0].where(index < shared, number[:, 1])[attention_mask]
    seen = torch.stack([parts[:, 0], attention_mask], 1)
    keys = torch.stack([number[:, 0], number[head, 0].where(index < first, number[:, 1])], 1)[seen]
    source = parts.nonzero()
    positions = source[:, 2]
    begins = torch.stack([torch.zeros_like(first), first], 1).expand_as(parts)[parts]
    lengths = [x.sum(-1)[parts.any(-1)] for x in (parts, seen)]
    scored_places = place[scored[attention_mask]]
    predicted = torch.zeros_like(positions, dtype=torch.bool).index_fill(0, scored_places, True)

    def arranged(values: Tensor) -> Tensor:
        """Take a shared token's value from a row that asks for it: other rows lack it."""
        of_first = values[source[:, 0], positions]
        return of_first.index_put((scored_places,), values[scored])[None]

    return Rows(
        token_ids[source[:, 0], positions][None],
        (predicted & (positions > begins))[None],
        {"position_ids": positions[None], "key_places": keys} | _boundaries(*lengths),
        lambda values: placed(values[0][scored_places], scored),
        arranged,
        lambda values: values[place],
    )


def layers_besides_attention(config: PretrainedConfig) -> set[str]:
    """Return the kinds of layers that do not take a row's boundaries from ``arrange``."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    return set(kinds) - ATTENTION_LAYERS


@torch.no_grad()
def check_packing(path: str, run: Run, trial: Trial) -> None:
    """Raise UserError if a model that packs gives a row another result beside others than alone.

    ``run`` is the model on its device: (b, T) token ids and attention mask -> its output. The gap
    between the two results is compared with how much the first row changes the second as its
    context.
    """
    pair, context = trial.tokens.view(2, 6), trial.tokens.view(1, 12)
    try:
        beside = run(pair, torch.ones_like(pair, dtype=torch.bool))[1:]
    except TypeError as error:  # a forward pass without position_ids
        raise unpackable(path, str(error)) from error
    alone, after = (run(x, torch.ones_like(x, dtype=torch.bool)) for x in (pair[1:], context))
    tail = slice(1, None) if alone.dim() > 1 else slice(None)  # the first token has no prediction
    after = after[:, 6:] if after.dim() > 1 else after
    if discrepancy := trial.discrepancy(*(x[..., tail] for x in (beside, alone, after))):
        why = f"attention crosses from one packed row into the next ({discrepancy})"
        raise unpackable(path, why)


@torch.no_grad()
def check_sharing(path: str, run: Callable[..., Tensor], trial: Trial) -> None:
    """Raise UserError if rows that share their prefix get another result than without sharing.

    ``run`` also takes groups (b,). The gap is compared with what another prefix changes.
    """
    beginning, end = trial.tokens.view(2, 6)
    ends = torch.stack([end, end.flip(0)])
    alike, changed = (
        torch.cat([first.expand(2, -1), ends], 1) for first in (beginning, beginning.flip(0))
    )
    mask = torch.ones_like(alike, dtype=torch.bool)
    try:
        shared = run(alike, mask, torch.zeros(2, dtype=torch.long))
        alone = run(alike, mask)
        other = run(changed, mask)
    # raised by attention that is not one of transformers' functions
    except (UserError, TypeError, AttributeError) as error:
        why = error.message if isinstance(error, UserError) else error
        raise UserError(f"--prefix_grouper: {path}: {why}", "leave --prefix_grouper out") from error
    tail = slice(6, None) if alone.dim() > 1 else slice(None)
    if discrepancy := trial.discrepancy(*(x[..., tail] for x in (shared, alone, other))):
        raise UserError(
            f"--prefix_grouper: rows of {path} cannot share their beginning: results differ"
            f" ({discrepancy})",
            "leave --prefix_grouper out",
        )


def unpackable(path: str, why: str) -> UserError:
    return UserError(
        f"--packing_samples: rows of {path} cannot be packed: {why}",
        "leave out --packing_samples and what turns it on (--use_dynamic_batch, --prefix_grouper), "
        "or try another --attn_implementation",
    )
