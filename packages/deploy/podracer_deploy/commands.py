"""The commands `podracer export` and `podracer serve`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from podracer.cli.arguments import parse
from podracer.cli.run_options import CheckpointOptions, PolicyName, output_file
from podracer.cli.values import Limits, RunPath
from podracer.errors import ConfigError
from podracer.io.addresses import output_folder
from podracer.io.text import print_json
from podracer_deploy.serve.address import family_of, url_of

if TYPE_CHECKING:
    from podracer_deploy.export.files import Export
    from podracer_deploy.serve.service import Model


@dataclasses.dataclass(frozen=True)
class ExportOptions(CheckpointOptions):
    """Flags of `podracer export`."""

    format: Literal["onnx", "stablehlo"] = "onnx"
    """Format: `onnx` for onnxruntime, `stablehlo` for JAX."""
    output: Path | None = None
    """Path of the file. By default policy.onnx or policy.stablehlo in the run."""
    policy: PolicyName = "greedy"
    """Policy that acts: `greedy`, or `sampled`, which takes random words as an input."""
    json: bool = False
    """Print one JSON object."""


def export(arguments: Sequence[str]) -> int:
    """Write the policy of a run as a file for programs without podracer."""
    options = parse(ExportOptions, "export", arguments, description=export.__doc__ or "")
    from podracer.devices.startup import use_compilation_cache
    from podracer_deploy.export.files import SUFFIXES, export_policy

    suffix = SUFFIXES[options.format]
    path = output_file(options.output, output_folder(options.run) / f"policy{suffix}", (suffix,))
    use_compilation_cache()
    experiment = options.reopen()
    result = export_policy(
        options.run,
        path,
        format=options.format,
        sampled=options.policy == "sampled",
        recipe=experiment,
        pod=options.pod,
        checkpoint=options.checkpoint,
    )
    if options.json:
        print_json(_figures(result))
    else:
        print("\n".join(_table(result)))
    return 0


def _figures(result: Export) -> dict[str, Any]:
    return {
        "file": str(result.path),
        "bytes": result.size,
        **result.metadata,
        **dataclasses.asdict(result.proof),
    }


def _table(result: Export) -> list[str]:
    proof = result.proof
    origin = "of its environment" if proof.source == "environment" else "drawn at random"
    rows = [
        ("file", str(result.path)),
        ("size", f"{result.size / 1000:,.0f} kB"),
        *_arrays("input", result.metadata["inputs"]),
        *_arrays("output", result.metadata["outputs"]),
        (
            "proof",
            f"{proof.observations:,} observations {origin}: {proof.different_actions} actions "
            f"differ, numbers by at most {proof.largest_difference:.1e}",
        ),
        ("time", f"{proof.microseconds:.0f} microseconds a decision (median of 1,000)"),
    ]
    return [f"{name:8} {text}" for name, text in rows]


def _arrays(kind: str, arrays: dict[str, Any]) -> list[tuple[str, str]]:
    width = max(map(len, arrays))
    return [
        (kind, f"{name:{width}}  {x['dtype']} [{', '.join(map(str, x['shape']))}]")
        for name, x in arrays.items()
    ]


@dataclasses.dataclass(frozen=True)
class ServeOptions(CheckpointOptions):
    """Flags of `podracer serve`."""

    run: RunPath
    """Directory of the run, or its address in a store, or directory of models with a record: then
    of the current one, also after it was replaced."""
    policy: PolicyName | None = None
    """Policy that acts: `greedy` or `sampled`. By default that of the run's evaluations."""
    port: Annotated[int, Limits(0, 65_535)] = 8000
    """Port to listen at, up to 65,535; 0 takes any that is free."""
    host: str = "127.0.0.1"
    """Address to listen at. By default only programs of this machine can ask; at 0.0.0.0 everybody
    can who reaches the machine, without a password."""


def serve(arguments: Sequence[str]) -> int:
    """Answer observations with actions over HTTP, until Ctrl-C."""
    options = parse(ServeOptions, "serve", arguments, description=serve.__doc__ or "")
    from podracer.devices.startup import use_compilation_cache
    from podracer_deploy.serve.server import make_server
    from podracer_deploy.serve.service import Service, load_model

    def load(directory: Path) -> Model:
        experiment = dataclasses.replace(options, run=directory).reopen()
        return load_model(directory, experiment, options.policy, options.checkpoint, options.pod)

    use_compilation_cache()
    with listen(options.host, options.port) as listener, contextlib.suppress(KeyboardInterrupt):
        service = Service(options.run, load)
        address = url_of(options.host, listener.getsockname()[1])
        print(f"{address}/act answers with {service.model.name}.  Ctrl-C ends it", flush=True)
        with service.following():
            make_server(service, options.host).run(sockets=[listener])
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes any that is free.

    Raises `ConfigError` for an address at which nothing can listen.
    """
    if not host:  # it would listen at every address
        raise ConfigError("--host is empty: name an address, such as 127.0.0.1.")
    try:
        return socket.create_server((host, port), family=family_of(host), backlog=2048)
    except OSError as error:
        flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        problem = str(error.strerror).partition(" (while")[0]
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {problem}; take another {flag}."
        ) from error
