"""Names of settings: suggestions for mistyped ones, and the marker of those without a flag."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NO_FLAG = "no flag"
"""Marker of a field that is no flag: `Annotated[tuple[Pod, ...], NO_FLAG]`."""

# Names of settings in other libraries, and here: the first one that the configuration has wins.
OTHER_NAMES = {
    "lr": ("learning_rate",),
    "env": ("environment",),
    "env_id": ("environment",),
    "total_timesteps": ("frames",),
    "total_steps": ("frames",),
    "num_timesteps": ("frames",),
    "n_envs": ("num_envs",),
    "n_steps": ("rollout_length",),
    "num_steps": ("rollout_length",),
    "gamma": ("discount",),
    "gae_lambda": ("trace_lambda",),
    "ent_coef": ("entropy_cost", "initial_temperature"),
    "vf_coef": ("value_cost",),
    "clip_range": ("clip_epsilon",),
    "clip_coef": ("clip_epsilon",),
    "max_grad_norm": ("max_gradient_norm",),
    "n_epochs": ("num_epochs",),
    "update_epochs": ("num_epochs",),
    "batch_size": ("num_minibatches",),
    "buffer_size": ("capacity",),
    "learning_starts": ("warmup",),
    "tau": ("target_update_rate", "target_update_period"),
    "net_arch": ("hidden",),
}


def nearest(name: str, candidates: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error message about an unknown `name`: the nearest known names.

    Where none is near it is `otherwise`, by default all names.
    """
    candidates = list(candidates)
    by_field = {candidate.replace("-", "_"): candidate for candidate in candidates}
    for own_name in OTHER_NAMES.get(name.replace("-", "_"), ()):
        if own_name in by_field:
            return f"did you mean {by_field[own_name]}?"
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    if name.lower() in by_lower:
        return f"did you mean {by_lower[name.lower()]}?"
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(by_lower[match] for match in close)}?"
    return otherwise or f"choose one of {', '.join(candidates)}."
