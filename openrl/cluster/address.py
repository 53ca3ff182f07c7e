"""Checks that something answers at a cluster's address, without importing Ray."""

from __future__ import annotations

import socket

from openrl.errors import UserError

CONNECT_S = 10.0  # timeout of one connection attempt


def check_reachable(address: str) -> None:
    """Raise OSError or ValueError unless something listens at host:port. Ray itself would keep
    trying for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():
        raise ValueError("not of the form host:port")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


def check_address(address: str | None) -> None:
    """Raise UserError if nothing answers at ``address``. "auto" and None name no address, so there
    is nothing to check."""
    if address is None or address == "auto":
        return
    try:
        check_reachable(address)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"--ray_address {address}: no Ray cluster answers there ({error})",
            "the host:port that `ray start --head` printed",
        ) from error
