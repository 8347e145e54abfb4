"""Networks: memory that is cleared where an episode starts, observations of any kind, heads."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import variants

from podracer.errors import ConfigError
from podracer.networks import CNN, MLP, Head, Network, ResNet, Table, TorsoNetwork, convolutions
from podracer.networks.layers import Linear, NoisyLinear, Normalized, dense, orthogonal, relu
from podracer.networks.memory import lstm
from podracer.networks.plane_network import PlaneNetwork
from podracer.types import ArraySpec

T, B = 6, 3
HEADS = {"policy": Head(4, 0.01), "value": Head(1)}
VECTOR = ArraySpec((5,))
IMAGE = ArraySpec((8, 8, 2), np.uint8)
SMALL = MLP((16,))
SMALL_CNN = CNN(channels=(4, 6), kernels=(3, 2), strides=(2, 1), hidden=(16,))
SMALL_RESNET = ResNet(channels=(4,), blocks=1, hidden=16)
MEMORIES = ("none", "gru", "lstm", "gtrxl", "transformer")


def observe(observation, seed: int = 0, lead: tuple[int, ...] = (T, B)):
    """Random observations `[*lead, ...]` of a tree of `ArraySpec`."""
    rng = np.random.default_rng(seed)

    def leaf(array: ArraySpec) -> jax.Array:
        if array.dtype == np.uint8:
            return jnp.asarray(rng.integers(0, 256, (*lead, *array.shape)), jnp.uint8)
        return jnp.asarray(rng.normal(size=(*lead, *array.shape)), array.dtype)

    return jax.tree.map(leaf, observation)


def make(torso=SMALL, observation=VECTOR, memory="none", shared=True) -> Network:
    sizes = {"memory_size": 6, "memory_heads": 2, "memory_window": 3}
    sizes = sizes if memory in MEMORIES[3:] else {"memory_size": 7}
    builder = TorsoNetwork(torso, shared=shared, memory=memory, **sizes)
    return builder.build(observation, HEADS)


def random_params(network: Network):
    """Parameters of the network's shapes. Its own orthogonal ones take seconds to compile."""
    rng = np.random.default_rng(5)
    return jax.tree.map(
        lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape), x.dtype),
        jax.eval_shape(network.init, jax.random.key(0)),
    )


def firsts(*starts: tuple[int, int]) -> jax.Array:
    """Bool `[T, B]`, set at each (t, b)."""
    first = np.zeros((T, B), bool)
    for start in starts:
        first[start] = True
    return jnp.asarray(first)


def close(got, expected, atol: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), got, expected)


