"""Imitation from few demonstrations: AVRIL beside behavior cloning.

    python benchmarks/imitation.py --folder /tmp/imitation    # whatever the results do not have
    python benchmarks/imitation.py --table                    # the table of the results

An expert of each task is a run of PPO, and its greedy episodes are the demonstrations. A seed draws
episodes, the same for both agents; those of a small number are among those of a larger one. All
learners have the same network, batch, learning rate and number of updates. Their score is the
greedy policy's in the task itself. What stopped early goes on: experts are resumed, and runs in
`--out` are not repeated. LunarLander needs `pip install gymnasium[box2d]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from harness import Quick, append

import podracer
from podracer import recipes
from podracer.scores.statistics import bootstrap_interval, interquartile_mean
from podracer_offline import Dataset

RESULTS = Path(__file__).parent / "results" / "imitation.jsonl"
EPISODES = 100  # of the expert, from which seeds draw
FRAMES = 512_000  # of the learners, 1,000 updates


@dataclasses.dataclass(frozen=True)
class Task:
    """Environment, and what differs from `cartpole_ppo` for its expert."""

    environment: str
    expert: dict[str, Any]


TASKS = {
    "cartpole": Task("cartpole", {"frames": 512_000}),
    "acrobot": Task("gymnax:Acrobot-v1", {"frames": 512_000}),
    "lunarlander": Task("gymnasium:LunarLander-v3", {"frames": 1_500_000}),
}
LEARNERS = ("avril", "cloning")
QUICK = {"tasks": ["cartpole"], "demonstrations": [1], "seeds": 1, "out": Path("/dev/null")}


def demonstrations(name: str, folder: Path) -> Dataset:
    """Episodes of a task's expert, which is trained before if it has to be."""
    task, run, file = TASKS[name], folder / f"{name}-expert", folder / f"{name}.npz"
    if not file.exists():
        expert = recipes.find("cartpole_ppo").with_fields({"environment": task.environment})
        if task.environment.startswith("gymnasium:"):
            expert = expert.with_arch("sebulba")
        expert = dataclasses.replace(expert, **task.expert, target_return=None, evaluations=10)
        podracer.train(expert, run_dir=run, resume=run.exists())
        command = [sys.executable, "-m", "podracer", "record", run, "--checkpoint", "best"]
        subprocess.run([*command, "--episodes", str(EPISODES), "--out", file], check=True)
    return Dataset.load(file)


def learn(task: str, learner: str, data: Dataset, seed: int) -> dict[str, Any]:
    """Train on a data set; return the scores of learner and data."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.npz"
        file.write_bytes(data.encode())
        result = podracer.train(
            f"cartpole_{learner}",
            environment=f"data:{file}",
            seed=seed,
            frames=FRAMES,
            evaluations=1,
            evaluation_episodes=100,
            run_dir=f"{folder}/run",
        )
    assert result.evaluation is not None
    return {
        "task": task,
        "learner": learner,
        "demonstrations": len(data.ends),
        "seed": seed,
        "expert_return": float(data.returns.mean()),
        "evaluation_return": float(result.evaluation.returns.mean()),
        "accuracy": float(result.metrics["accuracy"]),
        "frames": FRAMES,
        "cpu_seconds": time.process_time() - start,
    }


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def table(path: Path) -> str:
    """Interquartile means over the seeds, with 95 % bootstrap intervals, as Markdown."""
    scores: Any = defaultdict(dict)
    experts: Any = defaultdict(list)
    for x in records(path):
        key = (x["task"], x["demonstrations"])
        scores[key].setdefault(x["learner"], {})[x["seed"]] = x["evaluation_return"]
        experts[key].append(x["expert_return"])
    lines = ["| task | demonstrations | expert | AVRIL | cloning | seeds |", "|---" * 6 + "|"]
    for (task, count), learners in sorted(scores.items()):
        cells = []
        for learner in LEARNERS:
            values = np.array(list(learners.get(learner, {}).values()))
            if len(values):
                low, high = bootstrap_interval(values)
                cells.append(f"{interquartile_mean(values):.0f} ({low:.0f} to {high:.0f})")
            else:
                cells.append("")
        seeds = "/".join(str(len(learners.get(x, {}))) for x in LEARNERS)
        expert = np.mean(experts[task, count])
        lines.append(f"| {task} | {count} | {expert:.0f} | {' | '.join(cells)} | {seeds} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--demonstrations", type=int, nargs="+", default=[1, 3, 7, 15])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("imitation"), help="for the experts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print a table and train nothing")
    parser.add_argument("--quick", action=Quick, const=QUICK)
    options = parser.parse_args()
    if options.table:
        print(table(options.out))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    names = ("task", "demonstrations", "seed", "learner")
    finished = {tuple(x[name] for name in names) for x in records(options.out)}
    for task in options.tasks:
        episodes = demonstrations(task, options.folder)
        for seed in range(options.seeds):
            for count in options.demonstrations:
                data, _ = episodes.split(count / EPISODES, seed)
                for learner in LEARNERS:
                    if (task, count, seed, learner) not in finished:
                        record = learn(task, learner, data, seed)
                        append(options.out, record)
                        print(record, flush=True)


if __name__ == "__main__":
    main()
