"""Learning from data: returns of behavior, of what is learned from it, and of going on online.

Data are episodes of sampled actions of PPO, on HalfCheetah of CrossQ: before training (`random`),
early (`medium`) and late (`expert`). Each method trains the seeds as one program, where the
environment of its evaluations is one. What `--out` has of a method, its data and its frames is not
measured again, so a run that was cut goes on. `--table` prints the means of a file's last
evaluations, greedy, with the smallest and the largest seed.

    python benchmarks/offline.py
    python benchmarks/offline.py --python d3rlpy=PYTHON imitation=PYTHON

The second command also measures other libraries on the same files, each in a Python that has it:
`reference_offline.py`. HalfCheetah needs `pip install gymnasium[mujoco]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from harness import Quick, append
from references import lines_of, pairs_of
from results_suite import evaluations_of

import podracer
from podracer import recipes
from podracer.agent import policy_params
from podracer.agents.dqn import DQN
from podracer.config.experiment import Experiment
from podracer.drivers.population import Pod
from podracer.environment import HostEnvironments
from podracer.evaluate import ActingRule
from podracer.networks import MLP, TorsoNetwork
from podracer_offline import Dataset, FromData, record_episodes

OUT = Path(__file__).parent / "results" / "offline.jsonl"
EPISODES, EVALUATIONS = 128, 10  # of an evaluation, of a run
PEERS = {"d3rlpy": {"cloning", "DQN", "IQL", "TD3+BC"}, "imitation": {"cloning"}}  # their methods
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """Recipe of the behavior, its frames for each data set, and the methods that learn from it."""

    behavior: str
    frames: dict[str, int]
    episodes: dict[str, int]
    methods: dict[str, Method]

    @property
    def environment(self) -> str:
        """Name of the environment."""
        return recipes.find(self.behavior).environment


@dataclasses.dataclass(frozen=True)
class Method:
    """Recipe and frames of a method; `start` names another one that it goes on from."""

    recipe: str
    frames: int
    from_data: bool = True  # or in the environment that the data come from
    start: str = ""
    agent: dict[str, Any] = dataclasses.field(default_factory=dict)


NORMALIZED = {"normalize_observations": True}
LARGE = {"network": TorsoNetwork(MLP((256, 256)), shared=False)}
CHEETAH = LARGE | {"discount": 0.99, "learning_rate": 1e-3}
TASKS = {
    "cartpole": Task(
        "cartpole_ppo",
        {"random": 0, "medium": 8_192, "expert": 102_400},
        {"random": 500, "medium": 100, "expert": 50},
        {
            "cloning": Method("cartpole_cloning", 256_000),
            "DQN": Method("cartpole_dqn", 32_000),
            "DQN online": Method("cartpole_dqn", 16_000, False),
            "DQN online, from DQN": Method("cartpole_dqn", 16_000, False, "DQN", {"epsilon": 0.05}),
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
            "TD3 online": Method("pendulum_td3", 16_000, False, agent=NORMALIZED),
            "TD3 online, from TD3+BC": Method(
                "pendulum_td3", 16_000, False, "TD3+BC", NORMALIZED | {"random_frames": 0}
            ),
        },
    ),
    "halfcheetah": Task(
        "halfcheetah_crossq",
        {"random": 0, "medium": 44_800},
        {"random": 50, "medium": 50},
        {
            "cloning": Method("cartpole_cloning", 1_024_000, agent=LARGE),
            # Advantages of hundreds of steps of reward 7 are large.
            "IQL": Method("pendulum_iql", 512_000, agent=CHEETAH | {"inverse_temperature": 0.05}),
            "TD3+BC": Method("pendulum_td3_bc", 512_000, agent=CHEETAH | NORMALIZED),
        },
    ),
}

QUICK = {"tasks": ["cartpole"], "data": ["random"], "methods": ["cloning", "DQN"], "seeds": [0]}
QUICK |= {"scale": 0.1, "out": Path("/dev/null")}


def behavior(name: str, quality: str, seed: int, work: Path) -> Path:
    """Return the file with a data set, which is made if it is not there."""
    path = work / f"{name}-{quality}-{seed}.npz"
    if path.exists():
        return path
    task = TASKS[name]
    experiment = dataclasses.replace(
        recipes.find(task.behavior), seed=seed, evaluations=0, target_return=None
    )
    env = podracer.make(task.environment)
    agent = podracer.Blueprint(experiment.agent, env.spec).build()
    if frames := task.frames[quality]:
        state = podracer.train(experiment, frames=frames, devices=1).state
    else:
        state = agent.init(jax.random.key(seed), 1)
    data = record_episodes(
        agent,
        env,
        policy_params(agent, state),
        jax.random.key(seed),
        episodes=task.episodes[quality],
        rule=ActingRule("sampled"),
        name=task.environment,
    )
    work.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode())
    return path


def measure(
    name: str, quality: str, label: str, options: argparse.Namespace, file: Path
) -> Iterator[Row]:
    """Train all seeds of a method on a data set; yield a row for each."""
    task = TASKS[name]
    method, run_of = task.methods[label], _runs(name, quality, options)
    frames = int(method.frames * options.scale)
    experiment = recipes.find(method.recipe)
    agent = dataclasses.replace(experiment.agent, **method.agent)
    if method.from_data and isinstance(agent, DQN):
        agent = FromData(agent)
    place = f"data:{file}" if method.from_data else task.environment
    is_host = isinstance(podracer.make(task.environment), HostEnvironments)
    for seeds in [[seed] for seed in options.seeds] if is_host else [options.seeds]:
        run, start = run_of(label, seeds), run_of(method.start, seeds)
        result = podracer.train(
            _plain(experiment, place),
            agent=agent,
            seed=seeds[0],
            pods=() if is_host else tuple(map(Pod, seeds)),
            frames=frames,  # of each pod
            devices=1,
            run_dir=run,
            resume=run.exists(),
            begin=podracer.Weights(start) if method.start and not run.exists() else None,
        )
        assert result.evaluation is not None
        returns = np.atleast_1d(result.evaluation.returns.mean(axis=-1))
        curve = evaluations_of(run, len(seeds))
        for i, (seed, value) in enumerate(zip(seeds, returns, strict=True)):
            points = [[point["frames"], round(point["returns"][i], 4)] for point in curve]
            yield {"frames": frames, "seed": seed, "return": float(value), "curve": points}


def measure_peer(
    library: str, name: str, label: str, options: argparse.Namespace, file: Path
) -> Iterator[Row]:
    """Train another library's agent on a data set; yield a row for each seed."""
    task = TASKS[name]
    frames = int(task.methods[label].frames * options.scale)
    settings = json.dumps(settings_of(task.methods[label], frames))
    command = [options.python[library], str(Path(__file__).parent / "reference_offline.py")]
    command += ["--library", library, "--environment", task.environment, "--method", label]
    command += ["--data", str(file), "--settings", settings, "--episodes", str(EPISODES)]
    for row in lines_of([*command, "--seeds", *map(str, options.seeds)], math.inf):
        yield {"frames": frames, **row}


