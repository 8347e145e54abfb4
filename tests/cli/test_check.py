"""`podracer check` and `podracer.check_environment`: one report on environments of any kind."""

import dataclasses
import json

import gymnasium
import hosts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces, wrappers

import podracer
from podracer.cli.main import main
from podracer.types import ArraySpec, Discrete, EnvironmentSpec


class Walk(gymnasium.Env):
    """An environment without a fault, in which each subclass makes one."""

    observation_space: spaces.Space = spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = spaces.Discrete(2, start=4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.time += 1
        return self.observe(), 1.0, self.time == 12, self.time == 10, {}

    def observe(self):
        return self.np_random.uniform(-9.0, 9.0, 2).astype(np.float32)


class Outside(Walk):
    def observe(self):
        return super().observe() + np.float32(7)


class AnotherDtype(Walk):
    def observe(self):
        return super().observe().astype(np.float64)


class Clock(Walk):
    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)

    def observe(self):
        return np.array([1.7e9 + self.np_random.random()])


class Unseeded(Walk):
    draw = np.random.default_rng()

    def observe(self):
        return self.draw.uniform(-9.0, 9.0, 2).astype(np.float32)


class LaterUnseeded(Unseeded):
    def observe(self):
        return Unseeded.observe(self) if self.time else Walk.observe(self)


class Fixed(Walk):
    def observe(self):
        return np.zeros(2, np.float32)


class Endless(Walk):
    def step(self, action):
        return self.observe(), 1.0, False, False, {}


class BooleanReward(Endless):
    def step(self, action):
        return self.observe(), np.bool_(True), False, False, {}


class WithoutSeed(Walk):
    def reset(self):
        return Walk.reset(self)


class OldStep(Walk):
    def step(self, action):
        return self.observe(), 1.0, False, {}


class Raises(Walk):
    def step(self, action):
        raise RuntimeError("the wheel came off")


class NotFinite(Walk):
    def step(self, action):
        return np.full(2, np.nan, np.float32), 1.0, False, False, {}


class RewardOfOne(Walk):
    def step(self, action):
        return self.observe(), np.ones(1), False, False, {}


class AnotherShape(Walk):
    def observe(self):
        return np.zeros(3, np.float32)


class Pixels(Walk):
    observation_space = spaces.Box(0, 9, (2,), np.int64)

    def observe(self):
        return np.array([3, 10])


class Board(Walk):
    observation_space = spaces.Box(0, 255, (3, 3, 1), np.uint8)

    def observe(self):
        return self.np_random.integers(0, 11, (3, 3, 1), dtype=np.uint8)


class FloatImage(Walk):
    observation_space = spaces.Box(0, 255, (3, 3, 1), np.float32)

    def observe(self):
        return self.np_random.uniform(0, 255, (3, 3, 1)).astype(np.float32)


class Global(Walk):
    def observe(self):
        return np.random.uniform(-9.0, 9.0, 2).astype(np.float32)  # noqa: NPY002


class Masked(Walk):
    def step(self, action):
        return *super().step(action)[:4], {"action_mask": np.ones(2, np.int8)}


class MaskedByMethod(Walk):
    def action_masks(self):
        return np.ones(2, bool)


def normalized():
    return wrappers.NormalizeObservation(wrappers.TimeLimit(Walk(), 5))


class NoSpace(Walk):
    action_space = None


