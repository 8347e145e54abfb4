"""Robots of mjlab, all of whose worlds are simulated together by MuJoCo Warp.

Arrays stay on the simulator's device. Observations are dictionaries by group: `actor`, and `critic`
with what only a simulator measures. All worlds share one generator of random numbers, so results
depend on the number of worlds, and a resumed run begins new episodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from typing import Any

import numpy as np

from podracer.envs.common import check_known
from podracer.envs.host.atari import row_seeds
from podracer.types import ArraySpec, Continuous, EnvironmentSpec, TimeStep
from podracer_environments.suites import import_suite, refusing


def mjlab(task: str, *, device: str = "", seconds: float = 0.0, bound: float = 1.0) -> Mjlab:
    """Return a task of mjlab, such as `mjlab:Velocity-Flat-Unitree-Go1`.

    MuJoCo Warp simulates it on `device`, by default the first GPU of torch, or else the CPU.
    `seconds` is the length of an episode, by default the task's, and `bound` of actions in both
    directions, as mjlab has none. Evaluations take the task's form for play, without noise and
    pushes, and the same length. Raises `ConfigError` where mjlab is not
    installed, and for an unknown task.
    """
    registry = import_suite("mjlab.tasks", "mjlab").registry
    tasks = [name.removeprefix("Mjlab-") for name in registry.list_tasks()]
    name = task.removeprefix("Mjlab-")
    check_known(name, tasks, "mjlab has no task")
    return Mjlab(name, device, seconds, bound)


mjlab.on_host = True  # pyright: ignore[reportFunctionMemberAccess]


@dataclasses.dataclass(frozen=True)
class Mjlab:
    """One task of mjlab, as `HostEnvironments` whose arrays lie on the simulator's device."""

    task: str
    """Name of the task, without `Mjlab-`."""
    device: str = ""
    """Torch's name of a device, such as `cuda:1`; empty for the first GPU or else the CPU."""
    seconds: float = 0.0
    """Length of an episode; 0 for the task's own."""
    bound: float = 1.0
    """Bound of actions in both directions."""
    play: bool = False
    """Whether to take the task's form for play, without noise and pushes."""
    on_device = True

    @property
    def spec(self) -> EnvironmentSpec:
        return _spec(self)

    def for_evaluation(self) -> Mjlab:
        """Return the task's form for play, with episodes as long as in training."""
        return dataclasses.replace(self, play=True)

    def make(self, num_envs: int, num_threads: int) -> Worlds:
        """Make `num_envs` worlds."""
        return Worlds(self.simulator(num_envs))

    def simulator(self, num_envs: int) -> Any:
        """Return mjlab's environment, whose rows wait at their ends until they are reset."""
        registry, torch = (
            import_suite("mjlab.tasks.registry", "mjlab"),
            import_suite("torch", "mjlab"),
        )
        settings = registry.load_env_cfg(f"Mjlab-{self.task}", play=self.play)
        length = registry.load_env_cfg(f"Mjlab-{self.task}").episode_length_s
        settings.episode_length_s = self.seconds or length
        settings.scene.num_envs, settings.auto_reset = num_envs, False
        device = self.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
        make = import_suite("mjlab.envs", "mjlab").ManagerBasedRlEnv
        with contextlib.redirect_stdout(io.StringIO()):  # tables of all its managers
            return make(settings, device=device)


@functools.cache
def _spec(task: Mjlab) -> EnvironmentSpec:
    """Return the specification of a task, read off one world."""
    name = f"mjlab:{task.task}"
    with refusing(f"mjlab cannot make {name!r}", Exception):
        simulator = task.simulator(1)
    observation = {
        group: ArraySpec(tuple(box.shape))
        for group, box in simulator.single_observation_space.spaces.items()
    }
    size = simulator.action_manager.total_action_dim
    simulator.close()
    return EnvironmentSpec(
        name, observation, Continuous((-task.bound,) * size, (task.bound,) * size)
    )


class Worlds:
    """Worlds of an mjlab environment without automatic resets, as a `HostEnvironment`.

    A world that ended is reset in the next step, with all others stepping: its first observation
    comes one simulated step after the reset, with a zero action.
    """

    def __init__(self, simulator: Any) -> None:
        self._torch = import_suite("torch", "mjlab")
        self._simulator: Any = simulator
        self._ended: Any = None

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        """Begin an episode in every world."""
        (seed_of_first,) = row_seeds(seed, indices[:1], start)  # other rows are other batches'
        with contextlib.redirect_stdout(io.StringIO()):
            observation, _ = self._simulator.reset(seed=int(seed_of_first))
        zeros = self._torch.zeros(len(indices), device=self._simulator.device)
        self._ended = zeros > 0
        return TimeStep(dict(observation), zeros, zeros + 1, zeros == 0, self._ended)

    def step(self, action: Any) -> TimeStep:
        """Step all worlds, after a reset of those that ended, whose actions are ignored."""
        torch, begins = self._torch, self._ended
        action = torch.from_dlpack(action)
        if begins.any():
            self._simulator.reset(env_ids=begins.nonzero().squeeze(-1))
            action = torch.where(begins[:, None], 0.0, action)
        observation, reward, terminated, truncated, _ = self._simulator.step(action)
        self._ended = terminated | truncated
        if self._simulator.cfg.is_finite_horizon:
            terminated = self._ended
        return TimeStep(
            observation=dict(observation),
            reward=torch.where(begins, 0.0, reward),
            discount=1.0 - (terminated & ~begins).float(),
            first=begins,
            last=self._ended & ~begins,
        )

    def close(self) -> None:
        """Close the simulator, once."""
        if self._simulator is not None:
            self._simulator.close()
        self._simulator = None
