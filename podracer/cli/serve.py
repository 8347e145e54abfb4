"""The command that listens until Ctrl-C: `podracer watch`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro

from podracer.cli.arguments import Port
from podracer.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """Serve a live page about runs, a sweep or a tournament, until Ctrl-C."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Directory of a run, a sweep or a tournament, or one that holds runs, even future ones."""
    pattern: Annotated[str, tyro.conf.arg(name="only", metavar="GLOB")] = "*"
    """Names of the runs to show, such as "cartpole-*"."""
    films: bool = False
    """Whether the page has a button for each run that films its newest policy, as `podracer play`
    does: whoever sees the page can then keep this machine busy."""
    port: Port = 7007
    """Port of the page, up to 65,535; 0 takes any that is free."""
    host: str = "127.0.0.1"
    """Address to listen at. By default only this machine can open the page; at 0.0.0.0 everybody
    can who reaches the machine, without a password."""


def watch(options: WatchOptions) -> int:
    """Run `podracer watch`: serve a live page until Ctrl-C."""
    if not options.directory.is_dir():
        raise ConfigError(f"there is no directory {options.directory}.")
    from podracer.reports.watch.server import LiveServer
    from podracer.reports.watch.watcher import Watcher

    watcher = Watcher(options.directory, options.pattern, films=options.films)
    with _explained_address(options.host, options.port):
        server = LiveServer(watcher, options.host, options.port)
    with server, contextlib.closing(watcher), contextlib.suppress(KeyboardInterrupt):
        print(f"{server.address}  Ctrl-C ends it", flush=True)
        server.serve_forever()
    return 0


@contextlib.contextmanager
def _explained_address(host: str, port: int) -> Iterator[None]:
    """Raise `ConfigError` in place of the `OSError` of a server that cannot listen there."""
    if not host:  # it would listen at every address
        raise ConfigError("--host is empty: name an address, such as 127.0.0.1.")
    try:
        yield
    except OSError as error:
        is_of_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        flag = "--host" if is_of_host else "--port"
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error.strerror}; take another {flag}."
        ) from error