def settings_of(method: Method, frames: int) -> dict[str, Any]:
    """Return the settings of a method that other libraries also have."""
    experiment = recipes.find(method.recipe)
    agent = dataclasses.replace(experiment.agent, **method.agent)
    replay, torso = getattr(agent, "replay", None), agent.network.torso
    rollout = experiment.driver.num_envs * experiment.driver.rollout_length
    return {
        "hidden": torso.hidden,
        "activation": torso.activation,
        "batch_size": replay.batch_size if replay else rollout,
        "updates": frames // rollout * (replay.updates_per_rollout if replay else 1),
        "learning_rate": agent.learning_rate,
        "epsilon": agent.optimizer.epsilon,
        "discount": agent.discount,
        "max_gradient_norm": getattr(agent, "max_gradient_norm", None),
        "target_update_period": getattr(agent, "target_update_period", None),
        "normalize_observations": getattr(agent, "normalize_observations", False),
    }


def _plain(experiment: Experiment, environment: str) -> Experiment:
    return dataclasses.replace(
        experiment,
        environment=environment,
        evaluations=EVALUATIONS,
        evaluation_episodes=EPISODES,
        target_return=None,
    )


def _runs(
    name: str, quality: str, options: argparse.Namespace
) -> Callable[[str, Sequence[int]], Path]:
    """Return a function of a method and its seeds that returns the directory of its run."""

    def directory(label: str, seeds: Sequence[int]) -> Path:
        words = re.sub(r"[^A-Za-z0-9]+", "-", label)
        numbers = "-".join(map(str, seeds))
        return options.work / f"{name}-{quality}-{words}-{options.scale:g}-{numbers}"

    return directory


