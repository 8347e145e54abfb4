"""Decisions as ONNX: a traced function becomes a graph, primitive by primitive.

It writes opset 18, for onnxruntime 1.14 and later. The leading axis B of inputs and outputs is
free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax.extend.core import ClosedJaxpr

from podracer.errors import ConfigError
from podracer.types import ArraySpec
from podracer_deploy.export.decision import Decision, needed_variables
from podracer_deploy.export.graph import Graph
from podracer_deploy.export.inline import refusal
from podracer_deploy.export.operators import OPERATORS

OPSET, IR_VERSION = 18, 8
_HALF = (jnp.bfloat16, jnp.float16)


def to_onnx(decision: Decision, metadata: Mapping[str, Any]) -> bytes:
    """Return a decision as the content of an ONNX file.

    Raises `ConfigError` for a policy whose computation ONNX cannot express, such as a search.
    """
    graph = graph_of(decision)
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            graph.nodes,
            "policy",
            [_value_info(name, spec) for name, spec in decision.inputs.items()],
            [_value_info(name, spec) for name, spec in decision.outputs.items()],
            list(graph.initializers.values()),
        ),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="podracer",
    )
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
    onnx.helper.set_model_props(model, texts)
    try:
        onnx.checker.check_model(model, full_check=True)
    except onnx.shape_inference.InferenceError as error:
        raise ConfigError(
            "ONNX has no operator for some of the numbers that this policy computes with "
            f"({error}): take `format=stablehlo`, which holds every policy."
        ) from error
    return model.SerializeToString()


def graph_of(decision: Decision) -> Graph:
    """Return the graph of a decision, whose inputs and outputs have the decision's names."""
    (batch,) = jax.export.symbolic_shape("B")
    function = jax.make_jaxpr(lambda x: decision(x, keys_as_words=True))(decision.structs(batch))
    graph = Graph(next(iter(decision.inputs)))
    for name, variable in zip(sorted(decision.inputs), function.jaxpr.invars, strict=True):
        is_word = variable.aval.dtype == np.uint32
        graph.names[variable] = graph.cast(name, np.int64) if is_word else name
    _write(graph, function)
    for name, variable in zip(sorted(decision.outputs), function.jaxpr.outvars, strict=True):
        is_word = variable.aval.dtype == np.uint32
        result = graph.read(variable)
        graph.add_named("Identity", graph.cast(result, np.uint32) if is_word else result, name)
    graph.remove_unneeded(decision.outputs)
    return graph


def _write(graph: Graph, function: ClosedJaxpr) -> None:
    """Add the nodes of a traced function whose inputs have names."""
    jaxpr: Any = function.jaxpr
    needed = needed_variables(jaxpr, jaxpr.outvars)
    for variable, constant in zip(jaxpr.constvars, function.consts, strict=True):
        if variable in needed:
            if jnp.issubdtype(variable.aval.dtype, jax.dtypes.prng_key):
                raise refusal("random keys")
            graph.names[variable] = graph.constant(np.asarray(constant))
    for equation in jaxpr.eqns:
        if needed.isdisjoint(equation.outvars):
            continue
        if any(x.aval.dtype in _HALF for x in equation.outvars):
            raise ConfigError(
                "onnxruntime computes with float32 on a CPU, but this network in 16 bits: take "
                "`format=stablehlo`."
            )
        operator = OPERATORS.get(equation.primitive.name)
        if operator is None:
            raise refusal(equation.primitive.name)
        results = operator(graph, equation, *[graph.read(x) for x in equation.invars])
        results = [results] if isinstance(results, str) else results
        graph.names |= zip(equation.outvars, results, strict=True)


def _value_info(name: str, spec: ArraySpec) -> Any:
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
    return onnx.helper.make_tensor_value_info(name, kind, ["B", *spec.shape])
