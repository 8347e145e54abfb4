"""Evaluate learned update rules: untrained students in kinds of worlds that are not `lpg`'s.

Each student has its own world. Rules are files that `podracer rule` wrote, of LPG or of DiscoRL's
structure; `initial` are as many untrained rules of the same size. They are compared with A2C, its
learning rate and entropy cost the best of a grid in that kind of world, and with no learning. The
measure is the mean reward of a step, over the whole lifetime and at its end.

`--figure host`: whole runs under Sebulba, Catch as a host environment and Atari Pong, of A2C and of
students of the rules. `--figure minatar`: the same under Anakin, in games of MinAtar.
JSON lines go to `--out`; `--draw FILE.png` draws those of the figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Quick, append
from machine import machine
from matplotlib.figure import Figure

import podracer
from podracer import envs, recipes
from podracer.agent import Context, ReadsFile
from podracer.agents.a2c import A2C
from podracer.agents.rules.disco import Disco, rule_file
from podracer.agents.rules.lpg import LPGStudent
from podracer.agents.rules.lpg.rule_file import decode_rule, encode_rule
from podracer.agents.rules.lpg.student import lpg_student
from podracer.config.experiment import Experiment
from podracer.devices.startup import use_compilation_cache
from podracer.drivers.anakin import AnakinConfig
from podracer.environment import features
from podracer.io.sinks import read_metrics
from podracer.networks import MLP, Table, TorsoNetwork
from podracer.replay import Replay
from podracer.reports.charts import COLORS
from podracer.rollout import ActorState, environment_keys, rollout, zero_episode_stats
from podracer.scores.statistics import bootstrap_interval, interquartile_mean
from podracer_agents import disco_rules
from podracer_agents.disco_discovery import DiscoDiscovery

WORLDS = ("dense", "sparse", "long", "longer", "long_dense", "rand_dense")
NETWORK = TorsoNetwork(MLP((64,)))
RATES = {True: (0.01, 0.03, 0.1, 0.3, 1.0), False: (3e-4, 1e-3, 3e-3)}  # with tables, without
ENTROPIES = (0.01, 0.1)
QUICK = {"world": ["worlds:dense"], "lives": 2, "envs": 4, "rollout": 5, "updates": 50}
COLOR = dict(zip(("no learning", "A2C", "learned", "initial"), COLORS, strict=False))


def life(agent: Any, env: Any, num_envs: int, T: int, updates: int, key: jax.Array) -> jax.Array:
    """Return the mean reward of a step in each rollout `[updates]` of one student in one world."""
    world_key, enter_key, act_key, step_key, own_key = jax.random.split(key, 5)
    init_key, learn_key = jax.random.split(own_key)
    enter = env.reset
    if features(env).kinds:
        enter = partial(env.enter, world=env.draw(world_key))
    env_state, timestep = jax.vmap(enter)(jax.random.split(enter_key, num_envs))
    actor = ActorState(env_state, timestep, agent.carry(num_envs), zero_episode_stats(num_envs))
    indices = jnp.arange(num_envs, dtype=jnp.uint32)

    def update(carry: Any, number: jax.Array) -> tuple[Any, jax.Array]:
        state, actor = carry
        moments = number * jnp.uint32(T) + jnp.arange(T, dtype=jnp.uint32)
        keys = (environment_keys(key, indices, moments) for key in (act_key, step_key))
        actor, trajectory = rollout(agent, env, agent.actor_params(state), actor, *keys)
        state, _ = agent.learn(state, trajectory, jax.random.fold_in(learn_key, number), None)
        return (state, actor), jnp.mean(trajectory.valid() * trajectory.next_timesteps().reward)

    start = agent.init(init_key, num_envs), actor
    return jax.lax.scan(update, start, jnp.arange(updates, dtype=jnp.uint32))[1]


def lives(settings: Any, env: Any, options: argparse.Namespace) -> np.ndarray:
    """Return the same for several students `[lives, updates]`, one after another."""
    data = None
    if isinstance(settings, ReadsFile):
        data = settings.read(Path(settings.data_file).read_bytes())
    agent = settings.build(env.spec, Context(options.rollout, data))
    one = partial(life, agent, env, options.envs, options.rollout, options.updates)
    keys = jax.random.split(jax.random.key(options.seed), options.lives)
    return np.asarray(jax.jit(partial(jax.lax.map, one))(keys))


def contenders(world: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return agents by name; of those with one name before a colon the best one counts."""
    env = envs.make(world)
    tabular = not isinstance(env.spec.observation, dict) and bool(env.spec.observation.num_values)
    network: Any = Table() if tabular else NETWORK
    student_rate = {} if tabular else {"learning_rate": options.rate}
    made: dict[str, Any] = {}
    for i, file in enumerate(options.rules, options.first_rule):
        made[f"learned {i}"] = student(file, network, **student_rate)
        made[f"initial {i}"] = student(_initial(file, i), network, **student_rate)
    if options.only_rules:
        return made
    made["no learning"] = A2C(learning_rate=0.0, network=network)
    for rate, entropy in itertools.product(RATES[tabular], ENTROPIES):
        made[f"A2C:{rate:g}, {entropy:g}"] = A2C(
            learning_rate=rate, entropy_cost=entropy, network=network
        )
    return made


