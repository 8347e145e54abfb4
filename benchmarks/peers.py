"""Other libraries as contenders of `ppo.py`, `atari.py` and `agents.py`, in Pythons that have them.

    PYTHON benchmarks/peers.py rejax --envs 1024 --length 128 --minibatches 16

PPO of rejax (tested with 0.1.3), of PureJaxRL's ppo.py (31756b1) and of Stoix (8fff19c), both
unchanged, and of stable-baselines3; SAC and DQN of sbx. stable-baselines3 and sbx step
environments of Gymnasium one after another in Python, as their users have them. With
`rejax --solve SEED` it trains until an evaluation of 128 greedy episodes is at 475, and prints how
long that took. Nothing of podracer is imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from foreign import gymnax_environment, take_turns, versions_of

SOLVED, EPISODES = 475.0, 128
Peer = tuple[Callable[[], Any], float, dict[str, str]]  # a repetition, compile seconds, versions


def purejaxrl(options: argparse.Namespace) -> Peer:
    """A repetition is a training from the beginning, as its function is."""
    import jax
    from reference_purejaxrl import load

    config = {
        "LR": 2.5e-4,
        "NUM_ENVS": options.envs,
        "NUM_STEPS": options.length,
        "TOTAL_TIMESTEPS": options.steps,
        "UPDATE_EPOCHS": 4,
        "NUM_MINIBATCHES": options.minibatches,
        "GAMMA": 0.99,
        "GAE_LAMBDA": 0.95,
        "CLIP_EPS": 0.2,
        "ENT_COEF": 0.01,
        "VF_COEF": 0.5,
        "MAX_GRAD_NORM": 0.5,
        "ACTIVATION": options.activation,
        "ENV_NAME": "",
        "ANNEAL_LR": True,
    }
    module = load(options.repository, "ppo", gymnax_environment(options.environment))
    key = jax.random.PRNGKey(0)
    lap, compile_seconds = _laps(jax.jit(module.make_train(config)), key, lambda _: key)
    return lap, compile_seconds, {"purejaxrl": "31756b1", **versions_of("gymnax", "flax", "jax")}


def stoix(options: argparse.Namespace) -> Peer:
    """It needs JAX 0.5.3, gymnax 0.0.9 and Stoa, and trains on every device there is (`XLA_FLAGS`).

    Its loggers and checkpoints are not imported.
    """
    for name in ("logger", "checkpointing"):
        sys.modules[f"stoix.utils.{name}"] = mock.MagicMock()
    with contextlib.redirect_stdout(sys.stderr):  # it prints, and the first line is read
        learn, state = _set_up_stoix(options)
    lap, compile_seconds = _laps(learn, state, lambda output: output.learner_state)
    return lap, compile_seconds, {"stoix": "8fff19c", **versions_of("gymnax", "flax", "jax")}


def _set_up_stoix(options: argparse.Namespace) -> tuple[Any, Any]:
    """The function that trains for all updates, not compiled, and its first state."""
    sys.path.insert(0, options.repository)
    import jax
    from hydra import compose, initialize_config_dir  # type: ignore[import-not-found]
    from omegaconf import OmegaConf  # type: ignore[import-not-found]
    from stoix.systems.ppo.anakin import ff_ppo  # type: ignore[import-not-found]
    from stoix.utils import make_env  # type: ignore[import-not-found]

    devices = jax.device_count()
    configs = Path(options.repository).absolute() / "stoix" / "configs"
    scenarios = {"CartPole-v1": "gymnax/cartpole", "Breakout-MinAtar": "gymnax/breakout"}
    networks = ("actor_network", "critic_network")
    with initialize_config_dir(str(configs / "default" / "anakin"), version_base="1.2"):
        config = compose(
            "default_ff_ppo",
            [
                f"env={scenarios[options.environment]}",
                f"system.rollout_length={options.length}",
                f"system.num_minibatches={options.minibatches}",
                "system.epochs=4",
                "system.decay_learning_rates=False",
                *(f"network.{name}.pre_torso.layer_sizes=[64,64]" for name in networks),
                *(f"network.{name}.pre_torso.activation={options.activation}" for name in networks),
                f"hydra.searchpath=[file://{configs}]",
            ],
        )
    OmegaConf.set_struct(config, False)
    config.num_devices = devices
    config.arch.num_envs = options.envs // devices
    config.arch.num_updates_per_eval = options.updates
    env, _ = make_env.make(config=config)
    learn, _, state = ff_ppo.learner_setup(env, jax.random.split(jax.random.PRNGKey(0), 3), config)
    return learn, state


def rejax(options: argparse.Namespace) -> Peer:
    algorithm = _create_rejax(options, options.steps)
    algorithm = algorithm.replace(eval_callback=lambda algorithm, state, key: ())
    lap, compile_seconds = _laps(*_training(algorithm, 0), lambda output: output[0])
    return lap, compile_seconds, versions_of("rejax", "gymnax", "jax")


def solve(options: argparse.Namespace) -> dict[str, Any]:
    """Train rejax until it has solved CartPole; return how long that took."""
    every = options.evaluate_every
    algorithm = _create_rejax(options, every).replace(eval_callback=_greedy_return)
    train, state = _training(algorithm, options.solve)
    train, compile_seconds = _compiled(train, state)
    steps, score, began = 0, 0.0, time.perf_counter()
    while score < SOLVED and steps < options.limit:
        state, scores = train(state)
        score = float(scores[-1])
        steps = int(state.global_step)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "steps": steps, "score": score, "compile_seconds": compile_seconds}


def _create_rejax(options: argparse.Namespace, steps: int) -> Any:
    """The algorithm; `train` then takes `steps` steps and evaluates once, at the end."""
    from rejax import get_algo

    env, params = gymnax_environment(options.environment)
    return get_algo("ppo").create(
        env=env,
        env_params=params,
        agent_kwargs={"activation": options.activation, "hidden_layer_sizes": (64, 64)},
        num_envs=options.envs,
        num_steps=options.length,
        num_minibatches=options.minibatches,
        num_epochs=options.epochs,
        learning_rate=options.learning_rate,
        max_grad_norm=0.5,
        total_timesteps=steps,
        eval_freq=steps,
        skip_initial_evaluation=True,
    )


def _training(algorithm: Any, seed: int) -> tuple[Any, Any]:
    """The training function of rejax, not compiled, and its first state."""
    import jax

    state = jax.jit(algorithm.init_state)(jax.random.key(seed))
    return jax.jit(lambda state: algorithm.train(train_state=state)), state


def _greedy_return(algorithm: Any, state: Any, key: Any) -> Any:
    """The mean return of greedy episodes of rejax."""
    from reference_rejax import evaluation

    return evaluation(algorithm, state, key, "greedy", 0.0, EPISODES)[2].mean()


def _compiled(program: Any, state: Any) -> tuple[Any, float]:
    """A compiled function of JAX, and the seconds that it took."""
    began = time.perf_counter()
    compiled = program.lower(state).compile()
    return compiled, time.perf_counter() - began


def _laps(program: Any, state: Any, next_state: Callable[[Any], Any]) -> tuple[Any, float]:
    """Repetitions of a function of JAX, each on the state that the one before leaves."""
    import jax

    program, compile_seconds = _compiled(program, state)

    def lap() -> None:
        nonlocal state
        state = next_state(jax.block_until_ready(program(state)))

    lap()
    return lap, compile_seconds


def stable_baselines3(options: argparse.Namespace) -> Peer:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack

    activations = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}
    if options.environment.endswith("NoFrameskip-v4"):  # the Nature network on Atari's pictures
        import ale_py  # noqa: F401  # which makes the environments known

        processes = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "fork"}}
        games = make_atari_env(options.environment, options.envs, **processes)
        policy, env, networks = "CnnPolicy", VecFrameStack(games, 4), {}
    else:
        policy, env = "MlpPolicy", make_vec_env(options.environment, options.envs, seed=0)
        networks = {
            "net_arch": {"pi": [64, 64], "vf": [64, 64]},
            "activation_fn": activations[options.activation],
        }
    agent = PPO(
        policy,
        env,
        learning_rate=2.5e-4,
        n_steps=options.length,
        batch_size=options.envs * options.length // options.minibatches,
        n_epochs=4,
        ent_coef=0.01,
        policy_kwargs=networks,
        device="cpu",
    )
    versions = versions_of("stable_baselines3", "torch", "gymnasium")
    return _learn(agent, options.steps, options.steps), 0.0, versions


def sbx(options: argparse.Namespace) -> Peer:
    from sbx import DQN, SAC
    from stable_baselines3.common.env_util import make_vec_env

    kind, task = {"sac": (SAC, "Pendulum-v1"), "dqn": (DQN, "CartPole-v1")}[options.agent]
    agent = kind(
        "MlpPolicy",
        make_vec_env(task, options.envs, seed=0),
        learning_rate=3e-4,
        buffer_size=options.capacity,
        batch_size=options.batch,
        learning_starts=1000,
        train_freq=1,
        gradient_steps=options.envs,  # one for each environment step
        policy_kwargs={"net_arch": options.hidden},
    )
    # The first steps compile, and are past its random beginning.
    return _learn(agent, 2000, options.steps), 0.0, versions_of("sbx-rl", "jax", "gymnasium")


def _learn(agent: Any, first_steps: int, steps: int) -> Callable[[], Any]:
    agent.learn(first_steps)
    return lambda: agent.learn(steps, reset_num_timesteps=False)


LIBRARIES: dict[str, Callable[[argparse.Namespace], Peer]] = {
    "purejaxrl": purejaxrl,
    "stoix": stoix,
    "rejax": rejax,
    "sb3": stable_baselines3,
    "sbx": sbx,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--repository", help="checkout of PureJaxRL or Stoix")
    parser.add_argument("--environment", default="CartPole-v1")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--steps", type=int, help="of a repetition, instead of --updates")
    ppo = parser.add_argument_group("PPO")
    ppo.add_argument("--length", type=int, default=128)
    ppo.add_argument("--minibatches", type=int, default=4)
    ppo.add_argument("--updates", type=int, default=1)
    ppo.add_argument("--activation", default="tanh", choices=["tanh", "relu"])
    own = parser.add_argument_group("rejax")
    own.add_argument("--epochs", type=int, default=4)
    own.add_argument("--learning-rate", type=float, default=2.5e-4)
    own.add_argument("--solve", type=int, metavar="SEED")
    own.add_argument("--evaluate-every", type=int, default=1000)
    own.add_argument("--limit", type=int, default=1_000_000)
    replay = parser.add_argument_group("sbx")
    replay.add_argument("--agent", choices=["sac", "dqn"], default="sac")
    replay.add_argument("--batch", type=int, default=256)
    replay.add_argument("--hidden", type=int, nargs="+", default=[256, 256])
    replay.add_argument("--capacity", type=int, default=100_000)
    options = parser.parse_args()
    options.steps = options.steps or options.envs * options.length * options.updates
    return options


def main() -> None:
    options = parse()
    if options.solve is not None:
        print(json.dumps(solve(options)))
        return
    lap, compile_seconds, versions = LIBRARIES[options.library](options)
    hello = {"steps": options.steps, "compile_seconds": compile_seconds, "peer": versions}
    take_turns(hello, lambda line: lap)


if __name__ == "__main__":
    main()
