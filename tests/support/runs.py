"""Short runs of both drivers, on the smallest environments."""

import contextlib
import threading

import jax
from agents import SMALL, blueprint
from child import records
from hosts import Counters

import podracer
from podracer.agents.impala import Impala
from podracer.devices.mesh import make_mesh
from podracer.drivers.anakin import AnakinConfig, anakin
from podracer.drivers.anakin import check as check_anakin
from podracer.drivers.common import Orders, init_state
from podracer.drivers.sebulba import SebulbaConfig, sebulba, split_devices
from podracer.drivers.sebulba import check as check_sebulba
from podracer.envs import make
from podracer.envs.host.device import DeviceEnvironments
from podracer.io.checkpoint import stored_fingerprint


def anakin_setup(agent, environment="catch", devices=1, **config):
    env = make(environment) if isinstance(environment, str) else environment
    config = AnakinConfig(**{"num_envs": 16, "rollout_length": 8, "updates_per_chunk": 5} | config)
    agent = blueprint(agent, env.spec, config.rollout_length)
    mesh = make_mesh(jax.devices()[:devices])
    check_anakin(agent, env, config, devices)
    return agent, env, mesh, config, init_state(agent, env, mesh, config, jax.random.key(7))


def train_anakin(agent, env, mesh, config, state, num_updates):
    progress = list(anakin(agent, env, mesh, config, state, Orders(num_updates)))
    return progress[-1].state, progress


def sebulba_setup(agent=None, env=None, devices=1, **config):
    """Arguments of `sebulba`; the state includes the actors' if it can be saved."""
    env = Counters() if env is None else env
    defaults = {"num_envs": 16, "rollout_length": 8, "updates_per_chunk": 5, "threads_per_actor": 2}
    config = SebulbaConfig(**defaults | config)
    agent = blueprint(agent or Impala(network=SMALL), env.spec, config.rollout_length)
    split = split_devices(jax.devices()[:devices], config)
    check_sebulba(agent, env, config, split)
    can_resume = isinstance(env, DeviceEnvironments) and config.policy_lag == 0
    saved_env = env.environment if can_resume else None
    state = init_state(agent, saved_env, split.mesh, config, jax.random.key(7))
    return agent, env, split, config, state


def train_sebulba(*parts, num_updates=10, **options):
    progress = sebulba(*parts, Orders(num_updates, **options), seed=7)
    with contextlib.closing(progress):
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
