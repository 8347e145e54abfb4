"""What a DiscoRL student and its rule learn from."""

from __future__ import annotations

import jax

from podracer.types import PyTree, Trajectory, struct


@struct
class Experience:
    """T transitions of B environments between T+1 timesteps."""

    observation: PyTree  # [T+1, B, ...]
    action: jax.Array  # i32 [T, B]
    reward: jax.Array  # f32 [T, B], for that action
    discount: jax.Array  # f32 [T, B], 0 where the action ended the episode
    valid: jax.Array  # bool [T, B], False where a time-out ignored the action
    behavior: jax.Array  # logits of the policy that acted, f32 [T, B, A]


def to_experience(trajectory: Trajectory) -> Experience:
    """Return the transitions of a trajectory whose extras have the `policy` that acted."""
    next_timesteps = trajectory.next_timesteps()
    return Experience(
        observation=trajectory.timesteps().observation,
        action=trajectory.steps.action,
        reward=next_timesteps.reward,
        discount=next_timesteps.discount,
        valid=trajectory.valid(),
        behavior=trajectory.steps.extras["policy"],
    )
