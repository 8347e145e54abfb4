"""Rules of DiscoRL's structure with random weights, and rollouts, both from seeds of NumPy.

`golden/disco_reference.py` gives them to the published code, the tests to ours.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from podracer.agents.rules.disco.rule_file import layer_shapes, stored_shape

T, B, A, OBSERVATION = 5, 2, 3, 3
UPDATES = 3
BINS, MAX_VALUE, MODEL_SIZE = 11, 3.0, 4
LEARNING_RATE = 1e-2
SIZES = {"predictions": 5, "units": 6, "lifetime_units": 4}
PUBLISHED_SIZES = {"predictions": 600, "units": 256, "lifetime_units": 128}


def random_rule(seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
    """The arrays of a rule by their names in a file."""
    random = np.random.default_rng(seed)
    arrays = {}
    for name, shape in sorted(layer_shapes(**(SIZES | sizes)).items()):
        weight = random.normal(size=shape) / np.sqrt(shape[0])
        arrays[f"{name}/w"] = weight.astype(np.float32).reshape(stored_shape(name, shape))
        arrays[f"{name}/b"] = 0.1 * random.normal(size=shape[1:]).astype(np.float32)
    return arrays


def file_of(arrays: dict[str, np.ndarray]) -> bytes:
    """The content of a file with these arrays."""
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def student_shapes(predictions: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a student without a torso, by the layers' names in haiku."""
    heads = {"mlp": predictions, "mlp_1": A, "mlp_2": BINS}  # z, the next policy, q
    layers = {
        "~_head_pass/torso_head/~/linear_0": (OBSERVATION, A),
        "~_head_pass/torso_head_1/~/linear_0": (OBSERVATION, predictions),
        "linear": (OBSERVATION, MODEL_SIZE),
        "action_cond/linear": (A + MODEL_SIZE, 4 * MODEL_SIZE),
    }
    for name, size in heads.items():
        layers[f"{name}/~/linear_0"] = (MODEL_SIZE, MODEL_SIZE)
        layers[f"{name}/~/linear_1"] = (MODEL_SIZE, size)
    return layers


def random_student(predictions: int) -> dict[str, dict[str, np.ndarray]]:
    """Parameters of such a student, by layer."""
    random = np.random.default_rng(1)
    return {
        name: {
            "w": (random.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32),
            "b": 0.1 * random.normal(size=shape[1:]).astype(np.float32),
        }
        for name, shape in student_shapes(predictions).items()
    }


def random_rollout(seed: int) -> dict[str, Any]:
    """T transitions between T+1 timesteps, some of which end an episode."""
    random = np.random.default_rng(100 + seed)
    return {
        "observation": random.normal(size=(T + 1, B, OBSERVATION)).astype(np.float32),
        "action": random.integers(0, A, (T + 1, B)).astype(np.int32),
        "reward": (3.0 * random.normal(size=(T, B))).astype(np.float32),
        "terminal": random.random((T, B)) < 0.25,
        "behavior": random.normal(size=(T + 1, B, A)).astype(np.float32),
    }


def sample(array: Any) -> list[float]:
    """At most about 24 evenly spaced numbers of an array."""
    flat = np.asarray(array, np.float64).ravel()
    return [float(f"{x:.9g}") for x in flat[:: max(1, flat.size // 12)]]
