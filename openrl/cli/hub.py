"""Checks whether the Hugging Face Hub answers, before libraries wait for it again and again."""

from __future__ import annotations

import os
import socket
from typing import Any
from urllib.parse import urlsplit

from openrl.config.groups.data import data_items, name_and_subset
from openrl.config.groups.reward import split
from openrl.config.rules.machine import DATA, MODELS, given_names, is_local

CONNECT_TIMEOUT = 5.0  # seconds
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


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
    models = [item for _, names in given_names(config, MODELS) for item in split(names)]
    data = [item for _, names in given_names(config, DATA) for item in data_items(names)]
    names = [*models, *(name_and_subset(item)[0] for item in data)]
    return list(dict.fromkeys(name for name in names if not is_local(name)))
