"""Short runs of both drivers, on the smallest environments."""

import contextlib
import threading

import jax
from agents import SMALL, blueprint
from child import records
from hosts import Counters

import podracer
from podracer.agents.a2c import A2C
from podracer.agents.impala import Impala
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.drivers.progress import Orders
from podracer.drivers.sebulba import Sebulba, SebulbaConfig
from podracer.envs import make
from podracer.io.checkpoint import stored_fingerprint
from podracer.networks import MLP, TorsoNetwork


def small_catch(updates, **fields):
    """Return a run of A2C on Catch in four environments, of so many updates of 16 steps."""
    network = TorsoNetwork(MLP((8,)))
    settings = {"recipe": "catch_a2c", "evaluations": 0, "devices": 1} | fields
    return Experiment(
        environment="catch",
        agent=A2C(network=network),
        driver=AnakinConfig(4, 4, 5),
        frames=updates * 16,
        **settings,
    )


def anakin_setup(agent, environment="catch", devices=1, **config):
    """A driver and its first state."""
    env = make(environment) if isinstance(environment, str) else environment
    config = AnakinConfig(**{"num_envs": 16, "rollout_length": 8, "updates_per_chunk": 5} | config)
    agent = blueprint(agent, env.spec, config.rollout_length)
    driver = Anakin(agent, env, config, jax.devices()[:devices])
    return driver, driver.init(jax.random.key(7))


def train_anakin(driver, state, num_updates):
    progress = list(driver.run(state, Orders(num_updates)))
    return progress[-1].state, progress


def sebulba_setup(agent=None, env=None, devices=1, **config):
    """A driver and its first state, which includes the actors' if it can be saved."""
    env = Counters() if env is None else env
    defaults = {"num_envs": 16, "rollout_length": 8, "updates_per_chunk": 5, "threads_per_actor": 2}
    config = SebulbaConfig(**defaults | config)
    agent = blueprint(agent or Impala(network=SMALL), env.spec, config.rollout_length)
    driver = Sebulba(agent, env, config, jax.devices()[:devices])
    return driver, driver.init(jax.random.key(7))


def train_sebulba(driver, state, num_updates=10, **options):
    with contextlib.closing(driver.run(state, Orders(num_updates, **options))) as progress:
        reports = list(progress)
    return reports[-1].state, reports


def resumed_and_whole(experiment, directory, **first_part):
    """Directories of a run that was resumed after its first part and of one that was not.

    State and records are equal to the byte.
    """
    whole, cut = directory / "whole", directory / "cut"
    podracer.train(experiment, run_dir=whole)
    podracer.train(experiment, run_dir=cut, **first_part)
    podracer.train(experiment, run_dir=cut, resume=True)
    assert stored_fingerprint(cut) == stored_fingerprint(whole)
    assert records(cut) == records(whole)
    return cut, whole


def actor_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("podracer-actor")]
