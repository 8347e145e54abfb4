"""Learning from data: returns of behavior, of what is learned from it, and of going on online.

Data are episodes of PPO's sampled actions: before training (`random`), early (`medium`) and late
(`expert`). Each method trains the seeds as one program. What `--out` has of a method, its data and
its frames is not measured again, so a run that was cut goes on. `--table` prints the means of a
file's last evaluations, greedy, with the smallest and the largest seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from harness import append

import podracer
from podracer import recipes
from podracer.agent import policy_params
from podracer.config.experiment import Experiment
from podracer.drivers.population import Pod
from podracer.evaluate import ActingRule
from podracer.run.episodes import record_episodes

OUT = Path(__file__).parent / "results" / "offline.jsonl"
EPISODES = 128  # of an evaluation
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """Recipe of the behavior, its frames for each data set, and the methods that learn from it."""

    behavior: str
    frames: dict[str, int]
    episodes: dict[str, int]
    methods: dict[str, Method]


@dataclasses.dataclass(frozen=True)
class Method:
    """Recipe and frames of a method; `start` names another one that it goes on from."""

    recipe: str
    frames: int
    place: str = "data"  # of the data: the `data` environment, the `replay`, or `none`
    start: str = ""
    agent: dict[str, Any] = dataclasses.field(default_factory=dict)


NORMALIZED = {"normalize_observations": True}
TASKS = {
    "cartpole": Task(
        "cartpole_ppo",
        {"random": 0, "medium": 8_192, "expert": 102_400},
        {"random": 500, "medium": 100, "expert": 50},
        {
            "cloning": Method("cartpole_cloning", 256_000),
            "DQN": Method("cartpole_dqn", 32_000),
            "DQN online": Method("cartpole_dqn", 16_000, "none"),
            "DQN online, mixed replay": Method("cartpole_dqn", 16_000, "replay"),
            "DQN online, from DQN": Method(
                "cartpole_dqn", 16_000, "none", "DQN", {"epsilon": 0.05}
            ),
        },
    ),
    "pendulum": Task(
        "pendulum_ppo",
        {"random": 0, "medium": 229_376, "expert": 450_560},
        {"random": 100, "medium": 100, "expert": 100},
        {
            "cloning": Method("cartpole_cloning", 1_024_000),
            "IQL": Method("pendulum_iql", 640_000, agent={"learning_rate": 1e-3}),
            "TD3+BC": Method("pendulum_td3_bc", 160_000, agent={"learning_rate": 1e-3}),
            "TD3 online": Method("pendulum_td3", 16_000, "none", agent=NORMALIZED),
            "TD3 online, mixed replay": Method("pendulum_td3", 16_000, "replay", agent=NORMALIZED),
            "TD3 online, from TD3+BC": Method(
                "pendulum_td3", 16_000, "none", "TD3+BC", NORMALIZED | {"random_frames": 0}
            ),
        },
    ),
}


def behavior(name: str, quality: str, seed: int, work: Path) -> Path:
    """Return the file with a data set, which is made if it is not there."""
    path = work / f"{name}-{quality}-{seed}.npz"
    if path.exists():
        return path
    task = TASKS[name]
    experiment = dataclasses.replace(
        recipes.find(task.behavior), seed=seed, evaluations=0, target_return=None
    )
    if frames := task.frames[quality]:
        state = podracer.train(experiment, frames=frames, devices=1).state
    else:
        agent = experiment.agent.build(podracer.make(name).spec)
        state = agent.init(jax.random.key(seed), 1)
    env = podracer.make(name)
    agent = experiment.agent.build(env.spec)
    data = record_episodes(
        agent,
        env,
        policy_params(agent, state),
        jax.random.key(seed),
        episodes=task.episodes[quality],
        rule=ActingRule("sampled"),
        name=name,
    )
    work.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode())
    return path


def measure(
    name: str, quality: str, label: str, options: argparse.Namespace, file: Path
) -> list[Row]:
    """Train all seeds of a method on a data set; return a row for each."""
    method, run_of = TASKS[name].methods[label], _runs(name, quality, options)
    frames, seeds = int(method.frames * options.scale), options.seeds
    experiment = recipes.find(method.recipe)
    agent = dataclasses.replace(experiment.agent, **method.agent)
    if method.place == "replay":
        agent = dataclasses.replace(agent, replay=dataclasses.replace(agent.replay, data=str(file)))
    place = f"data:{file}" if method.place == "data" else name
    is_cut = run_of(label).exists()
    result = podracer.train(
        _plain(experiment, place),
        agent=agent,
        pods=tuple(map(Pod, seeds)),
        frames=frames * len(seeds),
        devices=1,
        run_dir=run_of(label),
        resume=is_cut,
        weights=run_of(method.start) if method.start and not is_cut else None,
    )
    assert result.evaluation is not None
    returns = result.evaluation.returns.mean(axis=-1)
    return [
        {"frames": frames, "seed": seed, "return": float(value)}
        for seed, value in zip(seeds, returns, strict=True)
    ]


def _plain(experiment: Experiment, environment: str) -> Experiment:
    return dataclasses.replace(
        experiment,
        environment=environment,
        evaluations=1,
        evaluation_episodes=EPISODES,
        target_return=None,
    )


def _runs(name: str, quality: str, options: argparse.Namespace) -> Callable[[str], Path]:
    """Return a function of a method that returns the directory of its run."""
    seeds = "-".join(map(str, options.seeds))

    def directory(label: str) -> Path:
        words = re.sub(r"[^A-Za-z0-9]+", "-", label)
        return options.work / f"{name}-{quality}-{words}-{options.scale:g}-{seeds}"

    return directory


def run(options: argparse.Namespace) -> None:
    """Measure what is missing."""
    rows = _read(options.out)
    for name in options.tasks:
        for quality in options.data:
            file = behavior(name, quality, options.behavior_seed, options.work)
            data = podracer.Dataset.load(file)
            about = {"task": name, "data": quality, "digest": data.digest}
            about |= {"transitions": len(data.reward), "behavior": float(data.returns.mean())}
            for label in options.methods or TASKS[name].methods:
                if label not in TASKS[name].methods:
                    continue
                key = {"task": name, "data": quality, "method": label, "scale": options.scale}
                finished = {row["seed"] for row in rows if key.items() <= row.items()}
                if finished >= set(options.seeds):
                    continue
                measured = measure(name, quality, label, options, file)
                for row in measured:
                    append(options.out, {**key, **about, **row})
                values = ", ".join(f"{row['return']:.1f}" for row in measured)
                print(f"{name} {quality} {label}: {values}", flush=True)


def table(path: Path) -> None:
    """Print a table for each task, with a row for each data set and method."""
    groups: Any = defaultdict(dict)
    for row in _read(path):
        key = row["task"], row["scale"], row["data"], row["method"]
        groups[key][row["seed"]] = row
    print("| task | data | transitions | behavior | method | frames | return | seeds |")
    print("|---|---|---|---|---|---|---|---|")
    order = [(name, x, y) for name, t in TASKS.items() for x in t.frames for y in t.methods]
    places = {place: i for i, place in enumerate(order)}
    for key in sorted(groups, key=lambda key: (key[1], places[key[0], key[2], key[3]])):
        (task, _, data, method), seeds = key, groups[key]
        values = np.array([row["return"] for row in seeds.values()])
        row = next(iter(seeds.values()))
        print(
            f"| {task} | {data} | {row['transitions']:,} | {row['behavior']:.0f} | {method} | "
            f"{row['frames']:,} | {values.mean():.0f} [{values.min():.0f}, {values.max():.0f}] | "
            f"{len(values)} |"
        )


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    made.add_argument("--data", nargs="+", default=["random", "medium", "expert"])
    made.add_argument("--methods", nargs="+", help="default: all of a task")
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--scale", type=float, default=1.0, help="factor of all frames of methods")
    made.add_argument("--behavior-seed", type=int, default=0)
    made.add_argument("--work", type=Path, default=Path("runs/offline"), help="data sets and runs")
    made.add_argument("--out", type=Path, default=OUT)
    made.add_argument("--table", action="store_true")
    options = made.parse_args()
    if not options.table:
        run(options)
    table(options.out)


if __name__ == "__main__":
    main()
