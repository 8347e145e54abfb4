"""Plugin: equal drivers are traced and compiled once for all tests of a process.

Most of a test's time goes into tracing, not into training. A test that patches something has
programs of its own, unless it has the fixture `shared`: then it patches nothing that is traced.
So has a module with `OWN_PROGRAMS`, whose fixtures patch. One that reads the log has checks of its
own.
"""

import functools
from collections import OrderedDict

import jax
import numpy as np
import pytest

from podracer.drivers import anakin
from podracer.drivers.driver import Driver
from podracer.drivers.sebulba import Sebulba
from podracer.drivers.sebulba import driver as sebulba
from podracer.environment import HostEnvironments
from podracer.envs.host.device import DeviceEnvironments

MOST = 24  # drivers and checks that are kept, those that were needed last

_programs, _checked = OrderedDict(), OrderedDict()
_fixtures = set()  # of the test that runs
_module = ""  # of that test, if it has programs of its own


def _is_shared():
    return "shared" in _fixtures or "monkeypatch" not in _fixtures


def _kept(cache, key, make):
    """The value of a key, made if it is new."""
    value = cache.pop(key) if key in cache else make()
    cache[key] = value
    if len(cache) > MOST:
        cache.popitem(last=False)
    return value


def _key(*parts):
    """What is equal for equal parts, or nothing for parts that cannot be compared."""
    leaves, structure = jax.tree.flatten(parts)
    values = [
        (x.dtype, x.shape, x.tobytes())
        if isinstance(x, np.ndarray | jax.Array) and x.size < 10**6
        else x
        for x in leaves
    ]
    key = _module, structure, *zip(map(type, leaves), values, strict=True)
    try:
        hash(key)
    except TypeError:  # a long array, such as a data set
        return None
    return key


def _key_of(driver):
    env, population = driver.env, [vars(driver).get(name) for name in ("pods", "exchange")]
    if _is_on_host(env):
        env = env.spec  # the programs see no more of it
    is_quick = jax.config.read("jax_disable_most_optimizations")
    parts = (driver.blueprint, driver.config, driver.mesh, driver.num_devices)
    return _key(type(driver), *parts, env, *population, is_quick)


def _is_on_host(env):
    return isinstance(env, HostEnvironments) and not isinstance(env, DeviceEnvironments)


def _programs_of(driver):
    programs = {"init": driver.init, "compile_in_thread": driver.compile_in_thread}
    if isinstance(driver, Sebulba):
        programs["actor_programs"] = driver.actor_programs
    if not _is_on_host(driver.env):
        programs["evaluator"] = functools.cache(functools.partial(_evaluator, driver))
    return programs


def _evaluator(driver, *args, **options):
    """An evaluator whose program is compiled once: all states of a driver have equal shapes."""
    evaluator = type(driver).evaluator(driver, *args, **options)
    compiled = []

    def lower(*args):
        if not compiled:
            compiled.append(functools.cache(type(evaluator).lower(evaluator, *args)))
        return compiled[0]

    object.__setattr__(evaluator, "lower", lower)
    return evaluator


def _share(initialize):
    @functools.wraps(initialize)
    def init(driver, *args):
        initialize(driver, *args)
        if _is_shared() and (key := _key_of(driver)) is not None:
            vars(driver).update(_kept(_programs, key, lambda: _programs_of(driver)))

    return init


def _check_once(check):
    @functools.wraps(check)
    def check_agent(blueprint, **shape):
        key = None if "caplog" in _fixtures or not _is_shared() else _key(blueprint, shape)
        if key is None:
            check(blueprint, **shape)
        else:
            _kept(_checked, key, lambda: check(blueprint, **shape))

    return check_agent


@pytest.fixture
def shared():
    """Share programs although the test patches something, which no program sees."""


@pytest.fixture(autouse=True)
def _own_of_this_test(request):
    global _module
    _fixtures.update(request.fixturenames)
    _module = request.module.__name__ if hasattr(request.module, "OWN_PROGRAMS") else ""
    yield
    _fixtures.clear()


Driver.__init__ = _share(Driver.__init__)
anakin.check_agent = _check_once(anakin.check_agent)
sebulba.check_agent = _check_once(sebulba.check_agent)
