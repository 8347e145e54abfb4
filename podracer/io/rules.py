"""A learned update rule as a small file: an `.npz` of numbers with its schema, and no code."""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podracer.agents.update_rule import Rule
from podracer.types import ConfigError, Params

SCHEMA = "schema"
_VERSION = 1
_LIMIT = 64 * 2**20  # bytes of a schema or of an array


def write_rule(path: Path, rule: Rule, params: Params, about: dict[str, Any]) -> None:
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


def read_rule(path: str | Path) -> tuple[Rule, Params]:
    """The shape and the parameters of a rule, exactly as they were written.

    Raises `ConfigError` for a file that is none, or is not whole.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no rule at {path}: write one with `podracer rule RUN`.")
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.file_size > _LIMIT for entry in archive.infolist()):
                raise ValueError("an array is too large to be a rule's")
        with np.load(path, allow_pickle=False) as arrays:
            schema = json.loads(arrays[SCHEMA].tobytes())
            if schema["podracer_rule"] != _VERSION:
                raise ValueError(f"its version is {schema['podracer_rule']}, not {_VERSION}")
            rule = Rule(**schema["rule"])
            like = jax.eval_shape(rule.init, jax.eval_shape(lambda: jax.random.key(0)))
            leaves = {name: arrays[name] for name in arrays.files if name != SCHEMA}
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is no update rule: {error}.") from error
    wanted = _named(like)
    if {k: (x.shape, x.dtype) for k, x in leaves.items()} != {
        k: (x.shape, x.dtype) for k, x in wanted.items()
    }:
        raise ConfigError(f"{path} is no update rule: its arrays are not those of {rule}.")
    return rule, jax.tree.unflatten(jax.tree.structure(like), [leaves[k] for k in wanted])


def _named(params: Params) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
