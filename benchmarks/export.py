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
from harness import Quick, parse
from records import append, read

from podracer import recipes
from podracer.errors import ConfigError
from podracer.networks import MLP, TorsoNetwork
from podracer.run.setup import build
from podracer.types import LearnerState
from podracer_deploy.export.decision import make_decision
from podracer_deploy.export.files import onnx_runner, stablehlo_runner, to_stablehlo
from podracer_deploy.export.onnx import to_onnx
from podracer_deploy.export.proof import prove

# Recipes, with what they are of: agent, layers and observation. `+lstm` changes the network's
# memory, `@NAME` the environment.
GREEDY = {
    "catch": "Q(λ), fully connected",
    "catch_a2c": "A2C, fully connected",
    "catch_impala": "IMPALA, fully connected",
    "catch_stacx": "STACX, fully connected",
    "cartpole_ppo": "PPO, fully connected",
    "cartpole_ppo@pgx:tic_tac_toe": "PPO, action masks, dictionary",
    "cartpole_dqn": "DQN, fully connected",
    "cartpole_rainbow": "Rainbow, noisy, distributions of values",
    "pendulum_ppo": "PPO, continuous, normalized",
    "pendulum_sac": "SAC, continuous",
    "pendulum_td3": "TD3, continuous",
    "pendulum_ddpg": "DDPG, continuous",
    "trading_ppo": "PPO, continuous, normalized",
    "breakout_ppo": "PPO, two networks",
    "breakout_cnn_ppo": "PPO, convolutions",
    "breakout_dqn": "DQN, convolutions",
    "breakout_rainbow": "Rainbow, noisy, convolutions",
    "memory_ppo": "PPO, GRU",
    "memory_ppo+lstm": "PPO, LSTM",
    "memory_r2d2": "R2D2, LSTM, last action and reward",
    "memorychain_dqn": "DQN, fully connected",
    "worlds_a2c": "A2C, table of states",
    "catch_muzero": "MuZero, search in a model",
    "catch_alphazero": "AlphaZero, search, dictionary",
    "atari_ppo": "PPO, Nature network, stacked frames",
    "atari_impala": "IMPALA, convolutions, stacked frames",
    "atari_rainbow": "Rainbow, Nature network, stacked frames",
}
SAMPLED = ("cartpole_ppo", "cartpole_rainbow", "pendulum_ppo", "memory_r2d2")
FORMATS = ("onnx", "stablehlo")


def measure(recipe: str, format: str, policy: str) -> dict[str, Any]:
    name, _, environment = recipe.partition("@")
    name, _, memory = name.partition("+")
    experiment = recipes.find(name)
    if environment:
        experiment = dataclasses.replace(experiment, environment=environment)
    if memory:
        network = TorsoNetwork(MLP((64,)), memory="lstm", memory_size=64)
        changed: Any = dataclasses.replace(experiment.agent, network=network)  # type: ignore
        experiment = dataclasses.replace(experiment, agent=changed)
    blueprint, env = build(experiment)
    num_envs = experiment.driver.num_envs
    # Compiled, so that the replay buffer is never made.
    agent = blueprint.build()
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


def line(recipe: str, policy: str, rows: list[dict[str, Any]]) -> str:
    kind = GREEDY[recipe] if policy == "greedy" else f"{GREEDY[recipe]}; sampled"
    cells = [f"`{recipe}`", kind]
    for row in rows:
        if "refused" in row:
            cells += ["refused", "", ""]
            continue
        differing = f"{row['different_actions']} actions, " if row["different_actions"] else ""
        cells += [
            f"{differing}{row['largest_difference']:.0e}".replace("0e+00", "0"),
            f"{row['bytes'] / 1000:,.0f}",
            f"{row['microseconds']:,.0f}",
        ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of a recipe's name")
    parser.add_argument("--out", type=Path, help="append one JSON line for each policy to this")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices")
    parser.add_argument("--quick", action=Quick, const={"only": "cartpole_ppo"})
    options = parse(parser)
    rows = read(options.out) if options.out else []
    kept = {(row["recipe"], row["format"], row["policy"]): row for row in rows}
    print("| recipe | policy | ONNX: numbers | kB | µs | StableHLO: numbers | kB | µs |")
    print("|---|---|---|---|---|---|---|---|")
    cases = [(recipe, "greedy") for recipe in GREEDY] + [(recipe, "sampled") for recipe in SAMPLED]
    for recipe, policy in cases:
        if options.only not in recipe:
            continue
        shown = []
        for format in FORMATS:
            row = kept.get((recipe, format, policy))
            if row is None:
                row = measure(recipe, format, policy)
                if options.out:
                    append(options.out, [row])
            shown.append(row)
        print(line(recipe, policy, shown), flush=True)


if __name__ == "__main__":
    main()
