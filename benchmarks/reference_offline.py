"""Runs of d3rlpy (tested with 2.8.1) and imitation (1.0.1) for `offline.py`, on its data sets.

Networks, batch sizes, learning rates, the optimizer's epsilon and the number of updates are those
of podracer's agents, all transitions are equally likely in a batch, and every seed plays as many
greedy episodes. What the libraries do not have stays different: d3rlpy clones continuous actions by
their squared error and squashes the mean of IQL's policy by a tanh; imitation clips no gradients.
Torch has one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from foreign import NAMES, versions_of

Policy = Callable[[np.ndarray], np.ndarray]
Arrays = dict[str, np.ndarray]


def d3rlpy(method: str, data: Arrays, env: gymnasium.Env, settings: Any, seed: int) -> Policy:
    """Return the greedy policy of an agent of d3rlpy."""
    import d3rlpy
    from d3rlpy import algos, models, optimizers, preprocessing

    d3rlpy.seed(seed)
    optimizer = optimizers.AdamFactory(
        eps=settings["epsilon"], clip_grad_norm=settings["max_gradient_norm"]
    )
    encoder = models.VectorEncoderFactory(settings["hidden"], settings["activation"])
    shared = {"batch_size": settings["batch_size"]}
    if isinstance(env.action_space, gymnasium.spaces.Box):
        low, high = env.action_space.low, env.action_space.high
        shared["action_scaler"] = preprocessing.MinMaxActionScaler(low, high)
    if settings["normalize_observations"]:
        moments = data["observation"].mean(axis=0), data["observation"].std(axis=0)
        shared["observation_scaler"] = preprocessing.StandardObservationScaler(*moments)
    single = {
        "learning_rate": settings["learning_rate"],
        "optim_factory": optimizer,
        "encoder_factory": encoder,
    }
    parts = ("actor", "critic")
    double = {f"{part}_{name}": value for part in parts for name, value in single.items()}
    match method:
        case "cloning" if "action_scaler" in shared:
            config = algos.BCConfig(**shared, **single)
        case "cloning":
            config = algos.DiscreteBCConfig(**shared, **single, beta=0.0)
        case "DQN":
            config = algos.DoubleDQNConfig(
                **shared,
                **single,
                gamma=settings["discount"],
                target_update_interval=settings["target_update_period"],
            )
        case "IQL":
            config = algos.IQLConfig(
                **shared, **double, value_encoder_factory=encoder, gamma=settings["discount"]
            )
        case "TD3+BC":
            config = algos.TD3PlusBCConfig(**shared, **double, gamma=settings["discount"])
        case _:
            raise SystemExit(f"d3rlpy has no {method} here")
    agent, rng = config.create(), np.random.default_rng(seed)
    agent.build_with_env(env)
    columns = transitions(data)
    for _ in range(settings["updates"]):
        rows = rng.integers(len(data["reward"]), size=settings["batch_size"])
        batch = {name: column[rows] for name, column in columns.items()}
        agent.update(d3rlpy.dataset.TransitionMiniBatch(**batch, transitions=[]))
    return agent.predict


def transitions(data: Arrays) -> Arrays:
    """Return the columns of d3rlpy's batches, f32 `[N, ...]`; no agent reads the next actions."""
    size = len(data["reward"])
    following = np.roll(data["observation"], -1, axis=0)
    if data["timeout"].any():
        following[data["timeout"]] = data["final_observation"]
    columns = {
        "observations": data["observation"],
        "actions": data["action"].reshape(size, -1),
        "rewards": data["reward"][:, None],
        "next_observations": following,
        "next_actions": data["action"].reshape(size, -1),
        "terminals": data["terminal"][:, None],
        "intervals": np.ones((size, 1)),
    }
    return {name: column.astype(np.float32) for name, column in columns.items()}


def imitation(method: str, data: Arrays, env: gymnasium.Env, settings: Any, seed: int) -> Policy:
    """Return the greedy policy of imitation's behavior cloning, whose network is SB3's."""
    from imitation.algorithms.bc import BC
    from imitation.data.types import Transitions
    from stable_baselines3.common.policies import ActorCriticPolicy
    from stable_baselines3.common.utils import set_random_seed

    if method != "cloning":
        raise SystemExit(f"imitation has no {method}")
    set_random_seed(seed)
    rate, spaces = settings["learning_rate"], (env.observation_space, env.action_space)
    policy = ActorCriticPolicy(
        *spaces,
        lambda _: rate,
        net_arch=settings["hidden"],
        activation_fn={"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[settings["activation"]],
    )
    learner = BC(
        observation_space=spaces[0],
        action_space=spaces[1],
        rng=np.random.default_rng(seed),
        policy=policy,
        demonstrations=Transitions(
            data["observation"],
            data["action"],
            np.array([{}] * len(data["action"])),
            data["observation"],  # of the next timestep, unused
            data["terminal"],
        ),
        batch_size=settings["batch_size"],
        optimizer_kwargs={"lr": rate, "eps": settings["epsilon"]},
        ent_weight=0.0,
    )
    learner.train(n_batches=settings["updates"], log_interval=10**9, progress_bar=False)
    return lambda observations: policy.predict(observations, deterministic=True)[0]


def evaluate(act: Policy, make: Callable[[], gymnasium.Env], episodes: int, seed: int) -> float:
    """Return the mean return of whole episodes, each in an environment of its own."""
    envs = [make() for _ in range(episodes)]
    observations = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(envs)])
    returns, playing = np.zeros(episodes), np.arange(episodes)
    while len(playing):
        steps = [envs[i].step(x) for i, x in zip(playing, act(observations), strict=True)]
        returns[playing] += [reward for _, reward, *_ in steps]
        goes_on = np.array([not (terminal or cut) for *_, terminal, cut, _ in steps])
        playing = playing[goes_on]
        if len(playing):
            observations = np.stack([x for x, *_ in steps])[goes_on]
    return float(returns.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=["d3rlpy", "imitation"], required=True)
    parser.add_argument("--environment", required=True, help="podracer's name of it")
    parser.add_argument("--data", required=True, help="the .npz file")
    parser.add_argument("--method", required=True)
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON")
    parser.add_argument("--episodes", type=int, required=True, help="of an evaluation")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    options = parser.parse_args()
    folder = Path(__file__).parent  # its `imitation.py` hides the library
    sys.path = [path for path in sys.path if Path(path).resolve() != folder.resolve()]
    torch.set_num_threads(1)
    name = options.environment.removeprefix("gymnasium:")
    make = partial(gymnasium.make, NAMES.get(name, name))
    learn = {"d3rlpy": d3rlpy, "imitation": imitation}[options.library]
    versions = versions_of(options.library, "torch", "gymnasium", "numpy")
    with np.load(options.data) as file:
        data = dict(file)
    for seed in options.seeds:
        start = time.process_time()
        act = learn(options.method, data, make(), options.settings, seed)
        row = {"seed": seed, "return": evaluate(act, make, options.episodes, 1000 * (seed + 1))}
        row |= {"cpu_seconds": time.process_time() - start, "versions": versions}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
