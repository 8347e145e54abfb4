"""Delivery: promoted only if better, back on request, and a model is current whatever is killed."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from child import exit_code

import podracer
from podracer.agents.ppo import PPO
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.errors import CheckpointError, ConfigError
from podracer.io import run_directory as rundir
from podracer.io.seal import read_sealed_json, seal, seal_json, verify_seal
from podracer_trading import delivery
from podracer_trading.backtest import backtest, load_trading
from podracer_trading.delivery import current_model, promote, rollback

MARKET = "trading:synthetic,tickers=3,bars=200"
EXPERIMENT = Experiment(
    recipe="trading",
    environment=MARKET,
    agent=PPO(learning_rate=1e-3, normalize_observations=True),
    driver=AnakinConfig(8, 16, 4),
    frames=8 * 128,
    evaluations=0,
    devices=1,
)

UPDATES = 9  # of the runs below: eight, and one more for steps that only reset


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs, the worse in the validation period first."""
    root = tmp_path_factory.mktemp("runs")
    made = [podracer.train(EXPERIMENT, seed=s, run_dir=root / f"s{s}").run_dir for s in range(2)]
    first, second = sorted(made, key=score)
    assert score(first) < score(second)
    return first, second


@pytest.fixture(scope="module")
def runs(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """Three runs, the worst in the validation period first."""
    run = podracer.train(EXPERIMENT, seed=2, run_dir=tmp_path_factory.mktemp("third") / "s2")
    first, second, third = sorted((*pair, run.run_dir), key=score)
    assert score(first) < score(second) < score(third)
    return first, second, third


@functools.cache
def score(run: Path) -> float:
    return backtest(run).validation.metrics["policy"].cumulative_return


def test_a_run_that_began_in_the_directory_before_the_lock_is_left_as_it_is(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, lock = tmp_path / "models", rundir.fcntl.flock

    def begin(descriptor: int, operation: int) -> None:
        shutil.copytree(pair[0], models, dirs_exist_ok=True)
        lock(descriptor, operation)

    monkeypatch.setattr(rundir.fcntl, "flock", begin)
    with pytest.raises(ConfigError, match="holds a run"):
        promote(models, pair[1])
    assert not (models / "record.jsonl").exists()


def decisions(models: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (models / "record.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_better_ones_are_promoted(
    runs: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worst, middle, best = runs
    models = tmp_path / "models"
    assert exit_code("promote", models, middle) == 0
    assert "Promoted: the current model is" in capsys.readouterr().out
    assert exit_code("promote", models, worst) == 1
    shown = capsys.readouterr().out
    assert f"Refused: the current model is {models / '000001'}" in shown
    assert all(f"{100 * score(run):+.2f} %" in shown for run in (worst, middle))
    assert exit_code("promote", models, middle) == 1  # equal is not better
    assert exit_code("promote", models, best) == 0
    assert current_model(models) == models / "000002"
    assert (models / "current").read_text() == "000002\n"
    record = decisions(models)
    assert [each["action"] for each in record] == ["promote", "refuse", "refuse", "promote"]
    assert [each["previous_score"] for each in record] == [None, *[score(middle)] * 3]
    assert record[3]["score"] == score(best)
    assert record[3]["window"] == ["2010-06-18", "2010-08-12"]

    assert exit_code("rollback", models) == 0
    assert current_model(models) == models / "000001"
    assert (models / "current").read_text() == "000001\n"
    capsys.readouterr()
    assert exit_code("rollback", models) == 78
    assert "has no model before 000001" in capsys.readouterr().err
    assert exit_code("promote", models, best) == 0  # numbers are not used twice
    assert current_model(models) == models / "000003"


@pytest.mark.slow
def test_rolling_back_goes_further_each_time(runs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    for run in runs:
        promote(tmp_path, run)
    assert [rollback(tmp_path).model for _ in range(2)] == ["000002", "000001"]
    assert current_model(tmp_path).name == "000001"


@pytest.mark.slow
def test_both_are_judged_in_the_newer_window(runs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """The old model is played in the validation period of the new run, not in its own."""
    later = f"{MARKET},train_until=0.7,validate_until=0.9"
    run = podracer.train(EXPERIMENT, environment=later, run_dir=tmp_path / "run").run_dir
    promote(tmp_path / "models", runs[2])
    decision = promote(tmp_path / "models", run)
    moved = dataclasses.replace(EXPERIMENT, environment=later)
    there = tmp_path / "there"  # the old run, were it configured for the new window
    shutil.copytree(runs[2], there)
    config = read_sealed_json(run / "config.json")
    config["run"] = read_sealed_json(there / "config.json")["run"]
    config["experiment"]["environment"] = moved.environment
    seal_json(there / "config.json", config)
    assert decision.previous_score == score(there) != score(runs[2])
    assert decision.score == score(run)
    assert decision.window == ("2010-07-16", "2010-09-09")
    assert (decision.action == "promote") == (decision.score > decision.previous_score)


class Killed(BaseException):
    pass


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> bool:
    """Do what `act` does up to the step, counting before and after each change to the disk."""
    count = 0

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        def tick() -> None:
            nonlocal count
            count += 1
            if count == step:
                raise Killed

        def changed(*args: Any, **kwargs: Any) -> Any:
            tick()
            result = change(*args, **kwargs)
            tick()
            return result

        return changed

    with monkeypatch.context() as patch:
        for owner, name in (
            (delivery, "write_bytes"),
            (delivery, "seal"),
            (shutil, "copytree"),  # of every directory within, too
            (shutil, "rmtree"),
        ):
            patch.setattr(owner, name, watched(getattr(owner, name)))
        try:
            act()
        except Killed:
            return True
    return False


@pytest.mark.slow
def test_a_kill_leaves_the_old_or_the_new_model(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, env, state = load_trading(pair[0], "newest")
    scores = {pair[0].name: 0.0, "000001": 1.0}  # to play them each time would take minutes

    def load(directory: Path, **_: Any) -> Any:
        state = SimpleNamespace(update=UPDATES, score=scores.get(Path(directory).name, 2.0))
        return SimpleNamespace(agent=agent, env=env, state=state)

    monkeypatch.setattr(delivery, "load_run", load)
    monkeypatch.setattr(
        delivery, "load_trading", lambda run, checkpoint: (agent, env, load(run).state)
    )
    monkeypatch.setattr(delivery, "validation_return", lambda agent, env, state: state.score)
    assert int(state.update) == UPDATES
    promote(tmp_path / "start", pair[0])
    for make_current, after in ((promote, "000002"), (rollback, "000001")):
        seen = set()
        for step in range(1, 100):
            models = tmp_path / f"{after}-{step}"
            shutil.copytree(tmp_path / "start", models)
            arguments = (models, pair[1]) if make_current is promote else (models,)
            before = current_model(models).name
            if not killed_at(step, monkeypatch, lambda: make_current(*arguments)):  # noqa: B023
                break
            now = current_model(models)
            seen.add(now.name)
            assert now.name in (before, after)
            verify_seal(now / "checkpoints")
            pointer = (models / "current").read_text().strip()
            assert pointer in (before, after)
            verify_seal(models / pointer / "checkpoints")
            if now.name == before:  # as if it had never been tried
                assert make_current(*arguments).model == after
            else:
                assert promote(models, pair[0]).action == "refuse"
            assert (models / "current").read_text() == f"{after}\n"
        assert step > 4
        assert seen == {before, after}
        shutil.rmtree(tmp_path / "start")
        shutil.copytree(models, tmp_path / "start")


@pytest.mark.slow
def test_what_is_no_longer_what_it_was(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for run in pair:
        promote(tmp_path, run)
    config = tmp_path / "000001" / "config.json"
    good = config.read_bytes()
    config.write_bytes(good.replace(b"trading", b"tradinG"))
    with pytest.raises(CheckpointError, match="000001 is not the model that"):
        rollback(tmp_path)
    config.write_bytes(good)
    shutil.rmtree(tmp_path / "000001")
    shutil.copytree(tmp_path / "000002", tmp_path / "000001")
    with pytest.raises(CheckpointError):
        rollback(tmp_path)
    assert current_model(tmp_path).name == "000002"
    shutil.rmtree(tmp_path / "000002")
    with pytest.raises(CheckpointError, match="000002"):
        promote(tmp_path, pair[1])
    (tmp_path / "record.jsonl").write_text("{}\n")
    with pytest.raises(CheckpointError, match=r"not a record of models|without a model to go back"):
        current_model(tmp_path)


@pytest.mark.slow
def test_nobody_reads_a_model_that_was_exchanged(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    promote(models, pair[0])
    model = current_model(models)
    shutil.rmtree(model)
    shutil.copytree(pair[1], model)
    seal(model / "checkpoints")  # valid as a run
    (tmp_path / "link").symlink_to(model)
    for path in (model, tmp_path / "link"):
        with pytest.raises(CheckpointError, match="000001 is not the model that"):
            podracer.load(path)
    with pytest.raises(CheckpointError, match="000001 is not the model that"):
        current_model(models)
    for command in ("eval", "backtest"):
        assert exit_code(command, model) == 65
        assert "000001 is not the model that" in capsys.readouterr().err
    shutil.copytree(model, tmp_path / "run")  # a run again, of which no record tells
    assert len(podracer.load(tmp_path / "run")) == 2


@pytest.mark.parametrize("actions", [["rollback"], ["refuse", "rollback"], ["promote", "rollback"]])
def test_a_record_that_goes_back_to_no_model_is_refused(actions: list[str], tmp_path: Path) -> None:
    lines = [
        json.dumps({"action": action, "model": "000001", "files": {}, "window": []}) + "\n"
        for action in actions
    ]
    (tmp_path / "record.jsonl").write_text("".join(lines))
    with pytest.raises(CheckpointError, match="a rollback without a model to go back to"):
        current_model(tmp_path)


# --- what a user gets wrong ----------------------------------------------------------------------


def test_a_copy_is_for_the_same_readers_and_replaces_a_link(tmp_path):
    source, target, other = (tmp_path / name for name in ("source", "target", "other"))
    source.write_text("secret")
    source.chmod(0o600)
    other.write_text("keep")
    target.symlink_to(other)
    delivery.copy_file(source, target)
    assert (target.read_text(), other.read_text()) == ("secret", "keep")
    assert target.stat().st_mode & 0o777 == 0o600
    assert not target.is_symlink()