def student(file: Path, network: Any, **settings: Any) -> LPGStudent | Disco:
    """Return an agent that the rule of a file trains.

    One of a DiscoRL rule has the size with which `DiscoDiscovery` has learned it, and the smallest
    replay there is, of three rollouts of 64 environments.
    """
    if not rule_file.is_disco_rule(file.read_bytes()):
        rule, _ = decode_rule(file.read_bytes(), str(file))
        return lpg_student(rule, network, rule_file=str(file), **settings)
    like = DiscoDiscovery()
    settings = {"learning_rate": like.student_learning_rate} | settings
    return Disco(
        network=network,
        discount=like.discount,
        support_max=like.support_max,
        support_size=like.support_size,
        model_size=like.model_size,
        replay=Replay(capacity=3 * 64 * 20, batch_size=64, warmup=0),
        rule_file=str(file),
        **settings,
    )


def _initial(file: Path, seed: int) -> Path:
    """Write an untrained rule of the same size to a file, and return its path."""
    path, key = Path(tempfile.mkdtemp()) / f"initial-rule-{seed}.npz", jax.random.key(seed)
    content = file.read_bytes()
    if rule_file.is_disco_rule(content):
        params = rule_file.decode_rule(content, str(file))
        size = disco_rules.RuleSize(
            units=params.modulation.bias.size,
            lifetime_units=params.lifetime.hidden.shape[0],
            predictions=params.prediction.bias.size,
        )
        path.write_bytes(disco_rules.encode_rule(size.init(key)))
        return path
    rule, _ = decode_rule(content, str(file))
    path.write_bytes(encode_rule(rule, rule.init(key), {}))
    return path


