"""The Catch experiment of the notebook published with Podracer, at its exact settings.

128 environments a device, 16 steps an update, 100 updates a dispatch, one hidden layer of 256,
lambda 0.99, Adam 1e-4; steps are devices x updates x 16 x batch, as the notebook counts them.
Compared with the notebook's structure, and with the floor: the matrix products of one update and
nothing else. Then sweeps over the batch, the updates in a dispatch, and the devices.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from harness import Contender, anakin, compare, here, parse, parser
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer.agents.q_lambda import QLambda
from podracer.devices.mesh import find_devices, make_mesh
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.envs import make
from podracer.envs.catch import Catch

BATCH, LENGTH, UPDATES = 128, 16, 100
INPUTS, HIDDEN, ACTIONS = 50, 256, 3
LAMBDA, LEARNING_RATE = 0.99, 1e-4


def ours(name: str, fused: bool, devices: int, batch: int = BATCH, updates: int = UPDATES):
    config = AnakinConfig(batch * devices, LENGTH, updates, fused=fused)
    return anakin(name, QLambda(), make("catch"), config, devices)


# --- the notebook's structure --------------------------------------------------------------------


def init_params(key: jax.Array) -> dict[str, jax.Array]:
    one, two = jax.random.split(key)
    return {
        "w1": jax.random.normal(one, (INPUTS, HIDDEN)) / INPUTS**0.5,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(two, (HIDDEN, ACTIONS)) / HIDDEN**0.5,
        "b2": jnp.zeros(ACTIONS),
    }


def action_values(params: dict[str, jax.Array], observation: jax.Array) -> jax.Array:
    """One environment's `[10, 5]` to `[3]`."""
    hidden = jax.nn.relu(observation.reshape(-1) @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def notebook_loss(params: Any, env_state: Any, timestep: Any, key: jax.Array):
    """The TD(lambda) loss of 16 greedy steps of one environment, and where it then stands."""

    def step(carry: tuple[Any, Any], key: jax.Array):
        env_state, timestep = carry
        q = action_values(params, timestep.observation)
        action = jnp.argmax(q).astype(jnp.int32)
        env_state, after = Catch().step(key, env_state, action)
        return (env_state, after), (q[action], after.reward, after.discount)

    keys = jax.random.split(key, LENGTH)
    (env_state, timestep), (qa, reward, discount) = jax.lax.scan(step, (env_state, timestep), keys)
    last = jnp.max(action_values(params, timestep.observation))
    next_value = jax.lax.stop_gradient(jnp.append(qa[1:], last))

    def target(after: jax.Array, inputs: tuple[jax.Array, ...]):
        reward, discount, value = inputs
        value = reward + discount * ((1 - LAMBDA) * value + LAMBDA * after)
        return value, value

    _, targets = jax.lax.scan(target, next_value[-1], (reward, discount, next_value), reverse=True)
    return jnp.mean((jax.lax.stop_gradient(targets) - qa) ** 2), (env_state, timestep)


def notebook_unit(optimizer: Any, state: Any) -> Any:
    """One environment's rollout and update: everything, parameters too, is this environment's own
    copy, and only the means of the gradients keep the copies equal."""
    params, optimizer_state, env_state, timestep, key = state
    key, use = jax.random.split(key)
    grads, (env_state, timestep) = jax.grad(notebook_loss, has_aux=True)(
        params, env_state, timestep, use
    )
    grads = jax.lax.pmean(jax.lax.pmean(grads, "batch"), "device")
    updates, optimizer_state = optimizer.update(grads, optimizer_state)
    params = optax.apply_updates(params, updates)
    return params, optimizer_state, env_state, timestep, key


def notebook(devices: int) -> Contender:
    mesh = Mesh(find_devices(devices), ("device",))
    optimizer = optax.adam(LEARNING_RATE)

    def init(key: jax.Array) -> Any:
        params = init_params(jax.random.key(42))
        env_state, timestep = Catch().reset(key)
        return params, optimizer.init(params), env_state, timestep, jax.random.fold_in(key, 1)

    def chunk(state: Any) -> Any:
        unit = jax.vmap(partial(notebook_unit, optimizer), axis_name="batch")
        return jax.lax.fori_loop(0, UPDATES, lambda _, state: unit(state), state)

    spec = PartitionSpec("device")
    keys = jax.random.split(jax.random.key(0), BATCH * devices)
    state = jax.jit(jax.vmap(init), out_shardings=NamedSharding(mesh, spec))(keys)
    program = jax.shard_map(chunk, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    steps = BATCH * devices * LENGTH * UPDATES
    return here("notebook structure", jax.jit(program), state, steps, devices=devices)


# --- the floor -----------------------------------------------------------------------------------


def product(x: jax.Array, g: jax.Array, turned: bool) -> jax.Array:
    """The weights' gradient `x' g`. XLA has a faster product on CPU for an operand that already
    lies transposed; the barrier keeps it from being folded back."""
    if not turned:
        return x.T @ g
    if x.shape[1] <= g.shape[1]:
        return jax.lax.optimization_barrier(x.T) @ g
    return jax.lax.optimization_barrier(jax.lax.optimization_barrier(g.T) @ x).T


def each_step(turned: bool, params: tuple[jax.Array, jax.Array], xs: jax.Array):
    """Forward and backward products of each step of an update; each step's weights hang on those
    of the one before, so that no product can be left out, merged or moved."""

    def step(params: tuple[jax.Array, jax.Array], x: jax.Array):
        w1, w2 = params
        hidden = x @ w1
        q = hidden @ w2
        g = q @ w2.T
        return (w1 - 1e-9 * product(x, g, turned), w2 - 1e-9 * product(hidden, q, turned)), None

    return jax.lax.scan(step, params, xs)[0]


def at_once(turned: bool, params: tuple[jax.Array, jax.Array], xs: jax.Array):
    """The same, with the backward products of all steps as one."""

    def step(offset: jax.Array, x: jax.Array):
        hidden = (x + offset) @ params[0]
        q = hidden @ params[1]
        return q[0, 0] * 1e-9, (hidden, q)

    _, (hidden, q) = jax.lax.scan(step, jnp.float32(0), xs)
    x, hidden, q = (z.reshape(-1, z.shape[-1]) for z in (xs, hidden, q))
    g = q @ params[1].T
    w1 = params[0] - 1e-9 * product(x, g, turned)
    return w1, params[1] - 1e-9 * product(hidden, q, turned)


def floor(name: str, update: Any, devices: int) -> Contender:
    """100 updates' products on every device, forward and backward, at the experiment's shapes."""
    mesh = make_mesh(find_devices(devices))

    def chunk(state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        params, xs = state
        return jax.lax.fori_loop(0, UPDATES, lambda _, p: update(p, xs), params), xs

    params = init_params(jax.random.key(0))
    xs = jax.random.uniform(jax.random.key(1), (LENGTH, BATCH, INPUTS))
    whole = PartitionSpec()
    program = jax.shard_map(chunk, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    steps = BATCH * devices * LENGTH * UPDATES
    return here(name, jax.jit(program), ((params["w1"], params["w2"]), xs), steps, devices=devices)


# --- the measurements ----------------------------------------------------------------------------


def main() -> None:
    options = parse(parser(__doc__, devices=2))
    updates = 2 if options.quick else UPDATES
    settings = {"batch": BATCH, "length": LENGTH, "updates": UPDATES}
    for devices in sorted({1, options.devices}):
        contenders = [
            ours("ours, fused", True, devices, updates=updates),
            ours("ours, two passes", False, devices, updates=updates),
            notebook(devices),
            floor("products, each step", partial(each_step, False), devices),
            floor("products, each step, turned", partial(each_step, True), devices),
            floor("products, at once", partial(at_once, False), devices),
            floor("products, at once, turned", partial(at_once, True), devices),
        ]
        results = compare("catch", {**settings, "devices": devices}, contenders, options)
        floor_result = max(results[3:], key=lambda result: result.rate())
        print(
            f"\nOn {devices} device(s): {results[0].ratio(results[2]):.1f} times the notebook's "
            f"structure, {100 * results[0].ratio(floor_result):.0f} % of the floor "
            f"({floor_result.contender.name})."
        )

    batches = (32, 128) if options.quick else (32, 64, 128, 256, 512, 1024)
    sweep = [ours(f"batch {n}", True, options.devices, n, updates) for n in (BATCH, *batches)]
    compare("catch batch", {"devices": options.devices}, sweep[1:], options)
    chunks = (1, 10, 100)
    sweep = [chunked(n, options.devices, 1 if options.quick else 300 // n) for n in chunks]
    compare("catch chunk", {"devices": options.devices}, sweep, options)
    sweep = [ours(f"devices {n}", True, n, BATCH, updates) for n in range(1, options.devices + 1)]
    compare("catch devices", {"batch": BATCH}, sweep, options)


def chunked(updates: int, devices: int, calls: int) -> Contender:
    """As many updates a repetition, in dispatches of more or fewer of them."""
    from anakin_parts import training

    config = AnakinConfig(BATCH * devices, LENGTH, updates, fused=True)
    program, state = training(Anakin(QLambda(), make("catch"), config, find_devices(devices)))
    steps = config.steps_per_update * updates
    return here(f"chunk {updates}", program, state, steps, calls=calls, devices=devices)


if __name__ == "__main__":
    main()
