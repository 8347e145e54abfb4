"""PureJaxRL's ppo.py, unchanged, as a contender of `ppo.py`; runs in a Python that has its imports.

A repetition is a training from the beginning, as its function is.
"""

from __future__ import annotations

import time

import jax
from peer_common import flags, take_turns
from reference_common import gymnax_environment
from reference_purejaxrl import load


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--repository", required=True, help="checkout of PureJaxRL")
    options = parser.parse_args()
    steps = options.envs * options.length * options.updates
    environment = gymnax_environment(options.environment)
    config = {
        "LR": 2.5e-4,
        "NUM_ENVS": options.envs,
        "NUM_STEPS": options.length,
        "TOTAL_TIMESTEPS": steps,
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
    module = load(options.repository, "ppo", environment)
    key = jax.random.PRNGKey(0)
    began = time.perf_counter()
    train = jax.jit(module.make_train(config)).lower(key).compile()
    compile_seconds = time.perf_counter() - began
    jax.block_until_ready(train(key))
    take_turns(
        lambda: jax.block_until_ready(train(key)),
        options,
        compile_seconds,
        ["gymnax", "flax", "jax"],
        {"purejaxrl": "31756b1"},
    )


if __name__ == "__main__":
    main()
