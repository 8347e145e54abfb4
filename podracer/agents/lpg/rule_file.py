"""A learned update rule as a small file: an `.npz` of numbers with its schema, and no code."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podracer.agents.lpg.rule import UpdateRule
from podracer.types import ConfigError, Params

SCHEMA = "schema"
_VERSION = 1
_LIMIT = 64 * 2**20  # bytes of a schema or of an array
_DAMAGE = (OSError, EOFError, KeyError, TypeError, ValueError, RuntimeError)


def write_rule(path: Path, rule: UpdateRule, params: Params, about: dict[str, Any]) -> None:
    """Write the rule's parameters, f32, all or nothing. `about` says where it was learned."""
    schema = {"podracer_rule": _VERSION, "rule": dataclasses.asdict(rule), "about": about}
    arrays = {name: np.asarray(leaf) for name, leaf in _named(params).items()}
    encoded = np.frombuffer(json.dumps(schema, indent=1).encode(), np.uint8)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        np.savez(file, **{SCHEMA: encoded}, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_rule(path: str | Path) -> tuple[UpdateRule, Params]:
    """The shape and the parameters of a rule, exactly as they were written.

    Raises `ConfigError` for a file that is none, or is not whole.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no rule at {path}: write one with `podracer rule RUN`.")
    try:
        with zipfile.ZipFile(path) as archive:
            schema = json.loads(_array(archive, SCHEMA, None).tobytes())
            if schema["podracer_rule"] != _VERSION:
                raise ValueError(f"its version is {schema['podracer_rule']}, not {_VERSION}")
            rule = UpdateRule(**schema["rule"])
            if any(type(n) is not int or not 0 < n <= 2**16 for n in schema["rule"].values()):
                raise ValueError(f"no rule has the shape {rule}")
            like = jax.eval_shape(rule.init, jax.eval_shape(lambda: jax.random.key(0)))
            leaves = [_array(archive, name, leaf.shape) for name, leaf in _named(like).items()]
    except (*_DAMAGE, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{path} is no update rule: {error}.") from error
    return rule, jax.tree.unflatten(jax.tree.structure(like), leaves)


def _array(archive: zipfile.ZipFile, name: str, shape: tuple[int, ...] | None) -> np.ndarray:
    """An array of this shape, f32; without one the text of the schema. Headers are looked at before
    anything is read, and nothing is ever unpickled."""
    with archive.open(f"{name}.npy") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{name} is no array")
        found, _, kind = np.lib.format.read_array_header_1_0(file)
        wanted = np.dtype(np.uint8 if shape is None else np.float32)
        size = math.prod(found) * wanted.itemsize
        if kind != wanted or size > _LIMIT or (shape is not None and found != shape):
            raise ValueError(f"{name} is {kind}{list(found)}")
        return np.frombuffer(file.read(size), wanted).reshape(found)


def _named(params: Params) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
