"""Exported policies of the recipes: does the file decide as the agent does, how large, how fast?

Policies are untrained, but have the recipe's network; their observations are those of the device
environment under the policy, or drawn at random for environments of the host. Prints a row of a
table for each; with `--out` those that stand there already are not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
from harness import parse
from records import append, read

from podracer.experiments import recipes
from podracer.experiments.run_setup import build
from podracer.export.decision import make_decision
from podracer.export.files import onnx_runner, stablehlo_runner
from podracer.export.onnx import to_onnx
from podracer.export.proof import prove
from podracer.export.stablehlo import to_stablehlo
from podracer.networks import MLP, TorsoNetwork
from podracer.types import ConfigError, LearnerState

GREEDY = (
    "catch", "catch_a2c", "catch_impala", "catch_stacx", "cartpole_ppo", "cartpole_dqn",
    "cartpole_rainbow", "pendulum_ppo", "pendulum_sac", "pendulum_td3", "pendulum_ddpg",
    "breakout_ppo", "breakout_cnn_ppo", "breakout_dqn", "breakout_rainbow",
    "memory_ppo", "memory_ppo+lstm", "memory_r2d2", "memorychain_dqn", "trading_ppo",
    "worlds_a2c", "catch_muzero", "catch_alphazero", "atari_ppo", "atari_impala",
    "atari_impala_deep", "atari_rainbow",
)  # fmt: skip
SAMPLED = ("cartpole_ppo", "cartpole_rainbow", "pendulum_ppo", "memory_r2d2")


def measure(recipe: str, format: str, policy: str) -> dict[str, Any]:
    name, _, memory = recipe.partition("+")
    experiment = recipes.find(name)
    if memory:
        network = TorsoNetwork(MLP((64,)), memory="lstm", memory_size=64)
        changed: Any = dataclasses.replace(experiment.agent, network=network)  # type: ignore
        experiment = dataclasses.replace(experiment, agent=changed)
    agent, env = build(experiment)
    num_envs = experiment.driver.num_envs
    # Compiled, so that the replay buffer is never made.
    shared = jax.jit(lambda: agent.init(jax.random.key(0), num_envs).shared)()
    state = LearnerState(shared)
    row: dict[str, Any] = {"recipe": recipe, "format": format, "policy": policy}
    try:
        decision = make_decision(agent, state, sampled=policy == "sampled")
        data = to_onnx(decision, {}) if format == "onnx" else to_stablehlo(decision)
    except ConfigError as error:
        return row | {"refused": str(error)}
    runner = onnx_runner(data) if format == "onnx" else stablehlo_runner(data)
    proof = prove(decision, runner, agent, env, state)
    return row | {
        "agent": type(agent).__name__,
        "inputs": {name: list(spec.shape) for name, spec in decision.inputs.items()},
        "bytes": len(data),
        "holds": proof.holds,
        **dataclasses.asdict(proof),
    }


def line(row: dict[str, Any]) -> str:
    names = [row["recipe"], row["format"], row["policy"]]
    if "refused" in row:
        return f"| {' | '.join(names)} | {row['refused']} |"
    cells = [
        f"{row['different_actions']} of {row['observations']:,}",
        f"{row['largest_difference']:.0e}",
        f"{row['bytes'] / 1000:,.0f}",
        f"{row['microseconds']:.0f}",
    ]
    return f"| {' | '.join(names + cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of a recipe's name")
    parser.add_argument("--out", type=Path, help="append one JSON line for each policy to this")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices")
    options = parse(parser)
    rows = read(options.out) if options.out else []
    kept = {(row["recipe"], row["format"], row["policy"]): row for row in rows}
    print("| recipe | format | policy | actions that differ | numbers | kB | microseconds |")
    print("|---|---|---|---|---|---|---|")
    cases = [(recipe, "greedy") for recipe in GREEDY] + [(recipe, "sampled") for recipe in SAMPLED]
    for recipe, policy in cases:
        for format in ("onnx", "stablehlo"):
            if options.only not in recipe:
                continue
            row = kept.get((recipe, format, policy))
            if row is None:
                row = measure(recipe, format, policy)
                if options.out:
                    append(options.out, [row])
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
