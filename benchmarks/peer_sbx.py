"""SAC and DQN of sbx, as contenders of `agents.py`; runs in a Python that has it.

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

from sbx import DQN, SAC
from stable_baselines3.common.env_util import make_vec_env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agent", choices=["sac", "dqn"], default="sac")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2000, help="of a repetition")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 256])
    parser.add_argument("--capacity", type=int, default=100_000)
    options = parser.parse_args()
    kind, task = {"sac": (SAC, "Pendulum-v1"), "dqn": (DQN, "CartPole-v1")}[options.agent]
    agent = kind(
        "MlpPolicy",
        make_vec_env(task, options.envs, seed=0),
        learning_rate=3e-4,
        buffer_size=options.capacity,
        batch_size=options.batch,
        learning_starts=1000,
        train_freq=1,
        gradient_steps=options.envs,  # one for each environment step
        policy_kwargs={"net_arch": options.hidden},
    )
    agent.learn(2000)  # compiles, and is past its random beginning
    versions = {name: importlib.metadata.version(name) for name in ("sbx-rl", "jax", "gymnasium")}
    print(
        json.dumps({"steps": options.steps, "compile_seconds": 0.0, "peer": versions}), flush=True
    )
    for _ in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        agent.learn(options.steps, reset_num_timesteps=False)
        lap = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}
        print(json.dumps(lap), flush=True)


if __name__ == "__main__":
    main()
