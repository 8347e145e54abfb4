"""PPO of stable-baselines3, for `ppo.py` and `atari.py`; runs in a Python that has it.

One JSON object, then a repetition for each line that it reads, as `harness.elsewhere` wants it.
Its environments are Gymnasium's, stepped one after another in Python, as its users have them.
Nothing of podracer is imported here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", default="CartPole-v1")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--activation", default="tanh", choices=["tanh", "relu"])
    options = parser.parse_args()
    activations = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}
    batch = options.envs * options.length
    if options.environment.endswith("NoFrameskip-v4"):  # the Nature network on Atari's pictures
        import ale_py  # noqa: F401  # which makes the environments known

        processes = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "fork"}}
        games = make_atari_env(options.environment, options.envs, **processes)
        policy, env, networks = "CnnPolicy", VecFrameStack(games, 4), {}
    else:
        policy, env = "MlpPolicy", make_vec_env(options.environment, options.envs, seed=0)
        networks = {
            "net_arch": {"pi": [64, 64], "vf": [64, 64]},
            "activation_fn": activations[options.activation],
        }
    agent = PPO(
        policy,
        env,
        learning_rate=2.5e-4,
        n_steps=options.length,
        batch_size=batch // options.minibatches,
        n_epochs=4,
        ent_coef=0.01,
        policy_kwargs=networks,
        device="cpu",
    )
    steps = batch * options.updates
    agent.learn(steps)
    versions = {
        name: importlib.metadata.version(name)
        for name in ("stable_baselines3", "torch", "gymnasium")
    }
    print(json.dumps({"steps": steps, "compile_seconds": 0.0, "peer": versions}), flush=True)
    for _ in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        agent.learn(steps, reset_num_timesteps=False)
        lap = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}
        print(json.dumps(lap), flush=True)


if __name__ == "__main__":
    main()
