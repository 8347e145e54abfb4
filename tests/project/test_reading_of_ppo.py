"""An update of PPO can be read in one sitting: a reader passes few files, lines and calls.

He reads a function once, with those in it, where it is first called: two changes of file if the
caller is in another one. What JAX calls, bodies of loops and gradient rules, he reads in its place.
"""

import sys
from pathlib import Path

import jax

import podracer
from podracer.recipes import find
from podracer.rollout import init_actor, rollout
from podracer.schedules import over_run

PACKAGE = str(Path(podracer.__file__).parent)


def is_called_by_jax(frame):
    """Equinox and the checks of types may stand between the two."""
    while (frame := frame.f_back) and not frame.f_code.co_filename.startswith(PACKAGE):
        if "/jax/" in frame.f_code.co_filename:
            return True
    return False


def test_an_update_of_ppo_is_short_to_read():
    env, key = podracer.make("cartpole"), jax.random.key(0)
    agent = over_run(find("cartpole_ppo").agent, 1_000).build(env.spec)
    stack, known, changes = [], set(), 0

    def profile(frame, event, _):
        nonlocal changes
        path, function = frame.f_code.co_filename, frame.f_code.co_qualname.split(".<locals>")[0]
        if not path.startswith(PACKAGE) or path.endswith("arguments.py"):  # checks of constructors
            return
        if event == "return":
            stack.pop()
        elif event == "call":
            is_new_file = bool(stack) and stack[-1] != path and (path, function) not in known
            changes += 2 * (is_new_file and not is_called_by_jax(frame))
            stack.append(path)
            known.add((path, function))

    def update(key):
        state, actor = agent.init(key, 8), init_actor(agent, env, jax.random.split(key, 8))
        keys = jax.random.split(key, (2, 32, 8))
        _, trajectory = rollout(agent, env, agent.actor_params(state), actor, *keys)
        sys.setprofile(profile)
        agent.learn(state, trajectory, key, None)
        sys.setprofile(None)

    jax.eval_shape(update, key)
    files = {path for path, _ in known}
    lines = sum(Path(path).read_text().count("\n") for path in files)
    assert len(files) <= 12
    assert lines <= 3_000
    assert changes <= 40
