"""`host:port`: what is wrong with one, and when two of them are the same."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Any

from tf_largebatch.core.errors import TopologyError

_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")


def check_addresses(addresses: Iterable[tuple[str, Any]]) -> None:
    """Checks every address by itself, and that no two are the same.

    Args:
        addresses: pairs of where an address was written, for the message, and the address.

    Raises:
        TopologyError: one is no `host:port`, or is given twice; the message names its place.
    """
    seen: dict[tuple[str, int], tuple[str, str]] = {}
    for place, address in addresses:
        problem = _address_problem(address)
        if problem:
            shown = "missing" if address is None else repr(address)
            raise TopologyError(f"{place} is {shown}: {problem}.")
        first_place, first = seen.setdefault(_canonical(address), (place, address))
        if first_place != place:
            spelled = "" if first == address else f", as {first!r}"
            raise TopologyError(
                f"{place} is {address!r}, which {first_place} has already{spelled}: every worker "
                "needs an address of its own."
            )


def _canonical(address: str) -> tuple[str, int]:
    """Equal for addresses that differ in spelling alone: letter case, zeros."""
    host, _, port = address.rpartition(":")
    if host.startswith("["):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    return host.lower(), int(port)


def _address_problem(address: Any) -> str | None:
    """What is wrong with a `host:port`, or None."""
    if not isinstance(address, str):
        return "an address is a string 'host:port'"
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port:
        return "an address is 'host:port', as '10.0.0.1:2222' or '[::1]:2222'"
    if "://" in address:
        return "an address is 'host:port', without a scheme"
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            return f"{host[1:-1]!r} is no IPv6 address"
    elif ":" in host:
        return "an IPv6 address goes in brackets, as '[::1]:2222'"
    elif not _HOST_NAME.fullmatch(host):
        return f"{host!r} is no host name"
    if not (re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= 65535):
        return f"the port {port!r} must be a number from 1 to 65535"
    return None
