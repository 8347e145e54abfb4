"""Hyperparameters chosen by Optuna: eight suggestions at a time, trained as one compiled program.

Needs `pip install optuna`. The script asks Optuna for values and reports their score. All
rounds run one program, because other hyperparameters compile nothing.
"""

# Where Optuna is not installed, its types are unknown.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import tempfile

import optuna

import podracer
from podracer.drivers.population import Hyperparameter, Pod


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
        with tempfile.TemporaryDirectory() as run:
            result = podracer.train(
                "cartpole_ppo",
                pods=pods,
                frames=frames,
                evaluations=1,
                target_return=None,
                run_dir=f"{run}/0",
            )
        assert result.evaluation is not None
        for trial, returns in zip(asked, result.evaluation.returns, strict=True):
            study.tell(trial, float(returns.mean()))
        print(f"round {round_number}: best {study.best_value:.1f} with {study.best_params}")
    return study.best_value


if __name__ == "__main__":
    main()
