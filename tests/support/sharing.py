"""Plugin: equal drivers of the tests of a module are traced and compiled once.

Most of a test's time goes into tracing, not into training. A test that patches something has
programs of its own, unless it has the fixture `shared`: then it patches nothing that is traced.
One that reads the log has its own checks.
"""

import functools

import jax
import numpy as np
import pytest

from podracer.drivers import anakin
from podracer.drivers.driver import Driver
from podracer.drivers.sebulba import Sebulba
from podracer.drivers.sebulba import driver as sebulba
from podracer.environment import HostEnvironments
from podracer.envs.host.device import DeviceEnvironments

_drivers, _checked = {}, set()
_fixtures = set()  # of the test that runs


def _is_shared():
    return "shared" in _fixtures or "monkeypatch" not in _fixtures


def _key(*parts):
    """What is equal for equal parts, or nothing for parts that cannot be compared."""
    leaves, structure = jax.tree.flatten(parts)
    arrays = (np.ndarray, jax.Array)
    values = [x.tobytes() if isinstance(x, arrays) and x.size < 10**6 else x for x in leaves]
    kinds = [(type(x), np.shape(x), getattr(x, "dtype", None)) for x in leaves]
    key = structure, *zip(kinds, values, strict=True)
    try:
        hash(key)
    except TypeError:  # a long array, such as a data set
        return None
    return key


def _key_of(driver):
    env, population = driver.env, [vars(driver).get(name) for name in ("pods", "exchange")]
    if isinstance(env, HostEnvironments) and not isinstance(env, DeviceEnvironments):
        env = env.spec  # the programs see no more of it
    is_quick = jax.config.read("jax_disable_most_optimizations")
    parts = (driver.blueprint, driver.config, driver.mesh, driver.num_devices)
    return _key(type(driver), *parts, env, *population, is_quick)


def _share(initialize):
    @functools.wraps(initialize)
    def init(driver, *args):
        initialize(driver, *args)
        if not _is_shared() or (key := _key_of(driver)) is None:
            return
        first = _drivers.setdefault(key, driver)
        driver.init, driver.compile = first.init, first.compile
        if isinstance(driver, Sebulba):
            vars(driver)["actor_programs"] = first.actor_programs

    return init


def _check_once(check):
    @functools.wraps(check)
    def check_agent(blueprint, **shape):
        key = None if "caplog" in _fixtures or not _is_shared() else _key(blueprint, shape)
        if key is None or key not in _checked:
            check(blueprint, **shape)
            _checked.add(key)

    return check_agent


@pytest.fixture
def shared():
    """Share programs although the test patches something, which no program sees."""


@pytest.fixture(autouse=True, scope="module")
def _own_of_this_module():
    yield
    _drivers.clear()
    _checked.clear()


@pytest.fixture(autouse=True)
def _own_of_this_test(request):
    _fixtures.update(request.fixturenames)
    yield
    _fixtures.clear()


Driver.__init__ = _share(Driver.__init__)
anakin.check_agent = _check_once(anakin.check_agent)
sebulba.check_agent = _check_once(sebulba.check_agent)
