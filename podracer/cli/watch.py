"""The command `podracer watch`."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from podracer.cli.arguments import Port, explained_address
from podracer.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """Serve a live page about runs, a sweep or a tournament, until Ctrl-C."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Directory of a run, a sweep or a tournament, or one that holds runs, even future ones."""
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

    with explained_address(options.host, options.port):
        server = LiveServer(Watcher(options.directory), options.host, options.port)
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"{server.address}  Ctrl-C ends it", flush=True)
        server.serve_forever()
    return 0
