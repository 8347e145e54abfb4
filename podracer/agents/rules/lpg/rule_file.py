"""The file format of a learned update rule: an `.npz` archive of arrays and a schema, no code."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from podracer.agents.rules.lpg.rule import UpdateRule
from podracer.errors import ConfigError
from podracer.io.npz import DAMAGE, read_array
from podracer.types import Params

SCHEMA = "schema"
_VERSION = 1


def encode_rule(rule: UpdateRule, params: Params, origin: Mapping[str, Any]) -> bytes:
    """Return the content of a file with the rule's parameters, f32, and where it was learned."""
    schema = {"podracer_rule": _VERSION, "rule": dataclasses.asdict(rule), "about": dict(origin)}
    arrays = {name: np.asarray(leaf) for name, leaf in _named(params).items()}
    encoded = np.frombuffer(json.dumps(schema, indent=1).encode(), np.uint8)
    content = io.BytesIO()
    np.savez(content, **{SCHEMA: encoded}, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def decode_rule(content: bytes, name: str) -> tuple[UpdateRule, Params]:
    """Return the rule and its parameters, exactly as they were encoded.

    Raises `ConfigError`, which calls the file `name`, if the content is damaged or not a rule.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            schema = json.loads(read_array(archive, SCHEMA, np.uint8).tobytes())
            if schema["podracer_rule"] != _VERSION:
                raise ValueError(f"its version is {schema['podracer_rule']}, not {_VERSION}")
            rule = UpdateRule(**schema["rule"])
            if any(type(n) is not int or not 0 < n <= 2**16 for n in schema["rule"].values()):
                raise ValueError(f"no rule has the shape {rule}")
            shapes = jax.eval_shape(rule.init, jax.eval_shape(lambda: jax.random.key(0)))
            leaves = [
                read_array(archive, key, np.float32, leaf.shape)
                for key, leaf in _named(shapes).items()
            ]
    except DAMAGE as error:
        raise ConfigError(f"{name} is not an update rule: {error}.") from error
    return rule, jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _named(params: Params) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
