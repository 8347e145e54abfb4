"""MuZero's convolutional model, and what it searches anew in its replay."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import optax
import pytest
import scipy.stats
from off_policy import agent_and_env, sample_of
from walk import B, Walk, begin, close, enter, fresh, learn, methods_of

from podracer import recipes
from podracer.agents import muzero
from podracer.agents.muzero import MuZero
from podracer.agents.planning import gumbel
from podracer.agents.planning.actions import SearchActions
from podracer.agents.planning.model import Model, ModelParams
from podracer.devices.reductions import global_grad
from podracer.environment import auto_reset
from podracer.networks import MLP, ResNet, TorsoNetwork
from podracer.replay import Replay, Sample
from podracer.types import (
    ACTION_MASK,
    ArraySpec,
    Continuous,
    Discrete,
    EnvironmentSpec,
    Step,
    TimeStep,
    Trajectory,
)

N, ACTIONS, ATOMS = 5, 3, 11
DISCRETE, BOX = Discrete(ACTIONS), Continuous((-2.0, 0.0), (2.0, 1.0))
SCREEN = ArraySpec((6, 5, 2), np.uint8)
SMALL: dict[str, Any] = {
    "support_size": ATOMS,
    "support_max": 3.0,
    "num_simulations": 3,
    "unroll_steps": 2,
    "n_step": 2,
    "dynamics_hidden": (7,),
    "prediction_hidden": (8,),
    "replay": Replay(B * 40, batch_size=12, warmup=0, prioritized=True),
}
RESNET = TorsoNetwork(ResNet(channels=(4, 6), blocks=1))
CONVOLUTIONAL = MuZero(network=RESNET, dynamics_blocks=2, **SMALL)
VECTORS = MuZero(network=TorsoNetwork(MLP((8,))), latent_size=6, **SMALL)


@dataclasses.dataclass(frozen=True)
class Screen(Walk):
    """The walk as a picture: one bright pixel, and its mirror image."""

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec("screen", ArraySpec((5, 5, 2)), DISCRETE)

    def observe(self, x: jax.Array) -> jax.Array:
        row = jax.nn.softmax(-8 * (x - jnp.linspace(-1.5, 1.5, 5)) ** 2)
        picture = row[:, None] * jnp.ones((1, 5))
        return jnp.stack([picture, picture[::-1]], axis=-1)


def functions_of(settings: MuZero, observation: Any = SCREEN, action: Any = DISCRETE) -> Any:
    """The functions of a built agent, those that it holds and others."""
    agent = settings.build(EnvironmentSpec("screen", observation, action))
    return agent.init.__self__  # type: ignore[attr-defined]


def random_params(model: Model) -> ModelParams:
    """Random parameters: a model's own take seconds to compile."""
    rng, shapes = np.random.default_rng(0), jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape), x.dtype), shapes)


def screens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, 256, (N, *SCREEN.shape)), jnp.uint8)


# --- the convolutional model ---------------------------------------------------------------------


