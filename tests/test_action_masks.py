"""A mask that allows no action is found by both drivers: no forbidden action trains silently."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from podracer.agents.a2c import A2C
from podracer.drivers.common import Fault, _fault_bits, to_progress
from podracer.drivers.sebulba.validator import TimestepValidator
from podracer.types import (
    ACTION_MASK,
    ArraySpec,
    Discrete,
    EnvironmentFault,
    EnvironmentSpec,
    LearnerState,
    Step,
    TimeStep,
    Trajectory,
)

OBSERVATION = {"x": ArraySpec((2,)), ACTION_MASK: ArraySpec((3,), np.bool_)}
SPEC = EnvironmentSpec("masked", OBSERVATION, Discrete(3))


def timestep(*masks, last=None):
    """Timesteps `[B]` with these masks, rows of a truth table."""
    mask = np.array(masks, bool)
    n = len(mask)
    false = np.zeros(n, bool)
    observation = {"x": np.zeros((n, 2), np.float32), ACTION_MASK: mask}
    ones = np.ones(n, np.float32)
    return TimeStep(observation, ones, ones, false, false if last is None else np.array(last))


@pytest.mark.parametrize(
    ("mask", "last", "fault"),
    [
        ([0, 1, 0], False, Fault(0)),
        ([0, 0, 0], False, Fault.ACTION_MASK),
        ([0, 0, 0], True, Fault(0)),  # the action is ignored there
    ],
)
def test_an_update_that_chose_among_no_actions_is_a_fault(mask, last, fault):
    first = timestep([1, 1, 1], mask, last=[False, last])
    final = dataclasses.replace(timestep([1, 1, 1], [1, 1, 1]), first=np.array([False, last]))
    steps = Step(TimeStep(**{k: _lead(v) for k, v in vars(first).items()}), jnp.zeros((1, 2)), ())
    agent = A2C(spec=SPEC)
    bits = _fault_bits(agent, Trajectory(steps, final, (), ()), LearnerState(()), {}, None)
    assert Fault(int(bits)) == fault


def _lead(tree):
    if isinstance(tree, dict):
        return {key: leaf[None] for key, leaf in tree.items()}
    return tree[None]


def test_that_fault_ends_the_run_in_one_sentence():
    with pytest.raises(EnvironmentFault, match="update 8: an action mask was all False") as fault:
        to_progress(10, {"fault": [Fault.ACTION_MASK, 7]})
    assert fault.value.exit_code == 72


@pytest.mark.figure(8)
def test_a_row_of_the_host_without_actions_is_counted_and_does_not_train():
    validator = TimestepValidator(SPEC, 3)
    masks = [1, 1, 1], [0, 0, 0], [0, 0, 0]
    shown = validator.validate(timestep(*masks, last=[False, False, True]))
    assert shown.first.tolist() == [False, True, False]
    assert shown.last.tolist() == [False, True, True]
    assert validator.faults == {"no_action": 1}
    validator.validate(timestep(*masks, last=[False, False, True]))
    assert validator.faults == {"no_action": 1}  # until the row begins a new episode
