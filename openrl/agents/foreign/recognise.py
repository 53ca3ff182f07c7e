"""Recognises what a user's file holds by the methods of its classes. Runs in the file's process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from openrl.agents.foreign.shims import WRAPPED, AgentInstanceBase, Env
from openrl.processes.worker import NotUsable

ENTRIES = ("AgentExecutor", "AgentRunner", "AgentInstance")  # main classes of OpenRLHF and Molt
GIVEN = ("env_config", "extras")  # arguments that constructors may ask for, as SkyRL's do
EXECUTE = ("prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine")
_ENDINGS = ("AgentExecutor", "EnvRunner", "AgentRunner")  # of the names of their base classes
_STATES = ("states", "state", "state_dict")


@dataclass(frozen=True)
class Signature:
    """One way to call a method."""

    positional: int = 0
    keywords: tuple[str, ...] = ()

    def rejects(self, function: Callable[..., Any]) -> bool:
        try:
            given = [None] * (self.positional + 1)  # one more for the object itself
            inspect.signature(function).bind(*given, **dict.fromkeys(self.keywords))
        except TypeError:
            return True
        return False


@dataclass(frozen=True)
class Kind:
    """A way to write an agent or environment. A class is of the first kind whose methods it has."""

    name: str
    shape: str  # shown to people
    methods: Mapping[str, tuple[Signature, ...]]  # name -> the ways to call it, one of which fits
    player: str  # module and class that plays it
    takes_states: bool = False  # ``step`` takes a dict, as the name of its parameter tells

    def has(self, made: type) -> bool:
        if not all(callable(getattr(made, name, None)) for name in self.methods):
            return False
        return not self.takes_states or _takes_states(made)

    def problem(self, made: type) -> str | None:
        """Say why the methods of a class cannot be called; None if they can."""
        for name, signatures in self.methods.items():
            function = getattr(made, name)
            if all(signature.rejects(function) for signature in signatures):
                parameters = str(inspect.signature(function)).partition(" ->")[0]
                return f"{made.__name__}.{name}{parameters} cannot be called as {self.shape}"
        return None


EXECUTOR = Kind(
    "executor",
    f"OpenRLHF's AgentExecutor: async execute({', '.join(EXECUTE)}[, images])",
    {"execute": (Signature(keywords=EXECUTE), Signature(keywords=(*EXECUTE, "images")))},
    "executor.ExecutorPlayer",
)
TURNS = Kind(
    "turns",
    "OpenRLHF's AgentInstance or Molt's Env: async reset(states), async step(states)",
    {"reset": (Signature(1),), "step": (Signature(1),)},
    "environments.TurnsPlayer",
    takes_states=True,
)
SKYRL = Kind(
    "skyrl",
    "SkyRL's BaseTextEnv: init(prompt), step(action)",
    {"init": (Signature(1),), "step": (Signature(1),)},
    "environments.SkyRLPlayer",
)
GYM = Kind(
    "gym",
    "gym's and GEM's: reset(seed), step(action)",
    {"reset": (Signature(keywords=("seed",)),), "step": (Signature(1),)},
    "environments.GymPlayer",
)
PROGRAM = Kind(
    "program",
    "an agent of the endpoint: run(data, base_url, api_key), or Molt's ChatAgent: run(ctx)",
    {"run": (Signature(1, ("base_url", "api_key")), Signature(1))},
    "program.ProgramPlayer",
)
AGENT = Kind(
    "agent",
    "an agent of ours: async run(prompt, generate, sampling)",
    {"run": (Signature(keywords=("prompt", "generate", "sampling")),)},
    "player.Player",
)
TRL = Kind(
    "trl",
    "TRL's environment: reset(**row), methods as tools, perhaps get_reward()",
    {},
    "trl.ToolPlayer",
)
KINDS = (EXECUTOR, TURNS, SKYRL, GYM, PROGRAM, AGENT)
"""In the order in which a class is compared with them. TRL's has no methods to be known by."""