def compare(world: str, options: argparse.Namespace) -> None:
    env, best = envs.make(world), {}
    for name, agent in contenders(world, options).items():
        began = time.perf_counter()
        rewards = lives(agent, env, options)
        name, _, setting = name.partition(":")
        line = {
            "benchmark": "lpg",
            "world": world,
            "agent": name,
            "setting": setting,
            "reward": rewards.mean(1).tolist(),
            "final": rewards[:, -rewards.shape[1] // 10 :].mean(1).tolist(),
            "curve": rewards.reshape(len(rewards), 50, -1).mean(-1).round(5).tolist(),
            "steps": options.updates * options.rollout * options.envs,
            "seconds": time.perf_counter() - began,
            **machine(),
        }
        if name not in best or np.mean(line["reward"]) > np.mean(best[name]["reward"]):
            best[name] = line
    for name, line in best.items():
        print(
            f"{world:22} {name:12} {np.mean(line['reward']):8.4f} "
            f"at the end {np.mean(line['final']):8.4f}  {line['setting']}",
            flush=True,
        )
        if options.out:
            append(options.out, line)


def experiments(options: argparse.Namespace) -> list[tuple[Experiment, float]]:
    """Return the experiments of whole runs, with the learning rate of their networks."""
    if options.figure == "minatar":
        driver = AnakinConfig(64, 20, 100)
        game = dataclasses.replace(
            recipes.find("breakout_ppo"),
            driver=driver,
            frames=options.minatar_frames,
            evaluations=1,
        )
        return [
            (dataclasses.replace(game, environment=f"gymnax:{name}-MinAtar"), 5e-4)
            for name in ("Breakout", "SpaceInvaders")
        ]
    pong = dataclasses.replace(recipes.find("pong_ppo"), frames=options.pong_frames, evaluations=1)
    catch = dataclasses.replace(recipes.find("catch_a2c").with_arch("sebulba"), frames=1_000_000)
    return [(catch, 2e-3), (pong, 5e-4)]


def whole_runs(options: argparse.Namespace) -> None:
    """Train whole runs: one seed with each rule, and as many of A2C.

    Pong, which is slow, is trained with the first rule only.
    """
    for experiment, rate in experiments(options):
        if options.only and experiment.environment != options.only:
            continue
        settings: Any = experiment.agent
        network = settings.network
        slow = experiment.recipe == "pong_ppo"
        for seed, file in enumerate(options.rules[: 1 if slow else None], options.first_rule):
            for name, agent in {
                "A2C": A2C(learning_rate=rate, network=network),
                "learned": student(file, network, learning_rate=rate),
                "initial": student(_initial(file, seed), network, learning_rate=rate),
            }.items():
                with tempfile.TemporaryDirectory() as folder:
                    run = Path(folder) / "run"
                    podracer.train(experiment, agent=agent, seed=seed, devices=1, run_dir=run)
                    records = [r for r in read_metrics(run / "metrics.jsonl")
                               if r.get("episode_return") is not None]  # fmt: skip
                if not records:
                    raise SystemExit(f"no episode of {experiment.environment} ended: more frames")
                line = {
                    "benchmark": f"lpg-{options.figure}",
                    "world": experiment.environment,
                    "agent": f"{name} {seed}",
                    "steps": [r["frames"] for r in records],
                    "curve": [[r["episode_return"] for r in records]],
                    "evaluation": records[-1].get("evaluation_return"),
                    "seconds": records[-1]["seconds"],
                    **machine(),
                }
                print(
                    f"{experiment.environment:12} {name:8} seed {seed}: return "
                    f"{records[0]['episode_return']:.2f} to {records[-1]['episode_return']:.2f}, "
                    f"evaluation {line['evaluation']}, {line['seconds']:.0f} s",
                    flush=True,
                )
                if options.out:
                    append(options.out, line)


def draw(source: Path, target: Path, benchmark: str) -> None:
    """Curves by world: interquartile mean over learners and rules, 95 % bootstrap."""
    worlds: Any = defaultdict(lambda: defaultdict(list))
    for line in map(json.loads, source.read_text().splitlines()):
        if line["benchmark"] == benchmark:
            agent = line["agent"].rstrip(" 0123456789")
            worlds[line["world"]][agent].append((line["steps"], np.asarray(line["curve"])))
    columns = min(3, len(worlds))
    rows = -(-len(worlds) // columns)
    figure = Figure((3.2 * columns, 2.5 * rows), layout="constrained")
    for i, (world, agents) in enumerate(worlds.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        for agent, color in COLOR.items():
            if not (found := agents[agent]):
                continue
            least = min(curve.shape[1] for _, curve in found)
            curves = np.concatenate([curve[:, :least] for _, curve in found])
            steps = found[0][0]
            if isinstance(steps, int):  # of a whole life, in equal parts
                steps = [steps * (i + 1) / least for i in range(least)]
            low, high = bootstrap_interval(curves)
            axes.fill_between(steps[:least], low, high, color=color, alpha=0.15, linewidth=0)
            axes.plot(steps[:least], interquartile_mean(curves), color=color, label=agent)
        axes.set_title(world.removeprefix("worlds:"), fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.ticklabel_format(axis="x", scilimits=(0, 0))
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.supxlabel("environment steps of one learner", fontsize=10)
    figure.supylabel("reward of a step" if benchmark == "lpg" else "episode return", fontsize=10)
    figure.savefig(target, dpi=150)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--figure", choices=("transfer", "host", "minatar"), default="transfer")
    made.add_argument("--rules", type=Path, nargs="*", default=[])
    made.add_argument("--first-rule", type=int, default=0, help="the number of the first of them")
    made.add_argument("--only-rules", action="store_true")
    made.add_argument("--world", nargs="+", default=[f"worlds:{world}" for world in WORLDS])
    made.add_argument("--lives", type=int, default=8)
    made.add_argument("--envs", type=int, default=64)
    made.add_argument("--rollout", type=int, default=20)
    made.add_argument("--updates", type=int, default=1000)
    made.add_argument("--rate", type=float, default=1e-3, help="of networks trained by a rule")
    made.add_argument("--only", help="the environment of whole runs, by default all")
    made.add_argument("--pong-frames", type=int, default=150_000)
    made.add_argument("--minatar-frames", type=int, default=2_560_000)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path)
    made.add_argument("--draw", type=Path)
    made.add_argument("--quick", action=Quick, const=QUICK)
    options = made.parse_args()
    if options.draw:
        benchmark = "lpg" if options.figure == "transfer" else f"lpg-{options.figure}"
        draw(options.out, options.draw, benchmark)
        return
    use_compilation_cache()
    if options.figure != "transfer":
        whole_runs(options)
        return
    for world in options.world:
        compare(world, options)


if __name__ == "__main__":
    main()
