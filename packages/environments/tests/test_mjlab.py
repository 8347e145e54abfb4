"""Worlds of mjlab, by a simulator of our own with its methods, and by mjlab itself (slow)."""

from __future__ import annotations

import types
from typing import Any

import jax
import numpy as np
import pytest

import podracer
from podracer.drivers.sebulba import SebulbaConfig
from podracer_environments import mjlab
from podracer_environments.mjlab import Worlds

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `pip install torch`")


class Simulator:
    """Counts steps of each world: even ones fall after two steps, odd ones time out after four."""

    cfg = types.SimpleNamespace(is_finite_horizon=False)
    device = "cpu"

    def __init__(self, num_envs: int) -> None:
        self.worlds, self.actions = torch.arange(num_envs), []
        self.seeds: list[int] = []
        self.steps, self.is_open = torch.zeros(num_envs, dtype=torch.long), True

    def observation(self) -> dict[str, Any]:
        return {"actor": self.steps[:, None].float(), "critic": -self.steps[:, None].float()}

    def reset(self, seed: int | None = None, env_ids: Any = None) -> tuple[dict[str, Any], dict]:
        self.seeds += [] if seed is None else [seed]
        self.steps[slice(None) if env_ids is None else env_ids] = 0
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        self.actions.append(action.clone())
        self.steps += 1
        falls = (self.worlds % 2 == 0) & (self.steps == 2)
        return self.observation(), self.steps.float(), falls, self.steps == 4, {}

    def close(self) -> None:
        assert self.is_open
        self.is_open = False


def test_ends_show_their_final_observation_and_the_next_step_begins_again() -> None:
    simulator = Simulator(2)
    batch = Worlds(simulator)
    shown = [batch.reset(0, np.arange(2), 0)]
    shown += [batch.step(jax.numpy.full((2, 1), 0.5)) for _ in range(6)]
    rows = {
        name: np.stack([np.asarray(getattr(t, name)) for t in shown], axis=1).tolist()
        for name in ("reward", "discount", "first", "last")
    }
    observed = np.stack([t.observation["actor"][:, 0] for t in shown], axis=1).tolist()
    # World 0 falls at steps 2 and 5, and begins again in the steps after them; world 1 times out.
    assert observed[0] == [0, 1, 2, 1, 2, 1, 2]
    assert rows["reward"][0] == [0, 1, 2, 0, 2, 0, 2]
    assert rows["discount"][0] == [1, 1, 0, 1, 0, 1, 0]
    assert rows["last"][0] == [False, False, True, False, True, False, True]
    assert rows["first"][0] == [True, False, False, True, False, True, False]
    assert observed[1] == [0, 1, 2, 3, 4, 1, 2]
    assert rows["discount"][1] == [1] * 7
    assert rows["last"][1] == [False] * 4 + [True, False, False]
    assert rows["first"][1] == [True] + [False] * 4 + [True, False]
    assert simulator.actions[2][:, 0].tolist() == [0.0, 0.5]  # a world that begins gets no action
    batch.close()
    batch.close()
    assert not simulator.is_open


def test_batches_of_other_rows_and_starts_simulate_other_worlds() -> None:
    simulator = Simulator(2)
    batch = Worlds(simulator)
    for seed, first_row, start in ((0, 0, 0), (0, 2, 0), (1, 0, 0), (0, 0, 1), (0, 0, 0)):
        batch.reset(seed, np.arange(first_row, first_row + 2), start)
    assert len(set(simulator.seeds)) == 4
    assert simulator.seeds[0] == simulator.seeds[4]


def test_a_time_limit_of_a_finite_task_is_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulator, "cfg", types.SimpleNamespace(is_finite_horizon=True))
    batch = Worlds(Simulator(2))
    batch.reset(0, np.arange(2), 0)
    assert [float(batch.step(jax.numpy.zeros((2, 1))).discount[1]) for _ in range(4)] == [
        1,
        1,
        1,
        0,
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_the_cart_pole_of_mjlab_is_checked_and_trained_in(tmp_path: Any) -> None:
    pytest.importorskip("mjlab", reason="mjlab is not installed")
    torch.set_num_threads(1)
    env = mjlab.mjlab("Cartpole-Balance", device="cpu", seconds=2.0)
    report = podracer.check_environment(env)
    assert report.usable
    driver = SebulbaConfig(num_envs=64, rollout_length=32, updates_per_chunk=5, threads_per_actor=1)
    result = podracer.train(
        "mjlab_cartpole_ppo", environment=env, driver=driver, frames=20_000, evaluations=1,
        run_dir=tmp_path / "run", progress=False,
    )  # fmt: skip
    assert result.metrics["environment_faults"] == 0
    assert result.metrics["episode_length"] == pytest.approx(40, abs=1)
    assert 0 < result.metrics["episode_return"] < 2
