"""`podracer check` and `podracer.check_environment`: one report on environments of any kind."""

import dataclasses
import json
from collections import OrderedDict

import gymnasium
import hosts
import jax.numpy as jnp
import numpy as np
import pytest
from child import exit_code
from gymnasium import spaces, wrappers

import podracer
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


class Loud(Walk):
    def observe(self):
        print("loud")
        return super().observe()


class Clock(Walk):
    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)

    def observe(self):
        return np.array([1.7e9 + self.np_random.random()])


class Unseeded(Walk):
    draw = np.random.default_rng()

    def observe(self):
        return self.draw.uniform(-9.0, 9.0, 2).astype(np.float32)


class Fixed(Walk):
    def observe(self):
        return np.zeros(2, np.float32)


class Endless(Walk):
    def step(self, action):
        return self.observe(), 1.0, False, False, {}


class WithoutSeed(Walk):
    def reset(self):
        return Walk.reset(self)


class Raises(Walk):
    def step(self, action):
        raise RuntimeError("the wheel came off")


class Exits(Walk):
    def step(self, action):
        raise SystemExit(0)  # which would count as success


class NotFinite(Walk):
    def step(self, action):
        return np.full(2, np.nan, np.float32), 1.0, False, False, {}


class AnotherShape(Walk):
    def observe(self):
        return np.zeros(3, np.float32)


class Board(Walk):
    observation_space = spaces.Box(0, 255, (3, 3, 1), np.uint8)

    def observe(self):
        return self.np_random.integers(0, 11, (3, 3, 1), dtype=np.uint8)


class Masked(Walk):
    def step(self, action):
        return *super().step(action)[:4], {"action_mask": np.ones(2, np.int8)}


class MaskOfFive(Walk):
    observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(5)})


class MaskOfFloats(MaskOfFive):
    action_space = spaces.Box(-1.0, 1.0, (5,))


class Empty(Walk):
    observation_space = spaces.Box(-9.0, 9.0, (0,))


class Ordered(Walk):
    """Has its entries in another order than JAX sorts them in, one as a list."""

    observation_space = spaces.Dict(
        {x: spaces.Box(-9.0, 9.0, (n,)) for x, n in (("z", 2), ("a", 3))}
    )

    def observe(self):
        position = self.np_random.uniform(-9.0, 9.0, 3).astype(np.float32)
        return OrderedDict(z=position[:2].tolist(), a=position)


def normalized():
    return wrappers.NormalizeObservation(wrappers.TimeLimit(Walk(), 5))


