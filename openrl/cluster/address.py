"""Checks that a Ray cluster answers at an address, without importing Ray."""

from __future__ import annotations

import socket

from openrl.errors import UserError

CONNECT_S = 10.0  # timeout of one connection attempt


def check_address(address: str | None) -> None:
    """Raise UserError if nothing listens at ``address``, host:port. Ray itself would keep trying
    for minutes. "auto" and None name no address, so there is nothing to check."""
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        if "/" in host or not port.isdecimal():
            raise ValueError("not of the form host:port")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise no_cluster(address, error) from error


def no_cluster(address: str, error: Exception) -> UserError:
    return UserError(
        f"--ray_address {address}: no Ray cluster answers there ({error})",
        "the host:port that `ray start --head` printed",
    )
