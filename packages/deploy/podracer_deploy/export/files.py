"""Policies as files: what each format writes and runs, and the proof before anything is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import onnxruntime

import podracer
from podracer.arguments import typed
from podracer.config.experiment import Experiment
from podracer.environment import Environment, HostEnvironments
from podracer.errors import ConfigError, PodracerError
from podracer.io.addresses import local_run, output_folder
from podracer.io.checkpoint import Choice
from podracer.io.paths import user_path
from podracer.io.run_directory import check_room, write_bytes
from podracer.io.seal import encode_json
from podracer.io.steps import identity_of
from podracer.io.text import redact
from podracer.run.loading import load_run, reopen
from podracer.run.resume import experiment_digest
from podracer.types import ArraySpec, Continuous, EnvironmentSpec
from podracer_deploy.export.decision import Arrays, Decision, make_decision
from podracer_deploy.export.onnx import OPSET, to_onnx
from podracer_deploy.export.proof import Proof, Runner, prove

Format = Literal["onnx", "stablehlo"]
PLATFORMS = ("cpu", "cuda", "tpu")  # where a StableHLO file runs
SUFFIXES: dict[str, str] = {"onnx": ".onnx", "stablehlo": ".stablehlo"}


@dataclasses.dataclass(frozen=True)
class Export:
    """A policy's file and what was proven of it."""

    path: Path
    """The file."""
    size: int
    """Bytes of the file."""
    inputs: dict[str, ArraySpec]
    """Inputs by name, each with a leading axis B."""
    outputs: dict[str, ArraySpec]
    """Outputs by name, each with a leading axis B."""
    metadata: dict[str, Any]
    """What the file says of itself."""
    proof: Proof
    """Comparison with the agent."""


@typed
def export_policy(
    run_dir: str | Path,
    file: str | Path | None = None,
    *,
    format: Format = "onnx",
    sampled: bool = False,
    recipe: Experiment | str | None = None,
    environment: str | Environment | HostEnvironments | None = None,
    pod: int | None = None,
    checkpoint: Choice = "newest",
) -> Export:
    """Write the policy of a run, at a checkpoint, as a file for programs without podracer.

    The file is `policy.onnx` or `policy.stablehlo` in the run, or `file`; beside a StableHLO file
    stands its `metadata` as JSON. `load_policy` explains the other arguments. Before it is written,
    the file is compared with the agent on 1,000 observations.

    Raises `ConfigError` as `load` does, and for a policy that the format cannot hold;
    `PodracerError` if the file decides otherwise than the agent.
    """
    if format not in SUFFIXES:
        raise ConfigError(f"the format must be onnx or stablehlo, but it is {format!r}.")
    directory = local_run(run_dir, checkpoint)
    name = f"policy{SUFFIXES[format]}"
    path = output_folder(directory) / name if file is None else user_path(file)
    if path.suffix.lower() != SUFFIXES[format]:
        raise ConfigError(f"{path.name} must end in {SUFFIXES[format]}.")
    if file is not None:
        check_room(path.parent)
    experiment = reopen(directory, recipe, environment)
    run = load_run(directory, recipe=experiment, pod=pod, checkpoint=checkpoint)
    env, learner = run.env, run.state.learner
    decision = make_decision(run.agent, learner, sampled=sampled)
    metadata = describe(decision, run.agent.spec)
    frames = run.metadata["totals"]["frames"] // max(1, len(experiment.pods))
    metadata |= origin_of(directory, experiment, int(run.state.update), frames, run.pod)
    is_jax = format == "stablehlo"
    data = to_stablehlo(decision) if is_jax else to_onnx(decision, metadata)
    runner = stablehlo_runner(data) if is_jax else onnx_runner(data)
    proof = prove(decision, runner, run.agent, env, learner)
    if not proof.holds:
        raise PodracerError(
            f"the file would decide otherwise than the agent: {proof.different_actions} of "
            f"{proof.observations:,} actions differ and numbers by up to "
            f"{proof.largest_difference:.1e}, so none was written."
        )
    write_bytes(path, data)
    if is_jax:
        write_bytes(path.with_name(f"{path.name}.json"), encode_json(metadata))
    return Export(path, len(data), decision.inputs, decision.outputs, metadata, proof)


def describe(decision: Decision, spec: EnvironmentSpec) -> dict[str, Any]:
    """Return what a user of the file must know, as plain JSON."""

    def arrays(specs: Mapping[str, ArraySpec]) -> dict[str, Any]:
        return {
            name: {"dtype": str(x.dtype), "shape": ["B", *x.shape]} for name, x in specs.items()
        }

    action = spec.action
    if isinstance(action, Continuous):
        actions = {"low": action.low, "high": action.high}
    else:
        start = {"start": action.start} if np.any(action.start) else {}
        actions = {"num_actions": action.num_actions, **start}
    return {
        "policy": "sampled" if decision.sampled else "greedy",
        "inputs": arrays(decision.inputs),
        "outputs": arrays(decision.outputs),
        "initial_memory": {name: x.tolist() for name, x in decision.initial_memory.items()},
        "actions": actions,
        "scaling": "Observations are the environment's, not normalized; actions are in its units.",
    }


def origin_of(
    directory: Path, experiment: Experiment, update: int, frames: int, pod: int | None
) -> dict[str, Any]:
    """Return where a policy came from, as plain JSON."""
    environment = experiment.environment
    origin = {
        "run": str((identity_of(directory) or {}).get("id", "")),
        "experiment": experiment_digest(experiment),
        "recipe": experiment.recipe,
        "agent": type(experiment.agent).__name__,
        "environment": environment if isinstance(environment, str) else type(environment).__name__,
        "updates": update,
        "frames": frames,
        **({} if pod is None else {"pod": pod}),
        "podracer": podracer.__version__,
        "jax": jax.__version__,
        "onnx_opset": OPSET,
        "platforms": PLATFORMS,
    }
    return redact(origin, stable=True)


def to_stablehlo(decision: Decision) -> bytes:
    """Return a decision as bytes for `jax.export.deserialize`, which holds for any batch size."""
    (batch,) = jax.export.symbolic_shape("B")
    exported = jax.export.export(jax.jit(decision), platforms=PLATFORMS)(decision.structs(batch))
    return bytes(exported.serialize())


def onnx_runner(data: bytes) -> Runner:
    """Return a function that runs an ONNX file on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(arrays: Arrays) -> dict[str, np.ndarray]:
        results: Any = session.run(names, dict(arrays))
        return dict(zip(names, results, strict=True))

    return run


def stablehlo_runner(data: bytes) -> Runner:
    """Return a function that runs a StableHLO file."""
    call: Callable[..., Any] = jax.jit(jax.export.deserialize(bytearray(data)).call)
    return lambda arrays: jax.device_get(call(dict(arrays)))