WARNINGS = {
    Outside: ("is not within the observation space",),
    AnotherDtype: ("dtype to be float32, actual type: float64",),
    Clock: ("64 bits arrive as 32, which loses", "subtract an offset"),
    Unseeded: ("reset with one seed begin differently", "self.np_random"),
    LaterUnseeded: ("with one seed and the same actions differ from step 1 on",),
    Fixed: ("two seeds give the same episodes",),
    Endless: ("no episode ended within 1,000 steps", "TimeLimit"),
    BooleanReward: ("reward returned by `step()` must be a float", "bool"),
    Board: ("observation reaches 10, and networks divide it by 255", "Box(0, 10, ...)"),
    FloatImage: ("networks take it as it is", "uint8"),
    Global: ("reset with one seed begin differently", "self.np_random"),
    Masked: ('info["action_mask"]', "into the observation"),
    MaskedByMethod: ("action_masks()", "into the observation"),
    normalized: ("NormalizeObservation has running statistics", "`normalize_observations`"),
}
ERRORS = {
    WithoutSeed: ("`reset(seed=seed)` raised TypeError", "keyword argument 'seed'"),
    OldStep: ("`step` returned bad data (malformed): step() did not return five values.",),
    Raises: ("`step` raised RuntimeError: the wheel came off (test_check.py, line ",),
    NotFinite: ("`step` returned bad data (not_finite): observation is not finite.",),
    RewardOfOne: ("(wrong_shape): reward must have shape (), but has (1,): ",),
    AnotherShape: ("observation must have shape (2,), but has (3,)",),
    Pixels: ("(out_of_space): observation exceeds its space's bounds",),
    NoSpace: ("NoSpace has no action_space",),
}


def test_an_environment_without_a_fault_is_usable():
    report = podracer.check_environment(Walk)
    assert report.usable
    assert not report.findings
    assert report.figures["steps of random play"] == 1000
    assert (report.figures["terminals"], report.figures["time-outs"]) == (0, 91)
    assert report.figures["mean return"] == 10.0
    assert report.figures["steps a second of one environment"] > 0
    assert report.spec == podracer.Gymnasium(Walk).spec
    assert "no errors and no warnings" in str(report)


def test_who_trains_is_told_of_running_statistics_too(caplog):
    def fresh():
        return wrappers.NormalizeReward(Walk())

    podracer.Gymnasium(fresh, workers=0)
    assert "NormalizeReward has running statistics (`return_rms`)" in caplog.text

    def frozen():
        env = wrappers.NormalizeReward(Walk())
        env.update_running_mean = False
        return env

    caplog.clear()
    assert not podracer.check_environment(podracer.Gymnasium(frozen, workers=0)).findings
    assert not caplog.text


@pytest.mark.parametrize("kind", WARNINGS, ids=lambda kind: kind.__name__)
def test_what_an_agent_can_bear_is_a_warning(kind):
    report = podracer.check_environment(podracer.Gymnasium(kind))
    assert report.usable
    texts = [finding.text for finding in report.findings]
    assert any(all(word in text for word in WARNINGS[kind]) for text in texts), texts


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_what_no_agent_can_bear_is_refused(kind):
    with pytest.raises(podracer.ConfigError) as refusal:
        podracer.check_environment(kind)
    for word in ERRORS[kind]:
        assert word in str(refusal.value)


def test_a_class_that_other_processes_cannot_find_is_checked_and_told():
    class Local(Walk):
        pass

    (finding,) = podracer.check_environment(Local).findings
    assert finding.level == "warning"
    assert "take workers=0" in finding.text


# --- host environments ---------------------------------------------------------------------------


def change(**fields):
    return lambda batch, timestep: dataclasses.replace(timestep, **fields)


def unseeded(batch, timestep):
    noise = np.random.default_rng().random(timestep.observation.shape)
    return dataclasses.replace(timestep, observation=noise.astype(np.float32))


@pytest.mark.parametrize(
    ("trouble", "level", "words"),
    [
        (change(reward=np.full(4, np.nan, np.float32)), "error", "reward is not finite"),
        (change(reward=np.zeros(4)), "error", "reward must be float32[4], but it became float64"),
        (change(last=np.ones(4, bool), first=np.zeros(4, bool)), "error", "no new episode begins"),
        (unseeded, "warning", "two batches with one seed and the same actions differ from step 1"),
    ],
)
def test_the_faults_of_a_host_environment(trouble, level, words):
    report = podracer.check_environment(hosts.Counters())
    assert report.usable
    assert report.figures["terminals"] > report.figures["time-outs"] > 0
    from podracer.run.environment_check import examine

    report = examine(hosts.Counters(trouble))
    assert any(x.level == level and words in x.text for x in report.findings), report
    assert report.usable == (level != "error")
    assert hosts.CounterBatch.open == 0


