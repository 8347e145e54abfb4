"""The command that listens until Ctrl-C: `podracer serve`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
from collections.abc import Iterator
from pathlib import Path

from podracer.cli.arguments import Port, RunPath
from podracer.cli.run_options import CheckpointOptions, PolicyName
from podracer.errors import ConfigError, install_command


@dataclasses.dataclass(frozen=True)
class ServeOptions(CheckpointOptions):
    """Answer observations with actions over HTTP, until Ctrl-C."""

    run: RunPath
    """Directory of the run, or its address in a store, or directory of models that `podracer
    promote` made: then of the current one, also after it was replaced."""
    policy: PolicyName | None = None
    """Policy that acts: `greedy` or `sampled`. By default that of the run's evaluations."""
    port: Port = 8000
    """Port to listen at, up to 65,535; 0 takes any that is free."""
    host: str = "127.0.0.1"
    """Address to listen at. By default only programs of this machine can ask; at 0.0.0.0 everybody
    can who reaches the machine, without a password."""


def serve(options: ServeOptions) -> int:
    """Run `podracer serve`: answer observations with actions until Ctrl-C."""

    try:
        from podracer.serve import server
    except ImportError as error:
        raise ConfigError(
            f"serving needs the package {error.name}: {install_command('serve')}."
        ) from error
    from podracer.devices.startup import use_compilation_cache
    from podracer.io.address import url_of
    from podracer.serve.service import Model, Service, load_model

    def load(directory: Path) -> Model:
        experiment = options.reopen(directory)
        return load_model(directory, experiment, options.policy, options.checkpoint, options.pod)

    use_compilation_cache()
    with _explained_address(options.host, options.port):
        listener = server.listen(options.host, options.port)
    with listener, contextlib.suppress(KeyboardInterrupt):
        service = Service(options.run, load)
        address = url_of(options.host, listener.getsockname()[1])
        print(f"{address}/act answers with {service.model.name}.  Ctrl-C ends it", flush=True)
        with service.following():
            server.make_server(service, options.host).run(sockets=[listener])
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