def carried(network: Network, seed: int = 3):
    """Memory as it is in the middle of an episode: not zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), network.carry(B))


@pytest.mark.parametrize(
    ("memory", "shared"), [*((memory, True) for memory in MEMORIES), ("gru", False)]
)
def test_an_unroll_equals_single_steps(memory, shared):
    network = make(memory=memory, shared=shared)
    params, observation = random_params(network), observe(VECTOR)
    first = firsts((0, 0), (2, 1), (4, 0), (4, 2))
    apply = jax.jit(network.apply)
    outputs, last = apply(params, carried(network), observation, first)

    carry, steps = carried(network), []
    for t in range(T):
        made, carry = apply(params, carry, observation[t : t + 1], first[t : t + 1])
        steps.append(made)
    close(outputs, jax.tree.map(lambda *x: jnp.concatenate(x), *steps))
    close(last, carry)
    assert {name: x.shape for name, x in outputs.items()} == {
        "policy": (T, B, 4),
        "value": (T, B, 1),
    }


@pytest.mark.parametrize("memory", MEMORIES[1:])
def test_memory_is_cleared_where_an_episode_starts(memory):
    network = make(memory=memory)
    params, observation = random_params(network), observe(VECTOR)
    t, b = 3, 1
    apply = jax.jit(network.apply)
    outputs, last = apply(params, carried(network), observation, firsts((t, b)))
    uncut, _ = apply(params, carried(network), observation, firsts())
    fresh, fresh_last = apply(params, network.carry(B), observation[t:], firsts()[t:])

    def column(tree, index):
        return jax.tree.map(lambda x: x[..., index, :], tree)

    after = jax.tree.map(lambda x: x[t:], outputs)
    close(column(after, b), column(fresh, b))
    close(*(jax.tree.map(lambda x: x[b], x) for x in (last, fresh_last)))
    # The other environments, and the steps before, remember as if nothing had happened.
    for other in (0, 2):
        close(column(outputs, other), column(uncut, other))
    close(outputs["value"][:t], uncut["value"][:t])
    assert np.abs(outputs["value"] - uncut["value"])[t:, b].min() > 1e-4


@pytest.mark.parametrize("memory", MEMORIES[3:])
def test_a_transformer_attends_by_content_and_distance_as_its_papers_have_it(memory):
    """By numpy and loops over queries and keys, from an empty cache, with an end in between."""
    network, observation = make(MLP(()), memory=memory), observe(VECTOR)
    params, first = random_params(network), firsts((2, 1))
    outputs, _ = network.apply(params, network.carry(B), observation, first)
    trunk, observation, first = jax.tree.map(np.asarray, (params["shared"], observation, first))
    heads, size, window = 2, 6, 3
    frequencies = 10_000.0 ** (-np.arange(0, size, 2) / size)

    def linear(x, layer):
        return x @ layer.weight + layer.bias

    def norm(x, layer):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * layer.scale + layer.shift

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def attend(x, start, layer):
        x, results = norm(x, layer), np.zeros_like(x)
        query, key, distance, value = (w.reshape(size, heads, -1) for w in layer.weights)
        for t in range(T):
            lags = range(min(t - start[t], window) + 1)
            for h in range(heads):
                q, scores = x[t] @ query[:, h], []
                for lag in lags:
                    position = np.concatenate(
                        [np.sin(lag * frequencies), np.cos(lag * frequencies)]
                    )
                    score = (q + layer.content_bias[h]) @ (x[t - lag] @ key[:, h])
                    score += (q + layer.distance_bias[h]) @ (position @ distance[:, h])
                    scores.append(score / np.sqrt(size // heads))
                weights = np.exp(scores) / np.exp(scores).sum()
                mixed = sum(w * x[t - lag] for w, lag in zip(weights, lags, strict=True))
                columns = slice(h * size // heads, (h + 1) * size // heads)
                results[t, columns] = mixed @ value[:, h]
        return linear(results, layer.output)

    def gate(x, y, gate):
        if gate is None:
            return x + y
        reset, update, candidate = np.split(linear(y, gate.branch), 3, axis=-1)
        reset = sigmoid(reset + (x @ gate.skip)[:, :size])
        update = sigmoid(update + (x @ gate.skip)[:, size:])
        return (1 - update) * x + update * np.tanh(candidate + (reset * x) @ gate.candidate)

    for b in range(B):
        x = linear(observation[:, b], trunk.cell.embedding)
        start = np.maximum.accumulate(np.where(first[:, b], np.arange(T), 0))
        for block in trunk.cell.blocks:
            gates = block.gates or (None, None)
            x = gate(x, np.maximum(attend(x, start, block.attention), 0), gates[0])
            hidden = np.maximum(linear(norm(x, block.perceptron), block.perceptron.inner), 0)
            x = gate(x, np.maximum(linear(hidden, block.perceptron.outer), 0), gates[1])
        expected = {n: linear(x, head.layers[0]) for n, head in trunk.heads.items()}
        close(jax.tree.map(lambda x, b=b: x[:, b], outputs), expected, 1e-4)


def test_a_gate_begins_nearly_closed_and_heads_divide_the_size(key):
    """With a bias of -2 a gate lets through an eighth of its branch."""
    layer = TorsoNetwork(MLP(()), memory="gtrxl", memory_size=6, memory_heads=2)
    for block in layer.build(VECTOR, {"value": Head(1)}).init(key)["shared"].cell.blocks:
        for gate in block.gates:
            np.testing.assert_allclose(jax.nn.sigmoid(gate.branch.bias[6:12]), 0.119, atol=1e-3)
            assert not np.delete(gate.branch.bias, np.s_[6:12]).any()
    message = "memory_size is 7, but a gtrxl needs a multiple of its memory_heads, 2"
    with pytest.raises(ConfigError, match=message):
        TorsoNetwork(memory="gtrxl", memory_size=7, memory_heads=2)


def test_an_lstm_begins_by_remembering(key):
    """Forget-gate biases of 1: a cell without input keeps more than half of its value a step."""
    layer = TorsoNetwork(SMALL, memory="lstm", memory_size=7)
    trunk = layer.build(VECTOR, {"value": Head(1)}).init(key)["shared"]
    np.testing.assert_array_equal(trunk.cell.bias[7:14], 1.0)
    assert (np.abs(np.delete(trunk.cell.bias, np.s_[7:14])) <= 1 / np.sqrt(7)).all()
    zeros = jax.tree.map(jnp.zeros_like, (trunk.cell.weight_ih, trunk.cell.weight_hh))
    cell = eqx.tree_at(lambda c: (c.weight_ih, c.weight_hh), trunk.cell, zeros)
    cell = eqx.tree_at(lambda c: c.bias, cell, cell.bias.at[:7].set(-100.0))  # nothing is written
    _, kept = cell(jnp.zeros(16), (jnp.zeros(7), jnp.ones(7)))
    np.testing.assert_allclose(kept, jax.nn.sigmoid(1.0), rtol=1e-6)


@variants("reverse", [True], [False])
def test_the_lstm_and_its_gradient_are_those_of_a_plain_loop_over_cells(reverse, key):
    cell = eqx.nn.LSTMCell(4, 2, key=key)
    keys = jax.random.split(key, 3)
    inputs, resets = (
        jax.random.normal(keys[0], (5, 3, 4)),
        jax.random.bernoulli(keys[1], 0.3, (5, 3)),
    )
    start = tuple(jax.random.normal(keys[2], (2, 3, 2)))

    def ours(cell, inputs, state):
        pushed = inputs @ cell.weight_ih.T + cell.bias[None, None]
        return lstm(pushed, cell.weight_hh.T, resets, state, reverse)

    def plain(cell, inputs, state):
        hidden = {}
        for t in reversed(range(5)) if reverse else range(5):
            state = tuple(jnp.where(resets[t][:, None], 0.0, x) for x in state)
            state = jax.vmap(cell)(inputs[t], state)
            hidden[t] = state[0]
        return jnp.stack([hidden[t] for t in range(5)]), state

    def through(run):
        def total(*args):
            return sum(jnp.sum(jnp.cos(x)) for x in jax.tree.leaves(run(*args)))

        return run(cell, inputs, start), jax.grad(total, (0, 1, 2))(cell, inputs, start)

    both = zip(*map(jax.tree.leaves, (through(ours), through(plain))), strict=True)
    for a, b in both:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_convolutions_begin_orthogonal():
    """Kernels as matrices `[k k inputs, outputs]` have orthogonal columns of length sqrt 2."""
    weight = convolutions.Convolution(3, 5, 2, 1, False, key=jax.random.key(0)).weight.reshape(
        -1, 5
    )
    np.testing.assert_allclose(weight.T @ weight, 2 * np.eye(5), atol=1e-5)


def test_layer_normalization_is_that_of_equinox(key):
    """Whose gradient is checked too: with statistics of each row, in single precision at least."""
    layer = Normalized(Linear(6, 5, 1.0, key=key))
    layer = eqx.tree_at(lambda n: (n.scale, n.shift), layer, (jnp.arange(5.0), jnp.ones(5)))
    reference = eqx.nn.LayerNorm(5, eps=1e-6)
    reference = eqx.tree_at(lambda n: (n.weight, n.bias), reference, (layer.scale, layer.shift))
    x = 3.0 + jax.random.normal(key, (4, 2, 6))

    def expected(x):
        return jax.vmap(jax.vmap(reference))(layer.layer(x))

    close(layer(x), expected(x), 1e-5)
    close(*(jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(x) for f in (layer, expected)), 1e-5)
    half = layer(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), expected(x), atol=0.1)


def test_residual_blocks_are_those_of_simba():
    """By numpy, one layer after another, behind an ordinary hidden layer."""
    network, inputs = make(MLP((6, 4), residual_blocks=2)), observe(VECTOR)
    params = random_params(network)
    outputs, _ = network.apply(params, (), inputs, firsts())
    hidden, residual = params["shared"].layers[-1]

    def linear(x, layer):
        return x @ np.asarray(layer.weight) + np.asarray(layer.bias)

    def norm(x, layer):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        return x * np.asarray(layer.scale) + np.asarray(layer.shift)

    x = linear(np.maximum(linear(np.asarray(inputs), hidden), 0), residual.embedding)
    for block in residual.blocks:
        assert block.inner.weight.shape == (4, 16)
        x = x + linear(np.maximum(linear(norm(x, block), block.inner), 0), block.outer)
    x = norm(x, residual)
    close(outputs, {n: linear(x, head.layers[0]) for n, head in params["shared"].heads.items()})
    with pytest.raises(ConfigError, match="residual_blocks need a hidden layer"):
        MLP((), residual_blocks=1)


@pytest.mark.parametrize(
    ("torso", "observation", "memory", "shared"),
    [
        (MLP((16, 8), "tanh"), VECTOR, "gru", False),
        (
            MLP((16,), "silu"),
            {"a": VECTOR, "b": ArraySpec((2, 3)), "c": ArraySpec(())},
            "lstm",
            False,
        ),
        (SMALL_CNN, {"image": IMAGE, "vector": VECTOR, "map": ArraySpec((8, 8, 1))}, "gru", True),
        (SMALL_RESNET, {"image": ArraySpec((7, 5, 3)), "vector": VECTOR}, "none", True),
        (MLP((16,)), VECTOR, "gtrxl", True),
        (MLP((16, 8), layer_norm=True), VECTOR, "none", False),
        (MLP((6,), residual_blocks=2), VECTOR, "none", True),
        (dataclasses.replace(SMALL_CNN, layer_norm=True), IMAGE, "none", True),
        (dataclasses.replace(SMALL_RESNET, layer_norm=True), IMAGE, "lstm", True),
    ],
)
def test_every_parameter_receives_a_gradient(torso, observation, memory, shared):
    network = make(torso, observation, memory, shared)
    params = random_params(network)
    inputs, first = observe(observation), firsts((0, 0), (3, 1))

    @jax.jit
    def grads(params):
        def loss(params):
            outputs, _ = network.apply(params, network.carry(B), inputs, first)
            return sum(jnp.sum(jnp.sin(1.0 + x)) for x in outputs.values())

        return jax.grad(loss)(params)

    for path, grad in jax.tree_util.tree_leaves_with_path(grads(params)):
        assert np.isfinite(grad).all(), path
        assert np.abs(grad).max() > 0, f"{jax.tree_util.keystr(path)} receives no gradient"


def test_heads_share_a_torso_or_have_one_each():
    def sensitivity(shared: bool):
        """Which parameters the value alone depends on, and how many there are."""
        network = make(shared=shared)
        params = random_params(network)

        def value(params):
            return network.apply(params, (), observe(VECTOR), firsts())[0]["value"].sum()

        reached = [bool(np.abs(x).max() > 0) for x in jax.tree.leaves(jax.grad(value)(params))]
        return sum(reached), len(reached)

    # A layer and a head each; weight and bias.
    assert sensitivity(shared=True) == (4, 6)
    assert sensitivity(shared=False) == (4, 8)


def test_heads_start_with_their_scale(key):
    network = make(MLP((64,)))
    outputs, _ = network.apply(network.init(key), (), observe(VECTOR), firsts())
    assert np.abs(outputs["policy"]).max() < 0.1 < np.abs(outputs["value"]).max()


@pytest.mark.parametrize(
    ("spec", "divisor"),
    [
        (IMAGE, 255),
        (dataclasses.replace(IMAGE, scaled=False), 1),
        (ArraySpec((5,), np.uint8), 1),
        (ArraySpec((5,), np.uint8, scaled=True), 255),
    ],
)
@pytest.mark.parametrize("builder", [TorsoNetwork(SMALL_CNN), PlaneNetwork(CNN((2,), (2,), (1,)))])
def test_bytes_are_divided_where_they_are_pixels(builder, spec, divisor):
    """So that those that are numbers count as much as the same in another dtype."""
    specs = {"x": spec, "image": ArraySpec(IMAGE.shape)}
    network, inputs = builder.build(specs, {"value": Head(1)}), observe(specs)
    params = random_params(network)
    floats = {**inputs, "x": inputs["x"].astype(jnp.float32) / divisor}
    as_floats = jax.tree.map(lambda x: ArraySpec(x.shape), specs)
    expected, _ = builder.build(as_floats, {"value": Head(1)}).apply(params, (), floats, firsts())
    close(network.apply(params, (), inputs, firsts())[0], expected, atol=1e-3)


def test_environments_do_not_see_each_other():
    """Nothing in a network mixes the batch: swapping environments swaps outputs."""
    observation = {"image": IMAGE, "vector": VECTOR}
    network = make(SMALL_RESNET, observation, "gru")
    params, inputs, first = random_params(network), observe(observation), firsts((0, 0), (3, 1))
    order = np.array([2, 0, 1])
    apply = jax.jit(network.apply)
    outputs, carry = apply(params, network.carry(B), inputs, first)
    swapped, other = apply(
        params, network.carry(B), jax.tree.map(lambda x: x[:, order], inputs), first[:, order]
    )
    close(swapped, jax.tree.map(lambda x: x[:, order], outputs))
    close(other, jax.tree.map(lambda x: x[order], carry))


def test_heads_have_hidden_layers_of_their_own():
    heads = {"a": Head(2, hidden=(6,)), "b": Head(3, hidden=(5, 4))}
    network = TorsoNetwork(SMALL).build(VECTOR, heads)
    params, inputs = random_params(network), observe(VECTOR)
    outputs, _ = network.apply(params, (), inputs, firsts())
    trunk = params["shared"]
    dense_layer = trunk.layers[-1][0]
    features = jnp.maximum(inputs @ dense_layer.weight + dense_layer.bias[None, None], 0)
    for name, head in heads.items():
        x, layers = features, trunk.heads[name].layers
        assert [layer.bias.size for layer in layers] == [*head.hidden, head.size]
        for i, layer in enumerate(layers):
            x = jnp.maximum(x, 0) if i else x
            x = x @ layer.weight + layer.bias[None, None]
        close(outputs[name], x)


@pytest.mark.parametrize("shared", [True, False])
def test_every_noisy_layer_has_noise_of_its_own(key, monkeypatch, shared):
    """Fortunato et al. 2018, section 3: two heads have, and so have two layers of one head; each
    row has a number for every input and output, |f(e)| = sqrt |e|."""
    heads = {name: Head(4, noisy=True, hidden=(4, 4)) for name in ("a", "b")}
    network = TorsoNetwork(MLP((4,)), shared=shared).build(VECTOR, heads)
    noises, plain = [], NoisyLinear.__call__

    def spy(self, x, noise):
        noises.append(np.asarray(noise))
        return plain(self, x, noise)

    monkeypatch.setattr(NoisyLinear, "__call__", spy)
    keys, first = jax.random.split(key, (1, 500)), jnp.ones((1, 500), bool)
    network.apply(random_params(network), (), jnp.ones((1, 500, 5)), first, keys)
    assert [noise.shape for noise in noises] == [(500, 8)] * 6
    noise = np.concatenate(noises, axis=1)
    assert len(np.unique(noise)) > 0.99 * noise.size
    assert abs(np.mean(noise)) < 5 * np.sqrt(np.sqrt(2 / np.pi) / noise.size)
    np.testing.assert_allclose(np.mean(noise**4), 1.0, atol=0.1)
    np.testing.assert_array_less(np.abs(np.corrcoef(noise.T) - np.eye(48)), 6 / np.sqrt(500))


@pytest.mark.parametrize(
    ("batch", "sizes"), [((6,), (3, 8)), ((4, 3), (8, 3)), ((), (5, 5)), ((4, 3), (4, 1))]
)
def test_the_dense_product_and_its_gradients_are_the_plain_ones(batch, sizes):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(*batch, sizes[0])), jnp.float32)
    w = jnp.asarray(rng.normal(size=sizes), jnp.float32)

    def through(product):
        grads = jax.grad(lambda x, w: jnp.sum(jnp.sin(product(x, w))), (0, 1))
        return product(x, w), grads(x, w), jax.vmap(grads, (None, 0))(x, jnp.stack([w, -w]))

    close(*jax.jit(lambda: (through(dense), through(jnp.matmul)))())


def test_gradients_through_the_gradients_are_the_plain_ones():
    """As updates that learn how to learn take them."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)
    ws = [jnp.asarray(rng.normal(size=sizes), jnp.float32) for sizes in ((3, 8), (8, 2))]

    def through(product, rectify):
        def loss(x, one, two):
            return jnp.sum(jnp.sin(product(rectify(product(x, one)), two)))

        def bent(*args):
            return sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss, (0, 1, 2))(*args))

        return jax.grad(bent, (0, 1, 2))(x, *ws)

    close(*jax.jit(lambda: (through(dense, relu), through(jnp.matmul, jax.nn.relu)))())


