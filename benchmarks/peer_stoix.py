"""PPO of Stoix (8fff19c), unchanged, as a contender of `ppo.py`; runs in a Python that has it.

It needs JAX 0.5.3, gymnax 0.0.9 and Stoa. Its loggers and checkpoints are not imported.
It trains on every device there is (`XLA_FLAGS`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from peer_common import flags, take_turns

for name in ("logger", "checkpointing"):
    sys.modules[f"stoix.utils.{name}"] = mock.MagicMock()
SCENARIOS = {"CartPole-v1": "gymnax/cartpole", "Breakout-MinAtar": "gymnax/breakout"}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--repository", required=True, help="checkout of Stoix")
    options = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):  # it prints, and the first line is read
        learn, state = set_up(options)
    began = time.perf_counter()
    learn = learn.lower(state).compile()
    compile_seconds = time.perf_counter() - began

    def repeat() -> None:
        nonlocal state
        state = jax.block_until_ready(learn(state)).learner_state

    repeat()
    take_turns(repeat, options, compile_seconds, ["gymnax", "flax", "jax"], {"stoix": "8fff19c"})


def set_up(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the function that trains for all updates, not compiled, and its first state."""
    sys.path.insert(0, options.repository)
    from hydra import compose, initialize_config_dir  # type: ignore[import-not-found]
    from omegaconf import OmegaConf  # type: ignore[import-not-found]
    from stoix.systems.ppo.anakin import ff_ppo  # type: ignore[import-not-found]
    from stoix.utils import make_env  # type: ignore[import-not-found]

    devices = jax.device_count()
    configs = Path(options.repository).absolute() / "stoix" / "configs"
    networks = ("actor_network", "critic_network")
    with initialize_config_dir(str(configs / "default" / "anakin"), version_base="1.2"):
        config = compose(
            "default_ff_ppo",
            [
                f"env={SCENARIOS[options.environment]}",
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


if __name__ == "__main__":
    main()
