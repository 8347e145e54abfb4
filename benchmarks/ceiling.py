"""The ceiling: the environment alone, with acting, and the full step, on one device.

What the full step takes beyond acting is learning. The share of each part is of the full step's
time. The settings are those of the other benchmarks.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from anakin_parts import acting
from harness import Contender, anakin, compare, here, parse, parser

from podracer import envs, recipes
from podracer.agents.ppo import PPO
from podracer.agents.q_lambda import QLambda
from podracer.devices.mesh import find_devices
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.networks import MLP, TorsoNetwork
from podracer.schedules import over_run

PENDULUM = recipes.find("pendulum_ppo")
WIDE = TorsoNetwork(MLP((64, 64), "relu"), shared=False)
SETTINGS = {
    "catch": (QLambda(), AnakinConfig(128, 16, 100, fused=True)),
    "cartpole": (PPO(num_minibatches=16), AnakinConfig(1024, 128, 1)),
    "pendulum": (over_run(PENDULUM.agent, PENDULUM.num_steps), PENDULUM.driver),
    "gymnax:Breakout-MinAtar": (PPO(num_minibatches=8, network=WIDE), AnakinConfig(64, 128, 4)),
}


def measure(environment: str, options: argparse.Namespace) -> None:
    agent, config = SETTINGS[environment]
    env = envs.make(environment)
    if options.quick:
        config = replace(config, num_envs=16, updates_per_chunk=1)
    steps = config.steps_per_update * config.updates_per_chunk

    driver = Anakin(agent, env, config, find_devices(1))

    def part(name: str, act: bool) -> Contender:
        return here(name, *acting(driver, act=act), steps)

    contenders = [
        anakin("full step", agent, env, config),
        part("environment and acting", True),
        part("environment alone", False),
    ]
    about = {
        "environment": environment,
        "agent": type(agent).__name__,
        "environments": config.num_envs,
        "length": config.rollout_length,
    }
    full, act, alone = compare("ceiling", about, contenders, options)
    stepping, both = 100 * full.ratio(alone), 100 * full.ratio(act)
    print(
        f"\nOf the full step: environment {stepping:.0f} %, acting {both - stepping:.0f} %, "
        f"learning {100 - both:.0f} %.",
        flush=True,
    )


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options = parse(made)
    for environment in options.only:
        measure(environment, options)


if __name__ == "__main__":
    main()
