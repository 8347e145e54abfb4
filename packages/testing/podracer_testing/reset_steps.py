"""Steps that only reset an environment count as nothing, whatever an agent learns and reports.

A device environment restarts in the step of a terminal. One of the host shows the terminal, and
then takes a step that only resets it; a lost episode leaves such steps in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.agent import Agent, Blueprint, Context
from podracer.replay import Buffer, Replay, Sample
from podracer.types import LearnerState, Step, TimeStep, Trajectory
from podracer_testing.walk import WALK

COLUMNS = 8
TAIL = 6  # common steps at the end, so that the last one that is learned is the same


def check_reset_steps(
    settings: Any,
    length: int,
    *,
    env: Any = WALK,
    data: Any = None,
    of_all_steps: tuple[str, ...] = (),
) -> None:
    """Assert that steps that only reset change no metric, no moment and no update of a rollout.

    Episodes have this length. `data` is the content of the settings' file. A loss that
    divides by all steps on purpose gives in `of_all_steps` parts of the names of metrics that may
    change, as updates do then.
    """
    agent = Blueprint(settings, env.spec, Context(8, data)).build()

    (state, expected), *twin_results = map(partial(_learn, agent), twins(length))
    for twin, metrics in twin_results:
        names = [x for x in metrics if not any(part in x for part in of_all_steps)]
        _close_metrics({x: metrics[x] for x in names}, {x: expected[x] for x in names})
        assert int(twin.shared.frames) == int(state.shared.frames) == 4 * length * COLUMNS
        if not of_all_steps:
            _close((twin.shared, twin.local), (state.shared, state.local))


def check_reset_steps_of_replay(
    settings: Any,
    length: int,
    *,
    env: Any = WALK,
    data: Any = None,
    fields: Callable[[int], dict[str, Any]] = lambda num_steps: {},
    scale: Callable[[Any], float] = lambda settings: 1.0,
    shows_terminal: bool = True,
) -> None:
    """Assert the same of an agent with a replay, from which it learns every sequence there is.

    `fields` of the number of a rollout's steps are set in the settings, so that a sequence covers
    them; `scale` of the settings multiplies the samples' weights, where a loss is a sum over a
    sequence. Without `shows_terminal` a terminal looks as the step after it.
    """
    replay = Replay(COLUMNS * 512, batch_size=COLUMNS, updates_per_rollout=2, warmup=0)

    def learned(timesteps: list[TimeStep]) -> tuple[LearnerState, dict[str, float]]:
        steps = len(timesteps) - 1
        full = dataclasses.replace(settings, replay=replay, **fields(steps))
        agent = Blueprint(full, env.spec, Context(steps, data)).build()
        with pytest.MonkeyPatch.context() as patch:
            sample = partialmethod(partial(every_sample, steps, scale(full)))
            patch.setattr(Buffer, "sample", sample)
            return _learn(agent, timesteps)

    (state, expected), *twin_results = map(learned, twins(length, TAIL, shows_terminal))
    for twin, metrics in twin_results:
        _close_metrics(metrics, expected)
        frames = (4 * length + TAIL) * COLUMNS
        assert int(twin.shared.frames) == int(state.shared.frames) == frames
        _close(twin.shared, state.shared)


def _learn(agent: Agent, timesteps: list[TimeStep]) -> tuple[LearnerState, dict[str, float]]:
    state = agent.init(jax.random.key(0), COLUMNS)
    trajectory = trajectory_of(agent, agent.actor_params(state), timesteps)
    learn = jax.jit(agent.learn, static_argnums=3)
    state, metrics = learn(state, trajectory, jax.random.key(2), None)
    return state, {name: float(metric) for name, metric in metrics.items()}


def _close_metrics(got: dict[str, float], expected: dict[str, float]) -> None:
    assert got == pytest.approx(expected, rel=2e-4, abs=1e-5)


def _close(got: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-3, 2e-5), got, expected)


def timestep(
    rng: np.random.Generator, reward: Any, discount: float, first: bool, last: bool
) -> TimeStep:
    """Return one timestep of all columns with a random observation."""
    shape = (COLUMNS,)
    make: Any = TimeStep  # with NumPy's arrays
    return make(
        rng.normal(size=(COLUMNS, 2)).astype(np.float32),
        np.where(first, 0.0, reward * np.ones(shape)).astype(np.float32),
        np.full(shape, discount, np.float32),
        np.full(shape, first),
        np.full(shape, last),
    )


def twins(length: int, tail: int = 0, shows_terminal: bool = True) -> tuple[list[TimeStep], ...]:
    """Return the timesteps of one stream: as a device shows it, as a host does, and with lost rows.

    There are four episodes, the third of which ends by a time-out, and the first `tail` steps of a
    fifth. Values of steps that do not count are different in each, and so are the observations of
    terminals, unless `shows_terminal` is False.
    """
    rng, hidden_rng = np.random.default_rng(length), np.random.default_rng(100 + length)
    first = timestep(rng, 0.0, 1.0, True, False)
    device, host, losing = streams = [first], [first], [first]

    def in_all(*steps: TimeStep) -> None:
        for stream in streams:
            stream.extend(steps)

    for episode in range(5):
        for time in range(1, (tail if episode == 4 else length) + 1):
            ends = time == length and episode < 4
            step = timestep(rng, rng.normal(size=COLUMNS), 1.0 - ends, ends, False)
            step = dataclasses.replace(step, reward=rng.normal(size=COLUMNS).astype(np.float32))
            if not ends:
                in_all(step)
                continue
            if episode == 2:
                timeout = timestep(rng, 0.0, 1.0, False, True)
                timeout = dataclasses.replace(timeout, reward=step.reward)
                in_all(timeout, timestep(rng, 0.0, 1.0, True, False))
                continue
            device.append(step)
            terminal = timestep(hidden_rng, 0.0, 0.0, False, True)
            terminal = dataclasses.replace(terminal, reward=step.reward)
            if not shows_terminal:
                terminal = dataclasses.replace(terminal, observation=step.observation)
            restart = dataclasses.replace(
                step, reward=np.zeros(COLUMNS, np.float32), discount=np.ones(COLUMNS, np.float32)
            )
            cut = timestep(hidden_rng, 0.0, 1.0, True, True)
            host += [terminal, restart]
            losing += [terminal, cut, cut, restart]
    return streams


def trajectory_of(agent: Agent, params: Any, timesteps: list[TimeStep]) -> Trajectory:
    """Return a rollout in which the agent acts by one key for each transition."""
    carry, steps, number = agent.carry(COLUMNS), [], 0
    start, act = carry, jax.jit(agent.act, static_argnums=4)
    timesteps = jax.tree.map(jnp.asarray, timesteps)
    for step in timesteps[:-1]:
        seed = number if not step.last[0] else 10_000 + len(steps)
        number += not step.last[0]
        keys = jax.random.split(jax.random.key(seed), COLUMNS)
        action, extras, carry = act(params, carry, step, keys, True)
        steps.append(Step(step, action, extras))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *steps)
    return Trajectory(stacked, timesteps[-1], start, carry)


def every_sample(num_steps: int, scale: float, buffer: Buffer, state: Any, *_: Any) -> Sample:
    """Return all samples of a replay, those that begin with a transition first."""
    num_starts = (num_steps - buffer.length) // buffer.stride + 1
    starts, rows = jnp.indices((num_starts, COLUMNS)).reshape(2, -1)
    trajectory = buffer.trajectory_at(state, rows, starts)
    order = jnp.argsort(~trajectory.valid()[0], stable=True)
    final, carry = jax.tree.map(lambda x: x[order], (trajectory.final, trajectory.carry))
    steps = jax.tree.map(lambda x: x[:, order], trajectory.steps)
    trajectory = Trajectory(steps, final, carry, ())
    weights = scale / (1.0 + jnp.arange(order.size))
    return Sample(trajectory, weights, rows[order], starts[order])
