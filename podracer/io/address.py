"""Addresses at which the library's servers listen."""

from __future__ import annotations

import socket

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names by which a machine reaches itself alone."""


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an address: IPv6 if it has a colon, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def url_of(host: str, port: int) -> str:
    """Return the address for a browser, without a path."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
