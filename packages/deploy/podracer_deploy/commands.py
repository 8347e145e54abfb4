"""The command `podracer export`: a policy as a file for other programs."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Literal

from podracer.cli.run_options import CheckpointOptions, OutputFile, PolicyName, output_file
from podracer.io.copies import output_folder

if TYPE_CHECKING:
    from podracer_deploy.export.files import Export


@dataclasses.dataclass(frozen=True)
class ExportOptions(CheckpointOptions):
    """Write the policy of a run as a file for programs without podracer."""

    format: Literal["onnx", "stablehlo"] = "onnx"
    """Format: `onnx` for onnxruntime, `stablehlo` for JAX."""
    output: OutputFile = None
    """Path of the file. By default policy.onnx or policy.stablehlo in the run."""
    policy: PolicyName = "greedy"
    """Policy that acts: `greedy`, or `sampled`, which takes random words as an input."""
    json: bool = False
    """Print one JSON object."""


def export(options: ExportOptions) -> int:
    """Run `podracer export`: write a policy's file once it is proven to decide as the agent."""
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
        print(json.dumps(_figures(result)))
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
