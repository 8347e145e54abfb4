"""Computes what the published code of DiscoRL returns for the rules and rollouts of `disco.py`.

    export PYTHONPATH=.:tests/support
    python tests/golden/disco_reference.py CHECKOUT > tests/golden/disco_reference.json

CHECKOUT is a clone of github.com/google-deepmind/disco_rl; its packages (dm-haiku, rlax, distrax,
ml_collections and others) must be installed besides podracer's. It computes in float64, so that the
numbers are those of the equations and not of one order of rounding.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import disco
import jax
import jax.numpy as jnp
import numpy as np


def main(checkout: Path) -> None:
    """Print the numbers of both rules as JSON."""
    jax.config.update("jax_enable_x64", True)
    sys.path.insert(0, str(checkout))
    import chex

    chex.Array = jax.Array | np.ndarray  # its code asks isinstance(x, chex.Array)
    published = dict(np.load(checkout / "disco_rl/update_rules/weights/disco_103.npz"))
    cases = {
        "random": (disco.random_rule(), disco.SIZES),
        "disco_103": (published, disco.PUBLISHED_SIZES),
    }
    results = {name: updates(*case) for name, case in cases.items()}
    lines = (f'"{name}": {json.dumps(numbers)}' for name, numbers in results.items())
    print("{\n" + ",\n".join(lines) + "\n}")


def updates(arrays: dict[str, np.ndarray], sizes: dict[str, int]) -> dict[str, Any]:
    """Return what the rule says about the first rollout, and the student after some updates."""
    from disco_rl import optimizers, types
    from disco_rl.agent import get_settings_disco
    from disco_rl.networks import nets
    from disco_rl.update_rules.disco import DiscoUpdateRule
    from dm_env import specs

    settings = get_settings_disco()
    config = settings.update_rule
    config.num_bins, config.max_abs_value = disco.BINS, disco.MAX_VALUE
    config.net.prediction_size, config.net.hidden_size = sizes["predictions"], sizes["units"]
    config.net.meta_rnn_kwargs.hidden_size = sizes["lifetime_units"]
    rule = DiscoUpdateRule(**config)
    hyper = settings.hyper_params.to_dict()
    action_spec = specs.BoundedArray((), np.int32, 0, disco.A - 1)
    network = nets.get_network(
        "mlp", dense=(), action_spec=action_spec, head_w_init_std=None, model_arch_name="lstm",
        out_spec=rule.flat_output_spec(action_spec),
        model_out_spec=rule.model_output_spec(action_spec),
        model_kwargs={"head_mlp_hiddens": (disco.MODEL_SIZE,), "lstm_size": disco.MODEL_SIZE},
    )  # fmt: skip

    key = jax.random.key(0)
    rule_params = to_double(nested(arrays))
    expected, network_state = network.init(key, np.zeros((1, disco.OBSERVATION)), np.zeros(1, bool))
    params = {
        f"mlp/{name}": layer for name, layer in disco.random_student(sizes["predictions"]).items()
    }
    params = to_double(params)
    check_shapes(expected, params)
    check_shapes(rule.init_params(key)[0], rule_params)
    optimizer = optimizers.scale_by_adam_sg_denom()
    optimizer_state, state = optimizer.init(params), rule.init_meta_state(key, params)
    results: dict[str, Any] = {"losses": []}
    for number in range(disco.UPDATES):
        rollout = to_double(disco.random_rollout(number))

        def inputs(params: Any, rollout: Any = rollout) -> Any:
            out, _ = network.unroll(params, network_state, rollout["observation"], None)
            return types.UpdateRuleInputs(
                observations=rollout["observation"], actions=rollout["action"],
                rewards=rollout["reward"], is_terminal=rollout["terminal"], agent_out=out,
                behaviour_agent_out={"logits": rollout["behavior"]}, value_out=None,
            )  # fmt: skip

        targets, state_after = rule.unroll_meta_net(
            rule_params, params, network_state, state, inputs(params), hyper, network.unroll, key
        )

        def loss(params: Any, targets: Any = targets, inputs: Any = inputs) -> Any:
            one, _ = rule.agent_loss(inputs(params), targets, hyper, backprop=False)
            other, _ = rule.agent_loss_no_meta(inputs(params), targets, hyper)
            return jnp.mean(one + other)

        value, grads = jax.value_and_grad(loss)(params)
        steps, optimizer_state = optimizer.update(grads, optimizer_state)
        if number == 0:
            names = {"pi": "policy", "y": "prediction", "z": "action_prediction"}
            results["targets"] = {ours: disco.sample(targets[name]) for name, ours in names.items()}
            results["value_targets"] = disco.sample(targets["q_target"])
        params = jax.tree.map(
            lambda p, s: p - disco.LEARNING_RATE * jnp.clip(s, -1.0, 1.0), params, steps
        )
        state = state_after
        results["losses"].append(float(value))
    moments = state["adv_ema_state"]
    (memory,) = jax.tree.leaves(state["rnn_state"], is_leaf=lambda x: hasattr(x, "hidden"))
    return results | {
        "memory": {"hidden": disco.sample(memory.hidden), "cell": disco.sample(memory.cell)},
        "moments": [float(moments.moment1), float(moments.moment2)],
        "params": by_layer(params),
        "target_params": by_layer(state["target_params"]),
    }


def by_layer(params: Any) -> dict[str, list[float]]:
    """Return some numbers of the parameters of each layer, weights then biases."""
    return {
        f"{name.removeprefix('mlp/')}/{part}": disco.sample(layer[part])
        for name, layer in params.items()
        for part in "wb"
    }


def nested(arrays: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return arrays by layer and part, as haiku has them."""
    layers: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        layer, _, part = name.rpartition("/")
        layers.setdefault(layer, {})[part] = array
    return layers


def to_double(tree: Any) -> Any:
    """Return a tree whose float arrays are float64."""
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float64) if x.dtype == np.float32 else jnp.asarray(x), tree
    )


def check_shapes(expected: Any, params: Any) -> None:
    """Raise `ValueError` where a tree has other names or shapes than the code expects."""
    want, have = (jax.tree.map(lambda x: x.shape, tree) for tree in (dict(expected), dict(params)))
    if want != have:
        raise ValueError(f"the published code has {want}, but these are {have}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
