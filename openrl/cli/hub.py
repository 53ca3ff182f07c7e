"""Where models and data that flags name come from: directories here, ModelScope, or the Hugging
Face Hub, which is asked whether it answers before libraries wait for it again and again."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal
from urllib.parse import urlsplit

from openrl.config.derived import DATA, MODELS, given_names, is_local
from openrl.config.groups.data import data_items, name_and_subset
from openrl.config.groups.reward import split
from openrl.config.teacher_plan import routed_models
from openrl.errors import UserError
from openrl.files import expanded

CONNECT_TIMEOUT = 5.0  # seconds
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
MODEL_FLAGS = (*MODELS, "tokenizer_path", "lora_adapter_path", "lora_path")


def settle_for_cache(config: Any) -> str:
    """Tell the Hub's libraries to use only their cache if a flag names something of the Hub but the
    Hub does not answer. Call this before they are imported. Returns a warning, or an empty text."""
    if os.environ.get("HF_HUB_OFFLINE") or any(map(os.environ.get, PROXIES)):
        return ""
    if not (names := hub_names(config)):
        return ""
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        port = hub.port or (443 if hub.scheme == "https" else 80)
        socket.create_connection((hub.hostname or "", port), CONNECT_TIMEOUT).close()
    except (OSError, ValueError) as error:  # no answer, or no address
        os.environ["HF_HUB_OFFLINE"] = "1"
        where = f"{hub.hostname}: {getattr(error, 'strerror', None) or error}"
        return f"the Hub does not answer ({where}); the cache must hold {', '.join(names)}"
    return ""


def hub_names(config: Any) -> list[str]:
    """Return the models and data of a command that are not paths here."""
    models = [item for _, names in given_names(config, MODEL_FLAGS) for item in split(names)]
    data = [item for _, names in given_names(config, DATA) for item in data_items(names)]
    names = [*models, *routed_models(config), *(name_and_subset(item)[0] for item in data)]
    return list(dict.fromkeys(name for name in names if not is_local(name)))


def with_places(config: Any) -> Any:
    """Return the config of a command whose models and data libraries find: ~ is the home directory
    in every item of a list, and with --use_ms each name becomes the directory into which
    ModelScope's client has downloaded it, or which it still has. Raises UserError if there is no
    client, or if it gets no answer."""
    changed = {}
    for name, group in vars(config).items():
        flags = {f: value for f, value in getattr(group, "__dict__", {}).items() if value}
        places = {
            **{f: _places(split(flags[f]), "model", config) for f in MODEL_FLAGS if f in flags},
            **{f: _places(data_items(flags[f]), "dataset", config) for f in DATA if f in flags},
        }
        if any(flags[f] != place for f, place in places.items()):
            changed[name] = replace(group, **places)
    return replace(config, **changed) if changed else config


def _places(items: Iterable[str], kind: Literal["model", "dataset"], config: Any) -> str:
    """Return the comma list with paths for items."""
    places = []
    for item in items:
        name, subset = name_and_subset(item)
        away = config.model.use_ms and not is_local(name)
        place = _download(name, kind) if away else name
        place = str(expanded(place)) if place.startswith("~") else place
        places.append(f"{place}@{subset}" if subset else place)
    return ",".join(places)


def _download(name: str, kind: Literal["model", "dataset"]) -> str:
    try:
        from modelscope_hub import HubApi, HubError
    except ImportError as error:
        message = "--use_ms: modelscope-hub, ModelScope's client, is not installed"
        raise UserError(message, "pip install modelscope-hub") from error
    try:
        return str(HubApi().download_repo(name, kind))
    except HubError as error:
        raise UserError(
            f"--use_ms: ModelScope gives no {kind} {name}: {error}",
            "check the name and the network; MODELSCOPE_API_TOKEN opens what is private",
        ) from error
