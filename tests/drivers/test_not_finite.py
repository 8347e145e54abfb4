"""Values that are not finite: caught in the update that they come up in, and never saved."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hosts import Counters

import podracer
from podracer.agents.impala import Impala
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.sebulba import SebulbaConfig
from podracer.errors import NonFiniteError
from podracer.fields import static
from podracer.networks import MLP, TorsoNetwork
from podracer.run.sweep import make_pods

STEPS = 16 * 8


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


BAD = 8  # the update in which a value turns bad
DRIVERS = {
    "anakin": AnakinConfig(16, 8, 2),
    "sebulba": SebulbaConfig(16, 8, 2, threads_per_actor=1),
}


@podracer.struct
class Poisoned:
    """Impala in which one part of what an update returns turns bad."""

    site: str = static(default="")

    def build(self, spec, context):
        impala = Impala(network=TorsoNetwork(MLP((16,)))).build(spec, context)

        def learn(*args):
            state, metrics = impala.learn(*args)
            is_bad = state.shared.frames == BAD * STEPS

            def poison(x):
                is_float = jnp.issubdtype(x.dtype, jnp.floating)
                return jnp.where(is_bad, jnp.full_like(x, jnp.nan), x) if is_float else x

            if self.site in metrics:
                metrics = {**metrics, self.site: jax.tree.map(poison, metrics[self.site])}
            elif self.site:
                part = jax.tree.map(poison, getattr(state.shared, self.site))
                shared = dataclasses.replace(state.shared, **{self.site: part})
                state = dataclasses.replace(state, shared=shared)
            return state, metrics

        return dataclasses.replace(impala, learn=learn)


class PoisonedCatch:
    """Catch in which one field of about one timestep in a thousand is infinite."""

    def __init__(self, field):
        self.inner, self.field = podracer.make("catch"), field
        self.spec, self.reset = self.inner.spec, self.inner.reset

    def step(self, key, state, action):
        state, timestep = self.inner.step(key, state, action)
        value, is_bad = getattr(timestep, self.field), jax.random.bits(key) < 2**32 // 1000
        value = jnp.where(is_bad, jnp.full_like(value, jnp.inf), value)
        return state, dataclasses.replace(timestep, **{self.field: value})


def experiment(driver, environment="catch", site=""):
    agent = Poisoned(site)
    return Experiment(
        environment=environment, agent=agent, driver=DRIVERS[driver], frames=100 * STEPS,
        evaluations=0, save_seconds=0.0, devices=1,
    )  # fmt: skip


def check_stopped(run, experiment, name):
    """The run ends with the update and the name, and what is saved is finite and from before."""
    with pytest.raises(NonFiniteError) as raised:
        podracer.train(experiment, run_dir=run)
    update = int(re.search(r"update (\d+): not finite", str(raised.value))[1])
    assert name in str(raised.value)
    assert json.loads((run / "crash.json").read_text())["code"] == 70
    saved = [int(path.name) for path in (run / "checkpoints").glob("[0-9]*")]
    assert max(saved) == (update - 1) // 2 * 2  # each chunk was saved, but the one with the update
    check_finite(run, experiment)
    return update


def check_finite(run, experiment):
    _, state = podracer.load(run, recipe=experiment)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.shared))
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert np.isfinite(json.loads(line)["loss"])


@pytest.mark.slow
@pytest.mark.figure(9)
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("site", "name"),
    [
        ("loss", "loss"),
        ("gradient_norm", "gradient"),
        ("params", "gradient"),
        ("optimizer_state", "gradient"),
    ],
)
def test_an_update_that_is_not_finite_is_neither_applied_nor_saved(driver, site, name, tmp_path):
    assert check_stopped(tmp_path / "run", experiment(driver, site=site), name) == BAD


@pytest.mark.figure(9)
@pytest.mark.parametrize(
    ("driver", "site", "message"),
    [
        ("anakin", "params", r"gradient \(first shared\.params.*\.weight\)"),
        ("sebulba", "policy_loss", r"loss \(first policy_loss\)\. The update"),
        slow("anakin", "loss", r"loss\. The update"),
        slow("sebulba", "gradient_norm", r"gradient \(first gradient_norm\)\. The update"),
    ],
)
def test_what_is_not_finite_is_named(driver, site, message, tmp_path):
    with pytest.raises(NonFiniteError, match=rf"update {BAD}: not finite: {message}"):
        podracer.train(experiment(driver, site=site), run_dir=tmp_path / "run")


@pytest.mark.parametrize("driver", ["anakin", "sebulba", slow("population")])
def test_a_diagnostic_that_is_not_finite_ends_no_run(driver, tmp_path, caplog):
    """It is null in the record of its chunk, and a warning names it once."""
    pods = make_pods({}, range(2), 0, 0) if driver == "population" else ()
    run, bad = tmp_path / "run", experiment(driver.replace("population", "anakin"), site="entropy")
    bad = dataclasses.replace(bad, frames=(BAD + 6) * STEPS, pods=pods)
    assert podracer.train(bad, run_dir=run).exit_code == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["updates"] for r in records if r["entropy"] is None] == [BAD]
    assert records[-1]["updates"] == BAD + 6
    (warning,) = (text for text in caplog.messages if "not finite" in text)
    assert f"update {BAD}: the metric 'entropy' is not finite" in warning


@pytest.mark.slow
@pytest.mark.figure(9)
@pytest.mark.parametrize("field", ["reward", "observation"])
def test_data_of_a_device_environment_that_is_not_finite_is_never_learned_from(field, tmp_path):
    check_stopped(tmp_path / "run", experiment("anakin", PoisonedCatch(field)), field)


@pytest.mark.slow
@pytest.mark.figure(9)
@pytest.mark.parametrize("field", ["reward", "observation"])
def test_data_of_a_host_environment_that_is_not_finite_costs_its_episode_only(field, tmp_path):
    def trouble(batch, timestep):
        if batch.steps == 60:
            getattr(timestep, field)[3] = np.nan
        return timestep

    run, bad = tmp_path / "run", experiment("sebulba", Counters(trouble))
    assert podracer.train(bad, run_dir=run).exit_code == 0
    check_finite(run, bad)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["frames"] >= bad.frames
    assert last["environment_faults"] == 1