def test_a_host_environment_that_raises_is_refused():
    def trouble(batch, timestep):
        raise RuntimeError("no wheel")

    with pytest.raises(podracer.ConfigError, match="counter raised RuntimeError: no wheel"):
        podracer.check_environment(hosts.Counters(trouble))


# --- environments in JAX -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Steps:
    """Ends after three steps and does not restart."""

    reward: float = 1.0

    @property
    def spec(self):
        return EnvironmentSpec("steps", ArraySpec((1,)), Discrete(2))

    def reset(self, key):
        return jnp.int32(0), podracer.restart(jnp.zeros(1))

    def step(self, key, state, action):
        ended = state >= 2
        reward = jnp.float32(self.reward)
        return state + 1, podracer.transition(jnp.zeros(1), reward, terminal=ended)


def test_an_environment_in_jax_is_played_too():
    report = podracer.check_environment(podracer.auto_reset(Steps()))
    assert not report.findings
    assert report.figures["terminals"] == 64 * (200 // 3)
    (finding,) = podracer.check_environment(Steps()).findings
    assert finding.text == "it does not restart by itself: train in podracer.auto_reset(...)."
    with pytest.raises(podracer.ConfigError, match="reward is not finite"):
        podracer.check_environment(podracer.auto_reset(Steps(reward=np.inf)))


@dataclasses.dataclass(frozen=True)
class Bytes:
    board: ArraySpec
    most: int = 1

    @property
    def spec(self):
        return EnvironmentSpec("board", self.board, Discrete(2))

    def reset(self, key):
        return jnp.int32(0), podracer.restart(self.observe())

    def step(self, key, state, action):
        return state + 1, podracer.transition(self.observe(), 1.0, terminal=state >= 2)

    def observe(self):
        return jnp.full(self.board.shape, self.most, jnp.uint8)


def test_the_scale_of_bytes_is_told():
    def findings(shape, most, **settings):
        board = Bytes(ArraySpec(shape, np.uint8, **settings), most)
        report = podracer.check_environment(podracer.auto_reset(board))
        assert ("divided by 255" in str(report)) == report.spec.observation.scaled
        return [finding.text for finding in report.findings]

    assert not findings((4,), 1)
    assert not findings((2, 2, 1), 200)
    assert not findings((2, 2, 1), 1, scaled=False)
    assert "reaches 1, and networks divide it by 255" in findings((2, 2, 1), 1)[0]
    assert "networks take it as it is" in findings((4,), 200)[0]
    with pytest.raises(podracer.ConfigError, match="only uint8 can be `scaled`"):
        podracer.check_environment(Bytes(ArraySpec((4,), scaled=True)))


def test_what_can_be_traced_alone_is_refused_before_a_compile(monkeypatch):
    broken = dataclasses.replace(Steps())
    monkeypatch.setattr(Steps, "reset", lambda self, key: (jnp.int32(0), jnp.zeros(1)))
    monkeypatch.setattr(jax, "jit", None)
    with pytest.raises(podracer.ConfigError, match="`reset` must return"):
        podracer.check_environment(broken)


# --- the command ---------------------------------------------------------------------------------


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(["check", *arguments])
    return stop.value.code


def test_the_command_reports_and_exits(capsys, monkeypatch, tmp_path):
    assert run("catch") == 0
    out = capsys.readouterr().out
    assert out.startswith("catch: usable")
    assert "terminals: " in out
    assert run("test_check:Outside", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["usable"]
    assert {finding["level"] for finding in report["findings"]} == {"warning"}
    assert report["spec"]["observation"] == "float32[2]"
    assert run("hosts:Counters") == 0  # a class of batches, with its defaults
    assert "counter: usable" in capsys.readouterr().out
    assert run("test_check:WithoutSeed", "--json") == 78
    assert not json.loads(capsys.readouterr().out)["usable"]
    assert run("gymnasium:NoSuch-v0") == 78
    assert "no environment 'NoSuch-v0'" in capsys.readouterr().out
    assert run("no_module_here:Walk") == 78
    assert "There is no environment 'no_module_here:Walk'" in capsys.readouterr().err
