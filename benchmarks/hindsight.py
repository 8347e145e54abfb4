"""HER beside stable-baselines3's at equal frames: flipping bits with DQN, reaching with SAC.

    python benchmarks/hindsight.py --sb3-python PYTHON    # whatever the results do not have
    python benchmarks/hindsight.py --table                # the table of the results

Both have the same network, batch, buffer, learning rate, exploration, k = 4 goals in hindsight, 16
environments and updates for each frame; DQN is without double Q-learning. Scores are of greedy
episodes. Different in stable-baselines3: a relabeled transition keeps its end, and one draw decides
whether all environments take a random action. `without` is podracer's agent with k = 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Quick, append

import podracer
from podracer import recipes
from podracer.schedules import Linear

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "hindsight.jsonl"
FRAMES = {"bits": 96_000, "reach": 32_000}
BITS, EPISODES = 15, 256
QUICK = {"tasks": ["reach"], "libraries": ["podracer"], "seeds": 1, "out": Path("/dev/null")}


def train(task: str, seed: int, num_goals: int) -> dict[str, Any]:
    """Train podracer's agent; return its greedy returns."""
    experiment: Any = recipes.find("bit_flipping_dqn" if task == "bits" else "point_reach_sac")
    replay = dataclasses.replace(experiment.agent.replay, num_goals=num_goals)
    agent = dataclasses.replace(experiment.agent, replay=replay)
    if task == "bits":
        epsilon = Linear(1.0, 0.05, frames=FRAMES["bits"] // 2)
        agent = dataclasses.replace(agent, double=False, epsilon=epsilon)
        experiment = experiment.with_environment(f"bit_flipping,bits={BITS}")
    settings = {"frames": FRAMES[task], "evaluations": 1, "evaluation_episodes": EPISODES}
    experiment = dataclasses.replace(experiment, agent=agent, seed=seed, **settings)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        result = podracer.train(experiment, run_dir=f"{folder}/run")
    assert result.evaluation is not None
    returns = [float(x) for x in result.evaluation.returns]
    return {"returns": returns, "cpu_seconds": time.process_time() - began}


def train_elsewhere(python: str, task: str, seed: int) -> dict[str, Any]:
    """Train the agent of stable-baselines3 in another Python."""
    numbers = map(str, (seed, FRAMES[task], EPISODES, BITS))
    command = [python, HERE / "reference_hindsight.py", task, *numbers]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in path.read_text().splitlines()] if path.is_file() else []


def table(path: Path) -> str:
    """Return the mean return of each seed, and the share of goals reached, as Markdown."""
    lines = ["| task | frames | agent | mean return of each seed | goals reached | CPU seconds |"]
    lines.append("|---" * 6 + "|")
    rows = sorted(records(path), key=lambda x: (x["task"], x["library"], x["seed"]))
    for task, library in dict.fromkeys((x["task"], x["library"]) for x in rows):
        own = [x for x in rows if (x["task"], x["library"]) == (task, library)]
        returns = ", ".join(f"{np.mean(x['returns']):.1f}" for x in own)
        worst = -BITS if task == "bits" else -50
        goals = ", ".join(f"{np.mean(np.array(x['returns']) > worst):.0%}" for x in own)
        seconds = f"{np.mean([x['cpu_seconds'] for x in own]):.0f}"
        cells = (task, f"{FRAMES[task]:,}", library, returns, goals, seconds)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(FRAMES))
    parser.add_argument("--libraries", nargs="+", default=["podracer", "sb3", "without"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sb3-python", help="a Python with stable-baselines3")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table of the results")
    parser.add_argument("--quick", action=Quick, const=QUICK)
    options = parser.parse_args()
    if options.table:
        print(table(options.out))
        return
    if options.quick:
        FRAMES["reach"] = 4_000
    known = {(x["task"], x["library"], x["seed"]) for x in records(options.out)}
    for seed in range(options.seeds):
        for task in options.tasks:
            for library in options.libraries:
                if (task, library, seed) in known:
                    continue
                if library == "sb3" and options.sb3_python:
                    row = train_elsewhere(options.sb3_python, task, seed)
                elif library != "sb3":
                    row = train(task, seed, num_goals=4 if library == "podracer" else 0)
                else:
                    continue
                append(options.out, {"task": task, "library": library, "seed": seed, **row})


if __name__ == "__main__":
    main()