WARNINGS = {
    Outside: ("is not within the observation space",),
    Clock: ("64 bits arrive as 32, which loses", "subtract an offset"),
    Unseeded: ("reset with one seed begin differently", "self.np_random"),
    Fixed: ("two seeds give the same episodes",),
    Endless: ("no episode ended within 1,000 steps", "TimeLimit"),
    Board: ("observation reaches 10, and networks divide it by 255", "Box(0, 10, ...)"),
    Masked: ('info["action_mask"]', "into the observation"),
    normalized: ("NormalizeObservation has running statistics", "`normalize_observations`"),
}
ERRORS = {
    WithoutSeed: ("`reset(seed=seed)` raised TypeError", "keyword argument 'seed'"),
    Exits: ("`step` raised SystemExit: 0 (test_check.py, line ",),
    MaskOfFive: ("['action_mask'] must be bool[2], an entry for each action, but it is bool[5].",),
    MaskOfFloats: ("only discrete actions have an action_mask.",),
    Empty: ("spec.observation has no numbers",),
    Raises: ("`step` raised RuntimeError: the wheel came off (test_check.py, line ",),
    NotFinite: ("`step` returned bad data (not_finite): observation is not finite.",),
    AnotherShape: ("observation must have shape (2,), but has (3,)",),
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


def test_entries_of_an_observation_come_in_any_order_and_as_lists():
    report = podracer.check_environment(Ordered)
    assert report.usable
    assert not any("64 bits" in finding.text for finding in report.findings)


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
        (change(discount=np.zeros(4, np.float32)), "error", "no new episode begins"),
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
    json.dumps(report.to_json(), allow_nan=False)  # what other programs read


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
    assert finding.text == "it does not restart: train in podracer.auto_reset(...)."
    (finding,) = podracer.check_environment(WithoutLast()).findings
    assert finding.text == "it does not restart: train in podracer.auto_reset(...)."
    with pytest.raises(podracer.ConfigError, match="reward is not finite"):
        podracer.check_environment(podracer.auto_reset(Steps(reward=np.inf)))


class Mixing(Steps):
    """Begins an episode in the timestep of a time-out, as Gymnasium's old vector environments."""

    def step(self, key, state, action):
        ended = state >= 2
        timestep = podracer.transition(jnp.zeros(1), jnp.float32(self.reward))
        return jnp.where(ended, 0, state + 1), dataclasses.replace(timestep, first=ended)


class WithoutLast(Steps):
    """Marks a terminal by `discount` alone, after which it goes on."""

    def step(self, key, state, action):
        state, timestep = super().step(key, state, action)
        return state, dataclasses.replace(timestep, last=jnp.bool_(False))


class OutOfValues(Steps):
    @property
    def spec(self):
        states = ArraySpec((), np.int32, num_values=3)
        return EnvironmentSpec("states", states, Discrete(2))

    def reset(self, key):
        return jnp.int32(0), podracer.restart(jnp.int32(0))

    def step(self, key, state, action):
        timestep = podracer.transition(state + 1, jnp.float32(0), terminal=state >= 2)
        return state + 1, timestep


class BelowValues(OutOfValues):
    def step(self, key, state, action):
        return state, podracer.transition(jnp.int32(-1), jnp.float32(0), terminal=True)


def test_episodes_that_mix_and_numbers_without_a_value_are_refused():
    with pytest.raises(podracer.ConfigError, match="`first` is set where no episode ended"):
        podracer.check_environment(Mixing())
    for kind in (OutOfValues, BelowValues):
        env = podracer.auto_reset(kind(), show_terminals=True)
        with pytest.raises(podracer.ConfigError, match="must be 0 to 2, by its num_values of 3"):
            podracer.check_environment(env)


# --- the command ---------------------------------------------------------------------------------


def test_the_command_reports_and_exits(capsys, monkeypatch, tmp_path):
    assert exit_code("check", "catch") == 0
    out = capsys.readouterr().out
    assert out.startswith("catch: usable")
    assert "terminals: " in out
    assert exit_code("check", "test_check:Outside", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["usable"]
    assert {finding["level"] for finding in report["findings"]} == {"warning"}
    assert report["spec"]["observation"] == "float32[2]"
    assert exit_code("check", "hosts:Counters") == 0  # a class of batches, with its defaults
    assert "counter: usable" in capsys.readouterr().out
    assert exit_code("check", "test_check:WithoutSeed", "--json") == 78
    assert not json.loads(capsys.readouterr().out)["usable"]
    assert exit_code("check", "test_check:Loud", "--json") == 0
    out, error = capsys.readouterr()
    assert json.loads(out)["usable"]
    assert "loud" in error
    assert exit_code("check", "gymnasium:NoSuch-v0") == 78
    assert "no environment 'NoSuch-v0'" in capsys.readouterr().out
    assert exit_code("check", "no_module_here:Walk") == 78
    assert "There is no environment 'no_module_here:Walk'" in capsys.readouterr().err


def walk():
    return wrappers.TimeLimit(Walk(), 7)


def steps():
    return podracer.auto_reset(Steps())


def catch_run():
    return podracer.recipes.find("catch")


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("walk", 0, "gymnasium:walk: usable"),
        ("steps", 0, "steps: usable"),
        ("catch_run", 78, "Experiment is no environment, as it has no `spec`; agents and"),
    ],
)
def test_the_command_calls_a_function_that_makes_an_environment(name, code, words, capsys):
    assert exit_code("check", f"test_check:{name}") == code
    assert words in capsys.readouterr().out