def run(options: argparse.Namespace) -> None:
    """Measure what is missing."""
    rows = read(options.out)
    for name, quality in itertools.product(options.tasks, options.data):
        if quality not in TASKS[name].frames:
            continue
        file = behavior(name, quality, options.behavior_seed, options.work)
        data = Dataset.load(file)
        about = {"task": name, "data": quality, "digest": data.digest}
        about |= {"transitions": len(data.reward), "behavior": float(data.returns.mean())}
        for label, library in itertools.product(
            options.methods or TASKS[name].methods, ["podracer", *options.python]
        ):
            if label not in TASKS[name].methods or label not in PEERS.get(library, {label}):
                continue
            key = {"task": name, "data": quality, "method": label, "scale": options.scale}
            key["library"] = library
            finished = {row["seed"] for row in rows if key.items() <= row.items()}
            if finished >= set(options.seeds):
                continue
            if library == "podracer":
                measured = measure(name, quality, label, options, file)
            else:
                measured = measure_peer(library, name, label, options, file)
            for row in measured:
                append(options.out, {**key, **about, **row})
                print(f"{name} {quality} {label} {library}: {row['return']:.1f}", flush=True)


def table(path: Path) -> None:
    """Print a table for each task, with a row for each data set and method."""
    libraries = ["podracer", *PEERS]
    groups: Any = defaultdict(lambda: defaultdict(dict))
    for row in read(path):
        key = row["task"], row["scale"], row["data"], row["method"]
        groups[key][row["library"]][row["seed"]] = row
    heads = ["task", "data", "transitions", "behavior", "method", "frames", *libraries, "seeds"]
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    order = [(name, x, y) for name, t in TASKS.items() for x in t.frames for y in t.methods]
    places = {place: i for i, place in enumerate(order)}
    for key in sorted(groups, key=lambda key: (key[1], places[key[0], key[2], key[3]])):
        (task, _, data, method), found = key, groups[key]
        row = next(iter(found["podracer"].values()))
        scores = {name: [row["return"] for row in found[name].values()] for name in libraries}
        cells = " | ".join(
            f"{np.mean(x):.0f} [{min(x):.0f}, {max(x):.0f}]" if x else "" for x in scores.values()
        )
        seeds = "/".join(str(len(x)) for x in scores.values() if x)
        print(
            f"| {task} | {data} | {row['transitions']:,} | {row['behavior']:.0f} | {method} | "
            f"{row['frames']:,} | {cells} | {seeds} |"
        )


def read(path: Path) -> list[Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [{"library": "podracer", **json.loads(line)} for line in lines]


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
    made.add_argument("--python", nargs="+", default=[], metavar="LIBRARY=PATH")
    made.add_argument("--quick", action=Quick, const=QUICK)
    options = made.parse_args()
    options.python = pairs_of(options.python)
    if not options.table:
        run(options)
    table(options.out)


if __name__ == "__main__":
    main()
