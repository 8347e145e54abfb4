"""Update rules as files: exactly what was written comes back, or nothing does."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from variants import variants

from podracer.agents.rules.lpg.rule import UpdateRule
from podracer.agents.rules.lpg.rule_file import decode_rule, encode_rule
from podracer.errors import ConfigError

RULE = UpdateRule(units=5, embedding=3, predictions=4)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "rule.npz"
    path.write_bytes(encode_rule(RULE, RULE.init(jax.random.key(0)), {"environment": "somewhere"}))
    return path


def read_rule(path: Path) -> Any:
    return decode_rule(path.read_bytes(), str(path))


def test_a_rule_comes_back_to_the_bit(saved: Path) -> None:
    rule, params = read_rule(saved)
    assert rule == RULE
    written = RULE.init(jax.random.key(0))
    assert jax.tree.structure(params) == jax.tree.structure(written)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(written), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)


def _with(path: Path, name: str, array: np.ndarray | None) -> Path:
    """The file with one of its arrays replaced, or left out."""
    with np.load(path) as old:
        arrays = {k: old[k] for k in old.files if k != name}
    if array is not None:
        arrays[name] = array
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("array", [None, np.zeros((1, 6), np.float32), np.zeros((1, 5))])
def test_arrays_must_be_those_of_the_schema(saved: Path, array: np.ndarray | None) -> None:
    with pytest.raises(ConfigError, match="is not an update rule"):
        read_rule(_with(saved, "policy.weight", array))


@pytest.mark.figure(16)
def test_objects_are_not_unpickled(saved: Path) -> None:
    with pytest.raises(ConfigError, match="is not an update rule"):
        read_rule(_with(saved, "policy.weight", np.array([[print] * 5], dtype=object)))


@variants("stride", [4], [1])
def test_damage_is_noticed_wherever_it_is(stride: int, saved: Path) -> None:
    """Any bit of the file: it is refused in one sentence, or nothing of the rule is touched (a
    date, or what pads the archive)."""
    good = saved.read_bytes()
    written = jax.tree.leaves(RULE.init(jax.random.key(0)))
    rng = np.random.default_rng(0)
    # Of the first entry and of the directory at the end every byte: flags, methods, lengths.
    places = [*range(200), *rng.choice(len(good), 100), *range(len(good) - 300, len(good))]
    refused = 0
    for at in places[::stride]:
        flipped = bytearray(good)
        flipped[at] ^= 1 << int(rng.integers(8))
        saved.write_bytes(flipped)
        try:
            _, params = read_rule(saved)
        except ConfigError:
            refused += 1
            continue
        assert all(map(np.array_equal, jax.tree.leaves(params), written))
    assert refused > 200 / stride


def test_a_file_that_would_not_fit_is_not_unpacked(tmp_path: Path) -> None:
    """An entry of a few bytes whose header promises terabytes."""
    path, entry = tmp_path / "rule.npz", io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": (10**14,)}
    np.lib.format.write_array_header_1_0(entry, header)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("schema.npy", entry.getvalue())
    with pytest.raises(ConfigError, match="schema is uint8"):
        read_rule(path)
