"""The command `podracer record`, and training from what it writes."""

import json

import gymnasium
import numpy as np
import pytest

import podracer
from podracer.cli.main import main
from podracer.envs.catch import Catch
from podracer.errors import ConfigError
from podracer_offline import Dataset, agreement
from podracer_offline import environment as data_environment
from podracer_offline.environment import replay

MARK = "S3cr3tZq"


class FromOne(gymnasium.Env):
    """Say the number, from 1 to 3, that is shown."""

    observation_space = gymnasium.spaces.Discrete(3, start=1)
    action_space = gymnasium.spaces.Discrete(3, start=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return int(self.np_random.integers(1, 4)), {}

    def step(self, action):
        return int(self.np_random.integers(1, 4)), 1.0, True, False, {}


def call_here(capsys, *arguments):
    """The exit code, the output and the errors of a command in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        main(list(map(str, arguments)))
    return leaving.value.code, *capsys.readouterr()


def test_recorded_episodes_train_a_clone(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    podracer.train("catch_a2c", evaluations=0, run_dir=run)
    monkeypatch.setattr(Catch, "source", "light", raising=False)  # a field of its own
    file, clone = tmp_path / "data.npz", tmp_path / "clone"
    flags = ("--out", file, "--episodes", 50, "--distribution")
    code, out, error = call_here(capsys, "record", run, *flags)
    assert code == 0, error
    assert f"{file}: 50 episodes, 450 transitions, greedy, mean return 1" in out
    data = Dataset.load(file)
    assert data.environment == "catch"
    assert (np.diff(data.ends, prepend=-1) == 9).all()  # the ball falls as many rows
    assert (data.distribution.argmax(axis=1) == data.action).all()
    code, out, error = call_here(
        capsys, "train", "cartpole_cloning", "--environment", f"data:{file}", "--run-dir", clone,
        "--frames", 100_000, "--evaluations", 1,
    )  # fmt: skip
    assert code == 0, error
    code, out, error = call_here(capsys, "eval", clone, "--json")
    assert json.loads(out)["return_mean"] > 0.9
    assert 0.9 < agreement(podracer.load_policy(clone), data) <= 1
    code, out, error = call_here(capsys, "record", clone, "--out", file, "--episodes", 2)
    assert code == 0, error
    assert Dataset.load(file).environment == "catch"
    code, out, error = call_here(capsys, "resume", clone, "--frames", 110_000)
    assert code == 78
    assert "began in another environment, and digest changed since" in error.replace("\n", " ")


def test_a_data_set_goes_on_with_the_secrets_that_its_file_lacks(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(data_environment, "make", lambda *x, **y: made.append((x, y)) or Catch())
    columns = {name: np.array([0, 1]) for name in ("action", "reward", "terminal")}
    name = f"rented,api_key={MARK}"
    data = Dataset(
        observation=np.zeros((2, 10, 5)), environment=name, timeout=np.zeros(2), **columns
    )
    content = data.encode()
    assert MARK.encode() not in content
    (tmp_path / "data.npz").write_bytes(content)
    path = f"{tmp_path}/data.npz"
    with pytest.raises(ConfigError, match=r"'rented,api_key=\[redacted\]', .* add `,api_key=...`"):
        data_environment.data(path)
    replayed = data_environment.data(path, api_key=MARK)
    assert made == [(("rented,api_key=[redacted]",), {"api_key": MARK})]
    assert replayed.source == f"rented,api_key=[redacted],api_key={MARK}"


def test_data_of_an_environment_that_counts_from_one_train_a_policy_in_its_own_numbers(tmp_path):
    numbers, ends = np.arange(30) % 3, np.ones(30, bool)  # from 0 on, as a data set has them
    data = Dataset(observation=numbers, action=numbers, reward=ends, terminal=ends, timeout=~ends)
    result = podracer.train(
        "cartpole_cloning",
        environment=replay(data, podracer.Gymnasium(FromOne, workers=0)),
        frames=20_000,
        evaluations=0,
        run_dir=tmp_path / "run",
    )
    policy = podracer.Policy(result.agent, result.state)
    assert [int(policy(number)) for number in (1, 2, 3)] == [1, 2, 3]
    assert agreement(policy, data) == 1
