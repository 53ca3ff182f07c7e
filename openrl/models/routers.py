"""The routers of a mixture of experts: which experts they choose for each token, recorded and
replayed.

A router of transformers scores the experts, takes the best by ``topk``, and computes the weights of
these from their scores by its family's rules. So it is enough to replace what that one call
chooses: the scores are then read at the given experts, and what follows, gradient included, is the
family's own code. Replay with the engine's experts is R3, https://arxiv.org/abs/2510.11370."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from openrl.errors import UserError
from openrl.models.experts import expert_count
from openrl.models.stored import load_config
from openrl.models.towers import empty_model
from openrl.token_origins import Routes

_TOPK = (torch.topk, Tensor.topk)


class _Choice(TorchFunctionMode):
    """Sees what each ``topk`` inside chooses. The call of number ``call`` takes ``routes``, (N, k),
    instead of its own choice where they are known."""

    def __init__(self, call: int = 0, routes: Tensor | None = None) -> None:
        super().__init__()
        self.call, self.routes = call, routes
        self.chosen: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _TOPK:
            if self.routes is not None and len(self.chosen) == self.call:
                known = self.routes >= 0
                experts = self.routes.to(found.indices.dtype).where(known, found.indices)
                found = torch.return_types.topk((args[0].gather(-1, experts), experts))
            self.chosen.append(found.indices)
        return found


class Routers:
    """The routers of a model, in the order of its layers."""

    def __init__(self, hf: PreTrainedModel) -> None:
        """Raises UserError if ``hf`` is no mixture, or its routers cannot be replayed."""
        found = {name: module for name, module in hf.named_modules() if _is_router(module)}
        name, text = hf.config.model_type, hf.config.get_text_config()
        experts = expert_count(text)
        if not experts:
            raise _unfit(f"a {name} has no experts to choose")
        if not found:
            raise _unfit(f"a {name} chooses its experts outside of a module for that")
        self._calls = [_final_topk(x, text.hidden_size, experts) for x in found.values()]
        tops = {module.top_k for module in found.values()}
        if len(tops) > 1:
            raise _unfit(f"the layers of a {name} choose different numbers of experts")
        (self.top_k,) = tops
        numbers = [re.search(r"layers\.(\d+)\.", name) for name in found]
        self.layers = [int(number[1]) for number in numbers if number]
        """The layers, counted from 0, that have these routers."""
        self._routes: Tensor | None = None  # (N, routers, k)
        self._chosen: list[Tensor] | None = None
        for number, module in enumerate(found.values()):
            run = partial(self._run, number, module.forward)
            module.forward = run  # type: ignore[method-assign]

    @property
    def width(self) -> int:
        """Experts that a token passes: routers times k."""
        return len(self._calls) * self.top_k

    def _run(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        routes = None if self._routes is None else self._routes[:, number]
        call = self._calls[number]
        with _Choice(call, routes) as choice:
            output = forward(*args, **kwargs)
        if self._chosen is not None:
            self._chosen.append(choice.chosen[call])
        return output

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Collect what each router chooses inside, (N, k), in the order of the layers."""
        self._chosen = []
        try:
            yield self._chosen
        finally:
            self._chosen = None

    @contextmanager
    def replaying(self, routes: Tensor | None) -> Iterator[None]:
        """Make the routers choose ``routes`` inside, (R, S, width), and their own where it is None,
        UNKNOWN or LOST. After a pass with gradients it holds on, for checkpointing, which computes
        parts of the pass again in the backward pass."""
        before, holds = self._routes, False
        shape = (-1, len(self._calls), self.top_k)
        self._routes = None if routes is None else routes.reshape(shape)
        try:
            yield
            holds = torch.is_grad_enabled()
        finally:
            if not holds:
                self._routes = before

    def rows(self, rows: Sequence[Routes | None], width: int, device: torch.device) -> Tensor:
        """Return the routes of rows that are padded or cut to ``width``, (b, width, experts per
        token) int16."""
        found = torch.full((len(rows), width, self.width), Routes.UNKNOWN, dtype=torch.int16)
        for row, routes in zip(found, rows, strict=True):
            if routes is not None and routes.ids:
                if routes.width != self.width:
                    raise ValueError(f"{routes.width} experts per token came, not {self.width}")
                ids = torch.frombuffer(routes.ids, dtype=torch.int16).view(-1, self.width)
                row[: len(ids)] = ids[:width]
        return found.to(device)


def check_routers(path: str, trust_remote_code: bool, overrides: Mapping[str, Any]) -> Routers:
    """Return the routers of the model at ``path`` with ``overrides`` of its config, without
    weights. Raises UserError if they cannot be replayed."""
    config = load_config(path, trust_remote_code)
    for name, value in overrides.items():
        setattr(config, name, value)
    return Routers(empty_model(config, trust_remote_code))


def _is_router(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("Router", "Gate")) and hasattr(module, "top_k")


def _final_topk(router: nn.Module, hidden_size: int, experts: int) -> int:
    """Return which of a router's calls of ``topk`` gives the experts that it returns: some choose
    groups of experts first.

    Without any preference all experts weigh the same, whichever are taken; if not, the weights
    depend on a choice before that call. Raises UserError then."""
    blank = copy.deepcopy(router).to_empty(device="cpu").float()
    given = [torch.zeros(1, experts, hidden_size)]
    others = len(inspect.signature(router.forward).parameters) - 1  # a bias that the layer holds
    given += [torch.zeros(experts)] * others
    with torch.no_grad():
        for values in (*blank.parameters(), *blank.buffers()):
            values.zero_()
        try:
            with _Choice() as own:
                found = _tensors(blank(*given))
            (call,) = [n for n, ids in enumerate(own.chosen) if any(ids is x for x in found)]
            each = torch.arange(experts)[:, None] + torch.arange(router.top_k)
            with _Choice(call, each % experts):
                replayed = _tensors(blank(*given))
            alike = all(
                torch.equal(x, y)
                for x, y in zip(found, replayed, strict=True)
                if x is not own.chosen[call]
            )
        except (TypeError, ValueError, RuntimeError, IndexError):
            alike = False
    if not alike:
        raise _unfit(f"a {type(router).__name__} does not only weigh what one topk chose")
    return call


def _tensors(output: Any) -> Sequence[Tensor]:
    return output if isinstance(output, tuple) else (output,)


def _unfit(why: str) -> UserError:
    return UserError(f"--routing_replay: {why}", "leave it out")
