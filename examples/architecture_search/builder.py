"""An environment whose episode builds a network, and whose reward is the network's score.

An action chooses the next layer. After the last one the network is trained for a moment on a
regression task with tabular data, and the reward is its R² on data that it has not seen. Everything
is NumPy on one core, so larger networks take longer, as they do in earnest.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import time
from typing import Any

import gymnasium
import numpy as np

LAYERS = 5
CHOICES = ((0, ""), *((n, f) for n in (4, 8, 16, 32, 64) for f in ("relu", "tanh")))  # 0: none
ROWS, STEPS, RATE = 256, 40, 0.01

Layer = tuple[int, str]


def friedman(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs `[2 ROWS, 10]` and standardized targets of Friedman's first problem.

    Half of the inputs tell nothing. Source: Friedman 1991, "Multivariate Adaptive Regression
    Splines", section 4.3.
    """
    x = rng.random((2 * ROWS, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y += 10 * x[:, 3] + 5 * x[:, 4] + rng.normal(size=2 * ROWS)
    return 2 * x - 1, (y - y.mean()) / y.std()


def score(layers: list[Layer], rng: np.random.Generator) -> float:
    """Train a network with full batches and Adam; return its R² on the other half of the data."""
    x, y = friedman(np.random.default_rng(0))
    sizes = [x.shape[1], *(units for units, _ in layers), 1]
    names = [*(name for _, name in layers), ""]
    shapes = [(n + 1, m) for n, m in itertools.pairwise(sizes)]  # the last row is the bias
    weights = [rng.normal(size=shape) / np.sqrt(shape[0]) for shape in shapes]
    moments = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
    for step in range(1, STEPS + 1):
        inputs, output = forward(weights, names, x[:ROWS])
        slope = 2 * (output - y[:ROWS, None]) / ROWS
        for i in reversed(range(len(weights))):
            gradient = inputs[i].T @ slope
            if i:  # of the layer before, by its outputs
                hidden = inputs[i][:, :-1]
                slope = slope @ weights[i][:-1].T
                slope *= hidden > 0 if names[i - 1] == "relu" else 1 - hidden**2
            first, second = moments[i]
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient**2 - second)
            scale = np.sqrt(second / (1 - 0.999**step)) + 1e-8
            weights[i] -= RATE * first / (1 - 0.9**step) / scale
    error = forward(weights, names, x[ROWS:])[1][:, 0] - y[ROWS:]
    return float(1 - np.mean(error**2) / np.var(y[ROWS:]))


def forward(
    weights: list[np.ndarray], names: list[str], x: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the inputs of each layer, with a column of ones, and the outputs of the last one."""
    inputs = []
    for weight, name in zip(weights, names, strict=True):
        inputs.append(np.concatenate([x, np.ones((len(x), 1))], axis=1))
        x = inputs[-1] @ weight
        x = np.maximum(x, 0) if name == "relu" else np.tanh(x) if name == "tanh" else x
    return inputs, x


class Builder(gymnasium.Env):
    """Observation: f32, one-hot choices so far. Actions: `CHOICES`. Reward: R², at least -1.

    Every network that was trained is a line of the file `log`, from all processes together.
    """

    def __init__(self, log: str = os.devnull):
        self.observation_space = gymnasium.spaces.Box(0, 1, (LAYERS * len(CHOICES),), np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(CHOICES))
        self._log = log
        self._choices: list[int] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._choices = []
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._choices.append(int(action))
        is_complete = len(self._choices) == LAYERS
        reward = max(self._train(), -1.0) if is_complete else 0.0
        return self._observation(), reward, is_complete, False, {}

    def _observation(self) -> np.ndarray:
        observation = np.zeros((LAYERS, len(CHOICES)), np.float32)
        observation[range(len(self._choices)), self._choices] = 1
        return observation.reshape(-1)

    def _train(self) -> float:
        layers = [CHOICES[i] for i in self._choices if CHOICES[i][0]]
        start = time.time()
        value = score(layers, self.np_random)
        record = {"start": start, "end": time.time(), "score": value, "layers": layers}
        with open(self._log, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps({**record, "process": os.getpid()}) + "\n")
        return value
