"""TD3 and FastTD3: delayed policy and targets, settings and losses of the papers."""

from __future__ import annotations

import jax
import numpy as np
from off_policy import (
    agent_and_env,
)
from walk import (
    begin,
    learn,
)


def test_td3_moves_policy_and_targets_every_second_time():
    agent, env = agent_and_env("td3")
    state, trajectory = begin(agent, env)
    moved = []
    for _ in range(4):
        new, _ = learn(agent, state, trajectory)
        before, after = (
            (shared.params.actor, shared.target_params, shared.params.critics)
            for shared in (state.shared, new.shared)
        )
        equal = jax.tree.map(np.array_equal, before, after)
        moved.append([not all(jax.tree.leaves(part)) for part in equal])
        state = new
    assert moved == [[False, False, True], [True, True, True]] * 2