@pytest.mark.parametrize(
    ("torso", "observation", "message"),
    [
        (SMALL_CNN, VECTOR, "CNN needs an image observation"),
        (SMALL_RESNET, {"vector": VECTOR}, "ResNet needs an image observation"),
        (CNN(), ArraySpec((10, 10, 4)), "leaves nothing of a .* image"),
        (ResNet(), ArraySpec((4, 84, 84)), "has its channels first, it seems: move that axis"),
        (
            CNN((32, 64), (3,), (1,)),
            ArraySpec((10, 10, 4)),
            "channels, kernels and strides must be equally many, but are 2, 1 and 1",
        ),
        (SMALL_CNN, {"a": IMAGE, "b": ArraySpec((9, 8, 1))}, "same height and width"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_built(torso, observation, message):
    with pytest.raises(ConfigError, match=message):
        make(torso, observation)


# --- indices of states ---------------------------------------------------------------------------

INDEX = ArraySpec((), np.int32, num_values=7)


def test_a_table_has_a_row_for_each_state(key):
    network = Table().build(INDEX, HEADS)
    params = network.init(key)
    assert {n: x.shape for n, x in params.items()} == {n: (7, h.size) for n, h in HEADS.items()}
    assert not any(x.any() for x in params.values())
    assert network.carry(B) == ()
    params = random_params(network)
    seen = jax.random.randint(key, (T, B), 0, 7)
    outputs, carry = jax.jit(network.apply)(params, (), seen, firsts())
    assert carry == ()
    for name, table in params.items():
        np.testing.assert_array_equal(outputs[name], np.asarray(table)[np.asarray(seen)])


def test_a_torso_sees_an_index_as_one_hot(key):
    seen = jax.random.randint(key, (T, B), 0, 7)
    index, one_hot = (
        make(observation={"a": INDEX, "b": VECTOR}),
        {"a": ArraySpec((7,)), "b": VECTOR},
    )
    params, vector = random_params(index), observe(VECTOR)
    expected, _ = make(observation=one_hot).apply(
        params, (), {"a": jax.nn.one_hot(seen, 7), "b": vector}, firsts()
    )
    close(index.apply(params, (), {"a": seen, "b": vector}, firsts())[0], expected)
    with pytest.raises(ConfigError, match="10000 states are too many for a torso"):
        make(observation=ArraySpec((), np.int32, num_values=10_000))


def test_a_network_that_was_built_while_tracing_holds_no_tracers():
    with jax.checking_leaks():
        shapes = jax.eval_shape(lambda key: make(memory="gru").init(key), jax.random.key(0))
    params = make(memory="gru").init(jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, shapes)


def test_orthogonal_weights_under_vmap_are_made_in_turn(key):
    """Batched QR decompositions, two at once, deadlock on a CPU, so the program has none."""
    keys = jax.random.split(key, (3, 2))

    def make(key):
        return orthogonal(key, (3, 3, 4, 8), 0.5)

    batched = jax.jit(jax.vmap(jax.vmap(make)))
    lowered = batched.lower(keys).as_text()
    assert 'num_batch_dims = "0"' in lowered
    assert 'num_batch_dims = "1"' not in lowered
    weights = batched(keys)
    for index in np.ndindex(3, 2):
        np.testing.assert_array_equal(weights[index], make(keys[index]))
    matrix = weights[1, 1].reshape(-1, 8)
    np.testing.assert_allclose(matrix.T @ matrix, 0.25 * np.eye(8), atol=1e-6)


def test_an_entry_of_any_name_is_seen_by_the_torso():
    def sizes(name):
        network = make(observation={name: VECTOR, "x": VECTOR})
        params = jax.eval_shape(network.init, jax.random.key(0))
        return sorted(x.shape for x in jax.tree.leaves(params))

    assert sizes("last_step") == sizes("a")
