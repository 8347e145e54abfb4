"""Addresses at which the server listens, and the names that requests call it by."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names by which a machine reaches itself alone."""

_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s\[\]:@/?#\\]+))(?::[0-9]{0,5})?", re.IGNORECASE)


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an address: IPv6 if it has a colon, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def url_of(host: str, port: int) -> str:
    """Return the address for a browser, without a path."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def host_in(authority: str) -> str | None:
    """Return the host of `HOST` or `HOST:PORT` in lower case; None for anything else."""
    match = _AUTHORITY.fullmatch(authority)
    return (match[1] or match[2]).lower() if match else None


def is_of_another_site(header: Callable[[str], str | None]) -> bool:
    """Return whether a browser says that a page of another site or port made a request.

    A link that its user followed is no such request: the other page cannot read what it opens.
    """
    purpose = (header("Sec-Fetch-Mode"), header("Sec-Fetch-Dest"))
    is_other = header("Sec-Fetch-Site") not in (None, "none", "same-origin")
    return is_other and purpose != ("navigate", "document")
