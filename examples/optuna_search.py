"""Hyperparameters chosen by Optuna: eight suggestions at a time, trained as one compiled program.

Needs `pip install optuna`. The script asks Optuna for values and reports their score, or that
their learner diverged. All rounds run one program, because other hyperparameters compile nothing.
"""

# Where Optuna is not installed, its types are unknown.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import tempfile

import optuna

import podracer
from podracer.drivers.population import Hyperparameter, Pod
from podracer.errors import NonFiniteError


def scores(pods: tuple[Pod, ...], frames: int) -> list[float | None]:
    """Train the pods; return the mean return of each, None where its learner diverged."""
    with tempfile.TemporaryDirectory() as run:
        try:
            result = podracer.train(
                "cartpole_ppo",
                pods=pods,
                frames=frames,
                evaluations=1,
                target_return=None,
                run_dir=f"{run}/0",
            )
        except NonFiniteError:  # all pods have diverged
            return [None] * len(pods)
        *_, record = (result.run_dir / "pods.jsonl").read_text().splitlines()
    assert result.evaluation is not None
    # A pod that diverged has null metrics. Its last finite state was evaluated all the same.
    episodes, returns = json.loads(record)["episodes"], result.evaluation.returns
    return [None if n is None else float(x.mean()) for n, x in zip(episodes, returns, strict=True)]


def main(rounds: int = 4, trials: int = 8, frames: int = 40_960) -> float:
    """Search for a learning rate and an entropy cost of PPO on CartPole; return the best return."""
    study = optuna.create_study(direction="maximize")
    for round_number in range(rounds):
        asked = [study.ask() for _ in range(trials)]
        pods = tuple(
            Pod(
                seed=round_number * trials + i,
                hyperparameters=(
                    Hyperparameter(
                        "learning_rate", trial.suggest_float("rate", 1e-5, 1e-1, log=True)
                    ),
                    Hyperparameter("entropy_cost", trial.suggest_float("entropy", 0.0, 0.05)),
                ),
            )
            for i, trial in enumerate(asked)
        )
        for trial, score in zip(asked, scores(pods, frames), strict=True):
            if score is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, score)
        for best in study.best_trials[:1]:  # none while all have diverged
            print(f"round {round_number}: best {best.value:.1f} with {best.params}")
    return study.best_value


if __name__ == "__main__":
    main()
