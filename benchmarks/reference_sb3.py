"""Runs of stable-baselines3 (tested with 2.9.2) and sbx (0.28.0) for `references.py`.

Environments are Gymnasium's, one after another in Python as their users have them, or podracer's.
The run is saved at each evaluation, with its replay, and continues from there; torch has one
thread.
"""

from __future__ import annotations

import functools
import importlib
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from foreign import Report, distinct_episodes, parse
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize


def environment(options: Any, seed: int, *, evaluation: bool = False) -> Any:
    """Return a batch of environments, normalized if the settings say so."""
    name, settings = options.environment, options.settings
    num_envs = 1 if evaluation else settings.get("n_envs", 1)
    if name.startswith("gymnasium:"):
        make = functools.partial(gymnasium.make, name.removeprefix("gymnasium:"))
        env = VecMonitor(DummyVecEnv([make] * num_envs))
        env.seed(seed)
    else:
        from reference_vecenv import DeviceVecEnv

        env = VecMonitor(DeviceVecEnv(name, num_envs, seed, evaluation=evaluation))
    return VecNormalize(env) if settings.get("normalize", False) else env


def create(options: Any, env: Any, seed: int) -> Any:
    """Return a new agent."""
    module = {"sb3": "stable_baselines3", "sbx": "sbx"}[options.library]
    own = ("normalize", "n_envs")
    settings = {name: value for name, value in options.settings.items() if name not in own}
    if "action_noise_std" in settings:
        size = env.action_space.shape[0]
        std = settings.pop("action_noise_std") * np.ones(size)
        settings["action_noise"] = NormalActionNoise(np.zeros(size), std)
    network = dict(settings.pop("policy_kwargs", {}))
    if "activation_fn" in network:
        network["activation_fn"] = getattr(torch.nn, network["activation_fn"])
    agent = getattr(importlib.import_module(module), options.agent.upper())
    return agent("MlpPolicy", env, seed=seed, policy_kwargs=network, **settings)


def evaluate(agent: Any, options: Any, seed: int) -> tuple[list[float], list[int]]:
    """Return returns and lengths of whole episodes, without normalized rewards."""
    normalizer = agent.get_vec_normalize_env()
    env = environment(options, seed, evaluation=True)
    if normalizer is not None:
        env.obs_rms, env.training, env.norm_reward = normalizer.obs_rms, False, False
    greedy = options.policy == "greedy"
    returns, lengths = evaluate_policy(
        agent, env, options.episodes, deterministic=greedy, return_episode_rewards=True
    )
    env.close()
    return returns, lengths


def train(options: Any, seed: int, folder: Path) -> dict[str, Any]:
    """Train one seed from its beginning or its last save; return its record."""
    env = environment(options, seed)
    agent = create(options, env, seed)
    state: dict[str, Any] = {"curve": [], "seconds": 0.0, "cpu_seconds": 0.0, "distinct": None}
    if (folder / "state.json").exists():
        state = json.loads((folder / "state.json").read_text())
        agent = load(agent, env, folder / state["save"])
    began, used = time.perf_counter(), time.process_time()
    for part in range(len(state["curve"]), options.evaluations):
        frames = options.frames * (part + 1) // options.evaluations
        agent.learn(frames - agent.num_timesteps, reset_num_timesteps=False)
        returns, lengths = evaluate(agent, options, seed + 1000 * (part + 1))
        state["curve"].append((agent.num_timesteps, float(np.mean(returns))))
        state["distinct"] = distinct_episodes(returns, lengths)
        print_progress(seed, state["curve"][-1])
        state["seconds"] += time.perf_counter() - began
        state["cpu_seconds"] += time.process_time() - used
        began, used = time.perf_counter(), time.process_time()
        state["save"] = f"part{part}"
        save(agent, folder / state["save"])
        (folder / "state.json").write_text(json.dumps(state))
        previous = folder / f"part{part - 1}"
        for file in previous.glob("*") if previous.exists() else ():
            file.unlink()
    return state


def print_progress(seed: int, point: tuple[int, float]) -> None:
    print(f"seed {seed}: {point[0]:,} frames, return {point[1]:.1f}", file=sys.stderr, flush=True)


def save(agent: Any, folder: Path) -> None:
    """Save the agent with its replay and its normalizer."""
    folder.mkdir(parents=True, exist_ok=True)
    agent.save(folder / "agent.zip")
    if hasattr(agent, "save_replay_buffer"):
        agent.save_replay_buffer(folder / "replay.pkl")
    if agent.get_vec_normalize_env() is not None:
        with (folder / "normalizer.pkl").open("wb") as file:
            pickle.dump(agent.get_vec_normalize_env().obs_rms, file)
            pickle.dump(agent.get_vec_normalize_env().ret_rms, file)


def load(agent: Any, env: Any, folder: Path) -> Any:
    """Return the saved agent; its environment begins new episodes."""
    agent = type(agent).load(folder / "agent.zip", env=env)
    if hasattr(agent, "load_replay_buffer"):
        agent.load_replay_buffer(folder / "replay.pkl")
    if agent.get_vec_normalize_env() is not None:
        with (folder / "normalizer.pkl").open("rb") as file:
            env.obs_rms, env.ret_rms = pickle.load(file), pickle.load(file)
    return agent


def main() -> None:
    options = parse(__doc__)
    torch.set_num_threads(1)
    packages = ["stable_baselines3", "torch", "gymnasium", "mujoco", "numpy"]
    report = Report(*packages, *(["sbx-rl", "jax"] if options.library == "sbx" else []))
    for seed in options.seeds:
        folder = Path(options.scratch) / f"seed{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        state = train(options, seed, folder)
        report(seed, state["curve"], state["distinct"], **{
            name: state[name] for name in ("seconds", "cpu_seconds")
        })  # fmt: skip


if __name__ == "__main__":
    main()
