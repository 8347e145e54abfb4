"""PureJaxRL's ppo.py, unchanged, as a contender of `ppo.py`; runs in a Python that has its imports.

It prints one JSON object, then runs a repetition for each line that it reads, as
`harness.elsewhere` wants it. A repetition is a training from the beginning, as its function is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time

import jax
from reference_common import gymnax_environment
from reference_purejaxrl import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", required=True, help="checkout of PureJaxRL")
    parser.add_argument("--environment", default="CartPole-v1")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--activation", default="tanh")
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
    versions = {name: importlib.metadata.version(name) for name in ("gymnax", "flax", "jax")}
    hello = {"steps": steps, "compile_seconds": compile_seconds}
    print(json.dumps({**hello, "peer": {"purejaxrl": "31756b1", **versions}}), flush=True)
    for _ in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        jax.block_until_ready(train(key))
        lap = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}
        print(json.dumps(lap), flush=True)


if __name__ == "__main__":
    main()
