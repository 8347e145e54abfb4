"""IMPALA: importance ratios."""

from __future__ import annotations

import pytest
from on_policy import (
    learner,
)
from walk import (
    begin,
    built,
    close,
    learn,
)


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_the_importance_ratio_is_one_on_policy(memory):
    agent = built(learner("impala", memory))
    state, trajectory = begin(agent)
    close(learn(agent, state, trajectory)[1]["importance_ratio"], 1.0)