def find_class(module: ModuleType, name: str | None) -> tuple[Any, Kind]:
    """Return the class of that name or, without a name, the file's main class or else its only
    class of a known kind, and the kind. Raises NotUsable."""
    own = {
        n: made
        for n, made in vars(module).items()
        if isinstance(made, type) and (made.__module__ == module.__name__ or n == name)
    }
    if name is not None and name not in own:
        raise NotUsable(f"it has no class {name}, but {_list_classes(own)}")
    asked = [name] if name else own
    playable = {n: found for n in asked if (found := _playable(own[n]))}
    if not playable:
        known = "".join(f"\n  {kind.shape}" for kind in (*KINDS, TRL))
        raise NotUsable(
            f"none of its classes can be played: {_list_classes(own)}. These can be:{known}"
        )
    # in early versions a main class may run nothing; then the next one counts
    main, *others = [n for n in ENTRIES if n in playable][:1] or playable
    if others:
        names = ", ".join(made.__name__ for made, _ in playable.values())
        raise NotUsable(f"several of its classes can be played: {names}; name one, PATH.py:CLASS")
    made, kind = playable[main]
    # the constructor of our own agents gets what they need
    if problem := kind.problem(made) or (kind is not AGENT and _constructor_problem(made)):
        raise NotUsable(problem)
    return made, kind


def _constructor_problem(made: Any) -> str | None:
    """Say why no object of the class can be made; None if one can."""
    parameters = list(inspect.signature(made.__init__).parameters.values())[1:]
    asked = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in GIVEN
    ]
    return (
        f"{made.__name__}.__init__ needs {', '.join(asked)}, which nothing provides"
        if asked
        else None
    )


def _playable(made: Any) -> tuple[Any, Kind] | None:
    """Return the class with its kind, or the class that it names, if it is a runner."""
    if kind := _kind_of(made):
        return made, kind
    named = _class_to_run(made)
    return _playable(named) if named else None


def _kind_of(made: Any) -> Kind | None:
    if is_trl_environment(made):
        return TRL
    kind = next((kind for kind in KINDS if kind.has(made)), None)
    if kind is PROGRAM and _runs_as_ours(made):
        return AGENT
    if kind is EXECUTOR and made.execute.__module__ != made.__module__:
        return None  # ``execute`` is the other system's, which plays what the class names
    return kind


def _runs_as_ours(made: Any) -> bool:
    """Whether ``run`` has the parameters of our agents, or at least those that no other has."""
    names = {"generate", "sampling"} & {*inspect.signature(made.run).parameters}
    return bool(names) or AGENT.problem(made) is None


def _class_to_run(made: Any) -> Any:
    """Return the class that a runner of OpenRLHF or Molt would run, if the class names one."""
    if not any(base.__name__.endswith(_ENDINGS) for base in made.__mro__[1:]):
        return None
    try:
        runner = made()
    except TypeError:  # in early versions runners have parameters
        return None
    return next((vars(runner)[name] for name in WRAPPED if name in vars(runner)), None)


def is_trl_environment(made: type) -> bool:
    """Whether a class is TRL's: it has ``reset``, other methods as tools, and either
    ``get_reward()``, or ``reset(**row)`` and only documented tools. Classes with ``step`` but
    without ``get_reward`` are gym's."""
    methods = dict(inspect.getmembers(made, inspect.isfunction))
    tools = tool_methods(made)
    if "reset" not in methods or not tools:
        return False
    if "get_reward" in methods:
        return True
    row = inspect.signature(methods["reset"]).parameters.values()
    takes_rows = any(parameter.kind is parameter.VAR_KEYWORD for parameter in row)
    return "step" not in methods and takes_rows and all(map(inspect.getdoc, tools))


def tool_methods(made: type) -> list[Callable[..., Any]]:
    """Return the methods of a class of TRL that are tools."""
    return [
        method
        for name, method in inspect.getmembers(made, inspect.isfunction)
        if name not in ("reset", "get_reward") and not name.startswith("_")
    ]


def _takes_states(made: Any) -> bool:
    if issubclass(made, (AgentInstanceBase, Env)):
        return True
    first = list(inspect.signature(made.step).parameters)[1:2]
    return first != [] and first[0] in _STATES


def _list_classes(own: Mapping[str, type]) -> str:
    def methods(made: type) -> str:
        return ", ".join(n for n, f in vars(made).items() if inspect.isfunction(f) and n[0] != "_")

    return (
        "; ".join(f"{n} with {methods(made) or 'no method'}" for n, made in own.items()) or "none"
    )
