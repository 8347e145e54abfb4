"""Decisions as a web page, in which the policy plays: the nodes of its ONNX file as JSON."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import numpy as np

from podracer.errors import ConfigError
from podracer.export.decision import Decision
from podracer.export.proof import Runner, draw_timesteps
from podracer.types import EnvironmentSpec

ENVIRONMENTS = ("catch", "cartpole", "pendulum", "gymnax:Breakout-MinAtar")
NUM_EXAMPLES = 20  # the page compares its own actions on these


def check_page(environment: Any, sampled: bool) -> None:
    """Raise `ConfigError` where there is no page for an environment or a policy."""
    if environment not in ENVIRONMENTS:
        name = environment if isinstance(environment, str) else type(environment).__name__
        raise ConfigError(f"a page can play {', '.join(ENVIRONMENTS)}, but not {name}.")
    if sampled:
        raise ConfigError("a page plays with the greedy policy only.")


def to_html(
    model: bytes,
    decision: Decision,
    runner: Runner,
    spec: EnvironmentSpec,
    metadata: Mapping[str, Any],
) -> bytes:
    """Return a page without outside resources that runs an ONNX file in its environment.

    It compares itself with `runner` on 20 examples when it is opened. Raises `ConfigError` for an
    operator that the page does not have.
    """
    import onnx

    graph = onnx.load_from_string(model).graph
    page = files("podracer.export").joinpath("page.html").read_text(encoding="utf-8")
    operators = re.findall(r"^  (\w+):", page.split("const OPERATORS")[1].split("\n};")[0], re.M)
    if unknown := sorted({node.op_type for node in graph.node} - set(operators)):
        raise ConfigError(f"a page cannot compute {', '.join(unknown)}: take `format=onnx`.")
    content = {
        "about": metadata,
        "environment": spec.name,
        "nodes": [
            [
                node.op_type,
                list(node.input),
                list(node.output),
                {x.name: onnx.helper.get_attribute_value(x) for x in node.attribute},
            ]
            for node in graph.node
        ],
        "constants": {x.name: _encode(onnx.numpy_helper.to_array(x)) for x in graph.initializer},
        "examples": _examples(decision, runner, spec),
    }
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("@POLICY@", text).encode()


def _encode(array: np.ndarray) -> list[Any]:
    return [str(array.dtype), list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _examples(decision: Decision, runner: Runner, spec: EnvironmentSpec) -> list[dict[str, Any]]:
    """Return observations at the beginning of an episode, and the actions of the file."""
    timesteps = draw_timesteps(spec, np.random.default_rng(0))
    examples = []
    for observation in np.asarray(timesteps.observation)[0, :NUM_EXAMPLES]:
        inputs = {
            "observation": observation,
            "first": np.array(True),
            "reward": np.float32(0),
            **decision.initial_memory,
        }
        arrays = {name: np.asarray(inputs[name])[None] for name in decision.inputs}
        examples.append(
            {
                "inputs": {"observation": observation.tolist(), "first": True, "reward": 0},
                "action": runner(arrays)["action"][0].tolist(),
            }
        )
    return examples