def convolve(layer: Any, x: np.ndarray) -> np.ndarray:
    """A convolution with zero padding that keeps the size, as sums over pixels."""
    w, size = np.asarray(layer.weight), layer.weight.shape[0]
    padded = np.pad(x, ((0, 0), (size // 2, size // 2), (size // 2, size // 2), (0, 0)))
    height, width = x.shape[1:3]
    shifted = [padded[:, i : i + height, j : j + width] for i in range(size) for j in range(size)]
    return np.concatenate(shifted, -1) @ w.reshape(-1, w.shape[-1]) + np.asarray(layer.bias)


def rectify(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def head_outputs(params: Any, name: str, planes: np.ndarray) -> np.ndarray:
    """A head: planes reduced pixel by pixel, a hidden layer, and the output layer."""
    hidden, output = jax.tree.map(np.asarray, params.heads[name].layers)
    x = rectify(convolve(params.reductions[name], rectify(planes))).reshape(len(planes), -1)
    x = rectify(x @ hidden.weight + hidden.bias)
    return x @ output.weight + output.bias


def scaled(planes: np.ndarray) -> np.ndarray:
    flat = planes.reshape(len(planes), -1)
    low, high = flat.min(1), flat.max(1)
    return ((flat - low[:, None]) / (high - low)[:, None]).reshape(planes.shape)


def test_hidden_states_are_planes_between_0_and_1_and_the_action_is_planes_beside_them():
    """One step of the model by hand: action planes, two residual blocks, scaling, heads."""
    model = functions_of(CONVOLUTIONAL).model
    params = random_params(model)
    state = jax.jit(model.representation)(params, screens())
    assert state.shape == (N, 2, 2, 6)  # two stages halve 6 x 5
    action = jnp.arange(N) % ACTIONS
    next_state, reward_logits = jax.jit(model.dynamics)(params, state, action)
    for planes in (state, next_state):
        flat = np.asarray(planes).reshape(N, -1)
        np.testing.assert_allclose([flat.min(1), flat.max(1)], [[0] * N, [1] * N], atol=1e-4)

    action_planes = np.broadcast_to(np.eye(ACTIONS)[action][:, None, None], (N, 2, 2, ACTIONS))
    first, *blocks = params.dynamics.convolutions[0]
    x = convolve(first, np.concatenate([state, action_planes], axis=-1))
    for inner, outer in zip(blocks[::2], blocks[1::2], strict=True):
        x = x + convolve(outer, rectify(convolve(inner, rectify(x))))
    close(next_state, scaled(np.asarray(state) + x), atol=1e-4)
    np.testing.assert_allclose(reward_logits, head_outputs(params.dynamics, "reward", x), rtol=1e-4)
    policy_logits, value_logits = jax.jit(model.prediction)(params, state)
    state = np.asarray(state)
    expected = [head_outputs(params.prediction, name, state) for name in ("policy", "value")]
    assert [x.shape for x in expected] == [(N, ACTIONS), (N, ATOMS)]
    close([policy_logits, value_logits], expected, atol=1e-3)


@pytest.mark.slow
def test_every_parameter_of_the_convolutional_model_receives_a_gradient():
    env = auto_reset(Screen())
    agent = CONVOLUTIONAL.build(env.spec)
    state, _ = learn(agent, *begin(agent, env))
    moments = optax.tree_utils.tree_get(state.shared.optimizer_state, "mu")
    for path, leaf in jax.tree_util.tree_leaves_with_path(moments):
        assert np.abs(leaf).max() > 0, f"{jax.tree_util.keystr(path)} receives no gradient"


def test_muzero_on_atari_is_that_of_its_paper():
    """Schrittwieser et al. 2020, appendices F to H, with Reanalyze's changes."""
    agent = recipes.find("atari_muzero").agent
    assert (agent.unroll_steps, agent.n_step, agent.num_simulations) == (5, 5, 50)
    assert (agent.discount, agent.value_cost, agent.weight_decay) == (0.997, 0.25, 1e-4)
    assert (agent.support_size, agent.support_max, agent.reanalyze_fraction) == (601, 300.0, 0.8)
    replay, driver = agent.replay, recipes.find("atari_muzero").driver
    assert (replay.priority_exponent, replay.importance_exponent) == (1.0, 1.0)
    samples = replay.batch_size * replay.updates_per_rollout
    assert samples == 2 * driver.num_envs * driver.rollout_length == 1024
    pictures = ArraySpec((84, 84, 4), np.uint8, frame_stack=True)
    model = functions_of(agent, pictures, Discrete(18)).model
    params = jax.eval_shape(model.init, jax.random.key(0))
    first, *blocks = params.dynamics.convolutions[0]
    assert first.layer.weight.shape == (3, 3, 256 + 18, 256)
    assert [layer.layer.weight.shape for layer in blocks] == [(16, 3, 3, 256, 256)] * 2
    assert params.prediction.heads["value"].layers[0].weight.shape == (6 * 6 * 16, 601)


@pytest.mark.parametrize("unroll_steps", [1, 2])
def test_gradients_are_halved_between_steps_of_the_model(unroll_steps, key, monkeypatch):
    """Appendix G; what a step predicts teaches that step fully."""
    settings = dataclasses.replace(VECTORS, unroll_steps=unroll_steps)
    agent = functions_of(settings, ArraySpec((2,)))
    params, sample = sample_for(agent)

    def gradient() -> Any:
        return jax.jit(jax.grad(lambda x: agent.loss(x, params, sample, key)[0].value))(params)

    halved = gradient()
    monkeypatch.setattr(muzero, "scale_gradient", lambda x, scale: x)
    if unroll_steps == 1:
        close(gradient(), halved)
    else:
        with pytest.raises(AssertionError):
            close(gradient(), halved)


# --- reanalysis ----------------------------------------------------------------------------------


def sample_for(agent: Any) -> tuple[ModelParams, Sample]:
    """Random parameters, and a sample of random timesteps within episodes."""
    T, rng = agent.buffer.length - 1, np.random.default_rng(2)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    flags = jnp.zeros((T + 1, N), bool)
    timesteps = TimeStep(normal(T + 1, N, 2), normal(T + 1, N), jnp.ones((T + 1, N)), flags, flags)
    extras = {name: normal(T, N, *spec.shape) for name, spec in agent.model.actions.extras.items()}
    extras["policy"] = jax.nn.softmax(extras["policy"])
    space = agent.model.actions.space
    if isinstance(space, Continuous):
        action = jnp.asarray(rng.uniform(space.low, space.high, (T, N, space.size)), jnp.float32)
    else:
        action = jnp.asarray(rng.integers(ACTIONS, size=(T, N)), jnp.int32)
    steps = Step(jax.tree.map(lambda x: x[:-1], timesteps), action, extras)
    trajectory = Trajectory(steps, jax.tree.map(lambda x: x[-1], timesteps), (), ())
    zeros = jnp.zeros(N, jnp.int32)
    return random_params(agent.model), Sample(trajectory, jnp.ones(N), zeros, zeros)


def search_by_hand(agent: Any, params: ModelParams, observation: Any, key: jax.Array) -> Any:
    """One search of mctx alone; samples of the root have a key of their own."""
    model, settings = agent.model, agent.settings
    return mctx.gumbel_muzero_policy(
        params,
        key,
        model.root(params, observation[None], jax.random.fold_in(key, 2)),
        partial(model.step, settings.discount),
        settings.num_simulations,
        max_num_considered_actions=settings.max_considered_actions,
        qtransform=partial(mctx.qtransform_completed_by_mix_value, epsilon=1e-8),
    )


def searched_by_hand(agent: Any, params: ModelParams, sample: Sample, key: jax.Array) -> Sample:
    """The sample with new extras: mctx alone, one search after the other."""
    steps, settings = sample.trajectory.steps, agent.settings
    search = jax.jit(partial(search_by_hand, agent, params))
    row_key, search_key = jax.random.split(key)
    rows = jax.random.permutation(row_key, N)[: round(settings.reanalyze_fraction * N)]
    searched = settings.unroll_steps + 1 + settings.n_step * (settings.bootstrap == "search")
    extras = jax.tree.map(np.array, steps.extras)
    for t, timestep_key in enumerate(jax.random.split(search_key, searched)):
        for row, k in zip(rows, jax.random.split(timestep_key, len(rows)), strict=True):
            found = search(steps.timestep.observation[t, row], k)
            extras["policy"][t, row] = found.action_weights[0]
            extras["value"][t, row] = found.search_tree.summary().value[0]
            if "samples" in extras:
                extras["samples"][t, row] = found.search_tree.embeddings[1]["samples"][0, 0]
    steps = dataclasses.replace(steps, extras=jax.tree.map(jnp.asarray, extras))
    return dataclasses.replace(
        sample, trajectory=dataclasses.replace(sample.trajectory, steps=steps)
    )


def agent_that_reanalyzes(
    bootstrap: str, action: Any = DISCRETE, fraction: float = 0.6, num_simulations: int = 2
) -> Any:
    """Three of five sequences; values from the second step on are what `search` bootstraps from."""
    settings = dataclasses.replace(
        VECTORS,
        reanalyze_fraction=fraction,
        bootstrap=bootstrap,
        unroll_steps=1,
        num_simulations=num_simulations,
    )
    return functions_of(settings, ArraySpec((2,)), action)


@pytest.mark.slow
@pytest.mark.parametrize("action", [DISCRETE, BOX], ids=repr)
def test_what_is_searched_anew_is_what_searches_by_hand_find(action, key):
    """Policies and values of all timesteps that the loss uses, and the samples that the policies
    are for; other sequences keep what acting found, and all keep their actions."""
    agent = agent_that_reanalyzes("search", action)
    params, sample = sample_for(agent)
    reanalyze = partial(gumbel.reanalyze, fraction=0.6, num_timesteps=4)
    search = partial(agent.search, params, True)
    got = jax.jit(lambda trajectory: reanalyze(search, trajectory, key))(sample.trajectory)
    expected = searched_by_hand(agent, params, sample, key).trajectory
    close(got, expected)
    old, new = (x.steps.extras["policy"] for x in (sample.trajectory, got))
    assert np.any(old != new, axis=(0, 2)).sum() == 3


@pytest.mark.slow
@pytest.mark.parametrize("bootstrap", ["search", "target_network"])
def test_the_loss_learns_what_was_searched_anew(bootstrap, key):
    """Its gradient is that of a sample whose policies and values were searched by hand, with the
    newest parameters, which get no gradient through the search."""
    agent = agent_that_reanalyzes(bootstrap)
    params, sample = sample_for(agent)
    target_params = jax.tree.map(lambda x: 0.9 * x, params)

    def gradient(agent: Any, sample: Sample) -> Any:
        loss = jax.jit(jax.grad(agent.loss, has_aux=True))
        return loss(params, target_params, sample, key)

    by_hand = searched_by_hand(agent, params, sample, key)
    without = agent_that_reanalyzes(bootstrap, fraction=0.0)
    close(gradient(agent, sample), gradient(without, by_hand))
    with pytest.raises(AssertionError):
        close(gradient(agent, sample), gradient(without, sample))


# --- continuous actions --------------------------------------------------------------------------

LOW, HIGH = np.array(BOX.low), np.array(BOX.high)


def test_the_prior_is_uniform_over_samples_of_the_policy(key):
    """Means and scales of many samples; log-densities as scipy has them; actions in bounds."""
    policy = jnp.asarray([[0.5, -1.0, -1.0, 0.0], [0.0, 2.0, 0.5, -2.0]])
    mean, scale = policy[:, :2], jnp.exp(policy[:, 2:])
    actions = SearchActions(BOX, num_samples=4_000)
    logits, samples = actions.prior(policy, key)
    # (β̂ / β) π, where β is the density π and β̂ the share 1/K of each sample.
    log_probs = actions.log_probs(policy, samples)
    prior = 1 / 4_000 / np.exp(log_probs) * np.exp(log_probs)
    np.testing.assert_allclose(jax.nn.softmax(logits), prior, rtol=1e-5)
    expected = scipy.stats.norm.logpdf(samples["samples"], mean[:, None], scale[:, None]).sum(-1)
    np.testing.assert_allclose(log_probs, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(samples["samples"].mean(1), mean, atol=0.1)
    np.testing.assert_allclose(samples["samples"].std(1), scale, rtol=0.1)
    action = actions.to_actions(jnp.asarray([1, 3]), samples)
    chosen = np.clip(np.asarray(samples["samples"])[[0, 1], [1, 3]], -1, 1)
    np.testing.assert_allclose(action, LOW + (chosen + 1) / 2 * (HIGH - LOW), atol=1e-5)
    np.testing.assert_allclose(actions.encode(action), chosen, atol=1e-5)


@pytest.mark.slow
def test_the_policy_learns_the_densities_of_samples_as_the_search_weighs_them(key):
    """The loss less that without policy targets, beside a loop over sequences and timesteps."""
    agent = agent_that_reanalyzes("target_network", BOX, fraction=0.0)
    params, sample = sample_for(agent)
    steps, model = sample.trajectory.steps, agent.model
    extras = {**steps.extras, "policy": jnp.zeros_like(steps.extras["policy"])}
    trajectory = dataclasses.replace(
        sample.trajectory, steps=dataclasses.replace(steps, extras=extras)
    )
    without = dataclasses.replace(sample, trajectory=trajectory)
    loss = jax.jit(lambda sample: agent.loss(params, params, sample, key)[0].value)
    state = model.representation(params, steps.timestep.observation[0])
    states = [state, model.dynamics(params, state, steps.action[0])[0]]
    expected = 0.0
    for k, state in enumerate(states):
        mean, log_scale = np.split(np.asarray(model.prediction(params, state)[0]), 2, axis=-1)
        policy, samples = steps.extras["policy"][k], steps.extras["samples"][k]
        for n in range(N):
            density = scipy.stats.norm(mean[n], np.exp(log_scale[n]))
            expected -= np.dot(policy[n], density.logpdf(samples[n]).sum(-1)) / N
    np.testing.assert_allclose(loss(sample) - loss(without), expected, rtol=1e-4)


@pytest.mark.slow
def test_each_node_has_samples_of_its_own_policy(key):
    """Each state of the tree follows from its parent's by the sample that led there."""
    agent = agent_that_reanalyzes("search", BOX, num_simulations=40)
    params, sample = sample_for(agent)
    observation = sample.trajectory.steps.timestep.observation[0, 0]
    tree = jax.jit(partial(search_by_hand, agent, params))(observation, key).search_tree
    (states, samples), model = jax.tree.map(lambda x: x[0], tree.embeddings), agent.model
    samples, parents = samples["samples"], tree.parents[0, 1:]
    assert len(set(np.asarray(parents))) > 3
    assert not tree.children_prior_logits.any()
    encoded = np.clip(samples[parents, tree.action_from_parent[0, 1:]], -1, 1)
    action = jnp.asarray(LOW + (encoded + 1) / 2 * (HIGH - LOW), jnp.float32)
    expected, _ = model.dynamics(params, states[parents], action)
    np.testing.assert_allclose(states[1:], expected, atol=1e-5)
    mean, log_scale = jnp.split(model.prediction(params, states)[0], 2, axis=-1)
    noise = (samples - mean[:, None]) * jnp.exp(-log_scale[:, None])
    assert len(np.unique(noise)) == noise.size
    np.testing.assert_allclose([noise.mean(), noise.std()], [0, 1], atol=0.1)


@pytest.mark.slow
def test_the_search_chooses_the_best_sample_of_a_model_that_is_known(monkeypatch):
    """With one simulation for each, where the reward says how near an action is to a goal."""
    agent = agent_that_reanalyzes("search", BOX, num_simulations=16)
    goal = np.array([1.0, 0.25], np.float32)

    def dynamics(self: Model, params: Any, state: Any, action: Any) -> Any:
        distance = jnp.sum((action - goal[None]) ** 2, axis=-1, keepdims=True)
        atoms = jnp.arange(ATOMS, dtype=jnp.float32)[None]
        return state, -((atoms - 10 + distance) ** 2)

    monkeypatch.setattr(Model, "dynamics", dynamics)
    params, sample = sample_for(agent)
    timestep = jax.tree.map(lambda x: x[0], sample.trajectory.steps.timestep)
    keys = jax.random.split(jax.random.key(0), N)
    action, extras, _ = jax.jit(agent.act, static_argnums=4)(params, (), timestep, keys, False)
    choices = LOW + (np.clip(np.asarray(extras["samples"]), -1, 1) + 1) / 2 * (HIGH - LOW)
    assert choices.shape == (N, agent.settings.max_considered_actions, 2)
    nearest = np.argmin(np.sum((choices - goal) ** 2, axis=-1), axis=-1)
    np.testing.assert_allclose(action, choices[np.arange(N), nearest], atol=1e-5)
    np.testing.assert_array_equal(extras["policy"].argmax(-1), nearest)


# --- targets and the search ----------------------------------------------------------------------


def test_search_finds_the_better_action_of_a_model_that_is_known(monkeypatch):
    """Where the model says that action 2 is worth most, the search chooses it and says so."""
    agent, env = agent_and_env("muzero", num_simulations=16)

    def dynamics(self, params, state, action):
        reward = jax.nn.one_hot(jnp.where(action == 2, 8, 5), 11) * 50.0
        return state, reward

    monkeypatch.setattr(Model, "dynamics", dynamics)
    params, timestep = agent.actor_params(fresh(agent)), enter(agent, env).timestep
    keys = jax.random.split(jax.random.key(0), B)
    act = jax.jit(agent.act, static_argnums=4)
    action, extras, _ = act(params, (), timestep, keys, False)
    assert (np.asarray(action) == 2).all()
    assert (np.asarray(extras["policy"]).argmax(-1) == 2).all()
    np.testing.assert_allclose(extras["policy"].sum(-1), 1.0, rtol=1e-5)


def test_a_mask_that_allows_nothing_changes_nothing_of_a_search():
    """At a time-out there is no action, but a value to bootstrap from."""
    zeros, logits = jnp.zeros(1), jnp.zeros((1, ACTIONS))
    root = gumbel.RootFnOutput(prior_logits=logits, value=zeros, embedding=zeros)

    def step(params, key, action, state):
        output = {"reward": 1.0 * action, "discount": zeros, "prior_logits": logits, "value": zeros}
        return gumbel.RecurrentFnOutput(**output), state

    @jax.jit
    def search(mask):
        observation = {ACTION_MASK: mask}
        return gumbel.gumbel_search(
            (), jax.random.key(0), root, step, observation, VECTORS, explore=False
        )

    nothing, all_actions = search(logits > 0), search(logits == 0)
    close(nothing, all_actions)
    close(nothing[2], (0 + 1 + 2) / (3 + 1))


def test_what_comes_after_an_end_is_nothing_and_after_a_cut_unknown():
    """Of samples that end, only what is known teaches: other rewards, actions and policies after
    an end or a cut change no gradient."""
    agent, _ = agent_and_env("muzero", n_step=1, unroll_steps=3)
    state = jax.jit(fresh, static_argnums=0)(agent)
    loss = jax.jit(partial(global_grad, methods_of(agent).loss, axis=None))

    def sample(discount, last, reward, policy):
        drawn = sample_of(reward, discount, last)
        steps = drawn.trajectory.steps
        extras = {"policy": jnp.asarray(policy)[:-1, None], "value": jnp.zeros((5, 1))}
        steps = dataclasses.replace(steps, extras=extras)
        trajectory = dataclasses.replace(drawn.trajectory, steps=steps)
        return dataclasses.replace(drawn, trajectory=trajectory)

    def gradient(*about):
        params, target_params = state.shared.params, state.shared.target_params
        return loss(params, target_params, sample(*about), jax.random.key(0))[0]

    policy = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1, 0]]
    other = np.eye(3, dtype=np.float32)[[0, 1, 0, 1, 2, 0]]
    rewards, others = [9, 1.0, 2.0, 3.0, 4.0, 5.0], [9, 1.0, 2.0, -3.0, -4.0, 5.0]
    for discount, last in (([1, 1, 0, 1, 1, 1], [0] * 6), ([1] * 6, [0, 0, 1, 0, 0, 0])):
        ended = discount[2] == 0
        changed = other if ended else np.where(np.arange(6)[:, None] >= 2, other, policy)
        close(gradient(discount, last, rewards, policy), gradient(discount, last, others, changed))
    quiet = [1] * 6, [0] * 6
    with pytest.raises(AssertionError):
        close(gradient(*quiet, rewards, policy), gradient(*quiet, others, other))
    for discount in (0, 1):
        grads = gradient([discount, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], rewards, policy)
        assert optax.tree.norm(grads) == 0


@pytest.mark.parametrize(
    "bootstrap", ["search", pytest.param("target_network", marks=pytest.mark.slow)]
)
def test_value_targets_bootstrap_from_the_search_or_the_target_network(bootstrap):
    """Rewards 1, 2, 4, ...: the targets of the first two timesteps by hand, n = 2, K = 1."""
    agent, _ = agent_and_env("muzero", n_step=2, unroll_steps=1, discount=0.5, bootstrap=bootstrap)
    methods = methods_of(agent)
    length = methods.buffer.length
    assert length == (5 if bootstrap == "search" else 4)
    drawn = sample_of([9, 1, 2, 4, 8][:length], [1] * length, [0] * length).trajectory
    searched = 10 * jnp.arange(1.0, length)[:, None]
    steps = dataclasses.replace(drawn.steps, extras={"value": searched})
    params = jax.jit(fresh, static_argnums=0)(agent).shared.params
    got = jax.jit(methods.value_targets)(params, dataclasses.replace(drawn, steps=steps))
    observation = drawn.timesteps().observation
    network = jax.jit(jax.vmap(partial(methods.model.value, params)))(observation)
    values = searched if bootstrap == "search" else network
    expected = [1 + 0.5 * 2 + 0.25 * values[2], 2 + 0.5 * 4 + 0.25 * values[3]]
    close(got, jnp.stack(expected))
