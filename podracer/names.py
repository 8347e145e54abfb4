"""Names of settings: suggestions for mistyped ones, and the marker of those without a flag."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NO_FLAG = "no flag"
"""Marker of a field that is no flag: `Annotated[tuple[Pod, ...], NO_FLAG]`."""

# Names of settings here, and in other libraries: the first one that the configuration has wins.
_NAMES_ELSEWHERE = {
    "learning_rate": "lr anneal_lr",
    "environment": "env env_id",
    "frames": "total_timesteps total_steps num_timesteps",
    "num_envs": "n_envs",
    "rollout_length": "n_steps num_steps train_freq train_frequency",
    "discount": "gamma",
    "trace_lambda": "gae_lambda",
    "entropy_cost": "ent_coef",
    "initial_temperature": "ent_coef autotune",
    "value_cost": "vf_coef",
    "clip_epsilon": "clip_range clip_coef clip_eps",
    "advantage_normalization": "norm_adv normalize_advantage",
    "max_gradient_norm": "max_grad_norm",
    "num_epochs": "n_epochs update_epochs",
    "num_minibatches": "batch_size",
    "updates_per_rollout": "gradient_steps",
    "capacity": "buffer_size",
    "warmup": "learning_starts",
    "target_update_rate": "tau polyak",
    "target_update_period": "tau target_update_interval target_network_frequency",
    "agent.epsilon": "exploration_fraction start_e end_e",
    "evaluations": "eval_freq",
    "hidden": "net_arch policy_kwargs",
}
OTHER_NAMES = {
    name: tuple(field for field, names in _NAMES_ELSEWHERE.items() if name in names.split())
    for name in " ".join(_NAMES_ELSEWHERE.values()).split()
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
