"""Steps per second of every agent on both architectures; SAC and DQN against sbx; MuZero's search
against mctx called alone.

`--figure` chooses: `agents`, `sbx` (beside sbx with `--sbx PYTHON`, one that has it), `search`.
"""

from __future__ import annotations

import dataclasses
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mctx
from harness import anakin, append, compare, elsewhere, here, parse, parser

from podracer import envs
from podracer.agent import Agent, Blueprint
from podracer.agents.a2c import A2C
from podracer.agents.ddpg import DDPG, td3
from podracer.agents.dqn import DQN, rainbow
from podracer.agents.impala import Impala
from podracer.agents.muzero import MuZero
from podracer.agents.ppo import PPO
from podracer.agents.q_lambda import QLambda
from podracer.agents.r2d2 import R2D2
from podracer.agents.sac import SAC
from podracer.agents.stacx import Stacx
from podracer.devices.mesh import find_devices
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.sebulba import Sebulba, SebulbaConfig
from podracer.networks import MLP, TorsoNetwork
from podracer.replay import Replay
from podracer.rollout import init_actor
from podracer.types import Continuous
from podracer_plan import trials

ENVS, T, CHUNK = 64, 16, 20
NETWORK = TorsoNetwork(MLP((64, 64)))
REPLAY = Replay(100_000, batch_size=256, updates_per_rollout=1, warmup=0)
PRIORITIZED = dataclasses.replace(REPLAY, prioritized=True)
CARTPOLE = {
    "greedy Q(λ)": QLambda(network=NETWORK),
    "A2C": A2C(network=NETWORK),
    "IMPALA": Impala(network=NETWORK),
    "STACX": Stacx(network=NETWORK),
    "PPO": PPO(network=NETWORK),
    "DQN": DQN(network=NETWORK, replay=REPLAY),
    "Rainbow": rainbow(network=TorsoNetwork(MLP((64,))), stream_hidden=(64,), replay=PRIORITIZED),
    "R2D2": R2D2(replay=dataclasses.replace(PRIORITIZED, batch_size=64)),
    "MuZero": MuZero(replay=PRIORITIZED),
}
PENDULUM = {
    "DDPG": DDPG(network=NETWORK, replay=REPLAY),
    "TD3": td3(network=NETWORK, replay=REPLAY),
    "SAC": SAC(network=NETWORK, replay=REPLAY),
}


def agents(options: Any) -> None:
    for environment, some in (("cartpole", CARTPOLE), ("pendulum", PENDULUM)):
        env = envs.make(environment)
        for name, agent in list(some.items())[: 1 if options.quick else None]:
            settings = {"environment": environment, "num_envs": ENVS, "rollout_length": T}
            contender = anakin(name, agent, env, AnakinConfig(ENVS, T, CHUNK))
            rate = statistics.median(
                contender.steps / contender.lap().seconds for _ in range(options.repetitions)
            )
            config = SebulbaConfig(ENVS, T, CHUNK, threads_per_actor=1, env_threads=1)
            driver = Sebulba(agent, env, config, find_devices(1))
            served, _ = trials.measure(driver, options.seconds)
            print(
                f"{name:14}{environment:10}{rate:>12,.0f} Anakin{served:>12,.0f} Sebulba",
                flush=True,
            )
            record = {"benchmark": "Agents", "agent": name, **settings}
            record |= {"anakin_steps_per_second": rate, "sebulba_steps_per_second": served}
            append(options.out, record)


def sbx(options: Any) -> None:
    peer = options.sbx and [str(options.sbx), str(Path(__file__).with_name("peers.py")), "sbx"]
    num = 4
    for name, environment, width, steps in (
        ("sac", "pendulum", 256, 1000),
        ("sac", "pendulum", 64, 4000),
        ("dqn", "cartpole", 256, 2000),
        ("dqn", "cartpole", 64, 8000),
    ):
        steps = 4 * num if options.quick else steps
        env = envs.make(environment)
        common = {
            "network": TorsoNetwork(MLP((width, width))),
            "replay": Replay(100_000, batch_size=256, updates_per_rollout=num, warmup=1000),
        }
        agent = SAC(random_frames=1000, **common) if name == "sac" else DQN(double=False, **common)
        ours = anakin("podracer, Anakin", agent, env, AnakinConfig(num, 1, steps // num))
        ours.lap()  # past its warm-up
        more = {"agent": name, "envs": num, "steps": steps, "hidden": f"{width} {width}"}
        flags = [part for key, value in more.items() for part in (f"--{key}", *str(value).split())]
        theirs = [elsewhere("sbx", [*peer, *flags])] if peer else []
        settings = {
            "environments": num, "batch": 256, "hidden": f"{width} x {width}",
            "updates_per_step": 1,
        }  # fmt: skip
        compare(f"{name.upper()} against sbx", settings, [ours, *theirs], options)


def search(options: Any) -> None:
    """Ours acts: representation, search and the rest; theirs is the search over the same model,
    for the whole batch in one call."""
    env = envs.make("cartpole")
    for simulations in (16, 64):
        settings = MuZero(num_simulations=simulations, replay=REPLAY)
        agent = Blueprint(settings, env.spec).build()
        keys = jax.random.split(jax.random.key(0), ENVS)
        params = agent.init(jax.random.key(0), ENVS).shared.params
        timestep = init_actor(agent, env, keys).timestep
        space = agent.spec.action
        assert not isinstance(space, Continuous)

        def act(state: Any, agent: Agent = agent, timestep: Any = timestep) -> Any:
            params, key, _ = state
            key, now = jax.random.split(key)
            action, _, _ = agent.act(params, (), timestep, jax.random.split(now, ENVS), True)
            return params, key, action

        built: Any = getattr(agent.act, "__self__")  # noqa: B009, the private dataclass

        def alone(
            state: Any, built: Any = built, settings: MuZero = settings, timestep: Any = timestep
        ) -> Any:
            params, key, _ = state
            key, now = jax.random.split(key)
            root = built.model.root(params, timestep.observation, now)
            step = partial(built.model.step, built.next_discount)
            policy_output = mctx.gumbel_muzero_policy(
                params, now, root, step, settings.num_simulations,
                max_num_considered_actions=settings.max_considered_actions,
            )  # fmt: skip
            return params, key, policy_output.action.astype(jnp.int32)

        contenders = []
        for name, program in (("podracer's act", act), ("mctx alone", alone)):
            state = (params, jax.random.key(1), jnp.zeros(ENVS, jnp.int32))
            state = jax.tree.map(jnp.copy, state)
            compiled = jax.jit(program, donate_argnums=0)
            contenders.append(here(name, compiled, state, ENVS * simulations, calls=20))
        about = {"environments": ENVS, "simulations": simulations, "latent": settings.latent_size}
        compare("MuZero's search", about, contenders, options, unit="simulations")


def main() -> None:
    made = parser(__doc__, seconds=0.5)
    figures = {"agents": agents, "sbx": sbx, "search": search}
    made.add_argument("--figure", choices=figures, action="append", help="default: all of them")
    made.add_argument("--seconds", type=float, default=10.0, help="of a Sebulba measurement")
    made.add_argument("--sbx", type=Path, help="a Python that has sbx-rl")
    options = parse(made)
    for name in options.figure or figures:
        figures[name](options)


if __name__ == "__main__":
    main()
