"""Evaluation: whole episodes of any agent in any environment."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from podracer import environment, rollout
from podracer.agent import Agent, with_last_action
from podracer.arguments import typed
from podracer.checks import check_spec
from podracer.devices.machine import num_cores
from podracer.devices.mesh import fetch, from_first_process, on_one_device
from podracer.envs.host.dlpack import on_host
from podracer.errors import ConfigError, EnvironmentFault
from podracer.fields import struct
from podracer.ops.action_masks import epsilon_greedy, lacks_action
from podracer.ops.random import GOLDEN
from podracer.types import (
    NO_ACTION,
    Carry,
    Discrete,
    EnvironmentSpec,
    LearnerState,
    MultiDiscrete,
    Params,
    TimeStep,
    blank_timestep,
)

MAX_STEPS = 30_000  # steps of an episode
MAX_EPISODES = 2**20  # episodes of an evaluation, each in its own environment
PolicyKind = Literal["greedy", "sampled"]
T = TypeVar("T")
_PLACE = "in an evaluation"  # begins messages on faults


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Undiscounted returns and lengths of whole episodes, one for each environment."""

    returns: np.ndarray
    """Returns, f32 `[episodes]`; of a population `[P, episodes]`."""
    lengths: np.ndarray
    """Valid transitions, i32 of the same shape."""
    unfinished: np.ndarray
    """Number of episodes that were cut by `max_steps`, i64 `[]` or `[P]`: their returns are
    partial."""
    distinct_episodes: np.ndarray
    """Number of episodes that differ in return, length or actions, i64 `[]` or `[P]`."""
    broken: int = 0
    """Number of episodes that a fault of a host environment broke, each time it did: another one
    was played in their place."""

    @property
    def repetition(self) -> str | None:
        """Statement that nearly all episodes were repetitions of others, None if they were not."""
        episodes, distinct = self.returns.shape[-1], int(self.distinct_episodes.min())
        # A deterministic game that begins in one of two ways has two episodes. What was cut has no
        # other return or length to differ in.
        if distinct >= min(3, episodes) or np.any(self.unfinished):
            return None
        count = "one episode" if distinct == 1 else f"{distinct} different episodes"
        return f"the {episodes} evaluation episodes are repetitions of {count}"


@dataclasses.dataclass(frozen=True)
class ProgramEvaluator:
    """Evaluator whose program can be compiled before the first call.

    The program plays the episodes. Where environments are on the host, it chooses their actions.
    """

    program: jax.stages.Wrapped
    arguments: Callable[..., tuple[Any, ...]]  # the program's, from the evaluator's
    play: Callable[..., Evaluation] | None = None  # on the host

    def __call__(self, *args: Any, **kwargs: Any) -> Evaluation:
        if self.play is not None:
            return self.play(*args, **kwargs)
        return to_evaluation(self.program(*self.arguments(*args, **kwargs)))

    def lower(self, *args: Any) -> Callable[[], object]:
        """Trace the program for these arguments; return a function that compiles it for calls."""
        return self.program.lower(*self.arguments(*args)).compile

    def after(self, inputs: Callable[..., tuple[Any, ...]]) -> ProgramEvaluator:
        """Return the evaluator of other arguments, of which `inputs` makes this one's."""
        play = self.play
        return ProgramEvaluator(
            self.program,
            lambda *args: self.arguments(*inputs(*args)),
            None if play is None else lambda *args: play(*inputs(*args)),
        )


@dataclasses.dataclass(frozen=True)
class ActingRule:
    """Method by which an agent chooses actions in an evaluation."""

    policy: PolicyKind = "greedy"
    """`greedy` for the agent's best actions, `sampled` for those it explores with."""
    epsilon: float = 0.0
    """Probability, in [0, 1], of a uniformly random allowed action instead."""

    def check(self, spec: EnvironmentSpec | None = None) -> None:
        """Raise `ConfigError` for invalid values, and where an environment excludes them."""
        if self.policy not in ("greedy", "sampled"):
            raise ConfigError(f"evaluation_policy must be greedy or sampled, not {self.policy!r}.")
        if not 0 <= self.epsilon <= 1:
            raise ConfigError(f"evaluation_epsilon must lie in [0, 1], but it is {self.epsilon}.")
        if spec and self.epsilon and not isinstance(spec.action, Discrete):
            actions = "several" if isinstance(spec.action, MultiDiscrete) else "continuous ones"
            raise ConfigError(
                f"evaluation_epsilon needs one discrete action at a time, and {spec.name} has "
                f"{actions}: take the policy `sampled` instead."
            )

    def act(
        self,
        agent: Agent,
        params: Params,
        carry: Carry,
        timestep: TimeStep,
        key: jax.Array,
        indices: jax.Array,
        step: jax.Array,
    ) -> tuple[jax.Array, Carry]:
        """Return actions `[B, ...]` at a step of the evaluation with this key, and the carry."""
        act_keys = episode_keys(key, rollout.Purpose.ACT, indices, step)
        action, _, carry = agent.act(params, carry, timestep, act_keys, self.policy == "sampled")
        if not self.epsilon:
            return action, carry
        assert isinstance(agent.spec.action, Discrete)
        # The action is the best one of these values, so that epsilon-greedy replaces it.
        values = jax.nn.one_hot(action, agent.spec.action.num_actions)
        explore_keys = episode_keys(key, rollout.Purpose.EXPLORE, indices, step)
        epsilon = jnp.float32(self.epsilon)
        action = epsilon_greedy(values, timestep.observation, explore_keys, epsilon)
        return action, with_last_action(carry, action)


@typed
def make_evaluator(
    agent: Agent,
    env: environment.Environment | environment.HostEnvironments,
    episodes: int,
    *,
    policy: PolicyKind = "greedy",
    epsilon: float = 0.0,
    max_steps: int = MAX_STEPS,
) -> ProgramEvaluator:
    """Return a function `(actor_params, run_key, update=0) -> Evaluation`, compiled once.

    The episodes depend on the run's key and on the number of the update, so that the evaluations of
    a run play fresh ones; leave `update` at 0 to play the same ones again. Each episode has an
    environment of its own, so that short episodes are not preferred to long ones. An environment
    with a `for_evaluation()` is evaluated in that: whole games and unclipped rewards for Atari.

    `policy` is `greedy`, the agent's best actions, or `sampled`, those of `act(explore=True)`;
    `epsilon` is the probability of a uniformly random allowed action instead. Raises `ConfigError`
    for an epsilon where actions are continuous; the function raises `EnvironmentFault` where an
    action mask allows nothing.
    """
    if not 1 <= episodes <= MAX_EPISODES:
        raise ConfigError(f"an evaluation has 1 to {MAX_EPISODES:,} episodes, not {episodes:,}.")
    rule = ActingRule(policy, epsilon)
    rule.check(check_spec(env))
    env = environment.evaluation_environment(env)
    if isinstance(env, environment.HostEnvironments):
        return _host_evaluator(agent, env, rule, episodes, max_steps)
    program = jax.jit(partial(play_episodes, agent, env, rule, episodes, max_steps))
    return ProgramEvaluator(program, evaluation_inputs)


def evaluation_inputs(
    params: Params, run_key: jax.Array, update: int | jax.Array = 0
) -> tuple[Params, jax.Array, jax.Array]:
    """Return an evaluator's arguments. Raises `ConfigError` for a state and for what is no key."""
    if isinstance(params, LearnerState) or not isinstance(run_key, jax.Array):
        raise ConfigError("an evaluator takes (agent.actor_params(state), jax.random.key(0)).")
    return params, run_key, jnp.uint32(update)


@struct
class Episodes:
    """Episodes that were played, one for each environment: leaves `[B]`, of JAX or numpy."""

    returns: Any  # f32
    lengths: Any  # i32
    is_over: Any  # bool: the episode has ended
    actions: Any  # u32: a hash of all actions
    stuck: Any  # bool: in a step of the episode no action was allowed


def to_evaluation(episodes: Episodes) -> Evaluation:
    """Return the evaluation that consists of these episodes, `[B]` or `[P, B]`.

    Raises `EnvironmentFault` if one of them is stuck.
    """
    played: Episodes = fetch(episodes)
    if played.stuck.any():
        raise EnvironmentFault(f"{_PLACE}: {NO_ACTION}")
    shape = played.returns.shape
    rows = np.stack([played.returns, played.lengths, played.actions], axis=-1, dtype=np.float64)
    distinct = [len(np.unique(pod, axis=0)) for pod in rows.reshape(-1, shape[-1], 3)]
    unfinished = np.asarray((~played.is_over).sum(axis=-1))
    distinct_episodes = np.reshape(distinct, shape[:-1])
    return Evaluation(played.returns, played.lengths, unfinished, distinct_episodes)


def play_episodes(
    agent: Agent,
    env: environment.Environment,
    rule: ActingRule,
    episodes: int,
    max_steps: int,
    params: Params,
    run_key: jax.Array,
    update: jax.Array,
) -> Episodes:
    """Play one episode in each environment of a batch; may be traced."""
    indices = jnp.arange(episodes, dtype=jnp.uint32)
    key = evaluation_key(run_key, update)

    def body(loop: tuple[Any, ...]) -> tuple[Any, ...]:
        t, actor, played = loop
        stuck = lacks_action(env.spec, actor.timestep)
        action, actor = advance(agent, env, rule, params, actor, key, indices, t)
        finished = (actor.episodes.count == 1) & ~played.is_over
        # The totals still hold only the first episode when it has just ended.
        played = Episodes(
            jnp.where(finished, actor.episodes.total_return, played.returns),
            jnp.where(finished, actor.episodes.total_length, played.lengths),
            played.is_over | finished,
            jnp.where(played.is_over, played.actions, _hash(played.actions, action)),
            played.stuck | (stuck & ~played.is_over),
        )
        return t + 1, actor, played

    reset_keys = episode_keys(key, rollout.Purpose.RESET, indices, jnp.uint32(0))
    actor = rollout.init_actor(agent, env, reset_keys)
    zeros, false = jnp.zeros(episodes), jnp.zeros(episodes, bool)
    played = Episodes(zeros, zeros.astype(jnp.int32), false, zeros.astype(jnp.uint32), false)
    _, actor, played = jax.lax.while_loop(
        lambda loop: (loop[0] < max_steps) & ~jnp.all(loop[-1].is_over),
        body,
        (jnp.uint32(0), actor, played),
    )
    running = actor.episodes
    return dataclasses.replace(
        played,
        returns=jnp.where(played.is_over, played.returns, running.running_return),
        lengths=jnp.where(played.is_over, played.lengths, running.running_length),
    )


def advance(
    agent: Agent,
    env: environment.Environment,
    rule: ActingRule,
    params: Params,
    actor: rollout.ActorState,
    key: jax.Array,
    indices: jax.Array,
    t: jax.Array,
) -> tuple[jax.Array, rollout.ActorState]:
    """Act once in each environment; return the actions and the new state."""
    action, carry = rule.act(agent, params, actor.carry, actor.timestep, key, indices, t + 1)
    step_keys = episode_keys(key, rollout.Purpose.STEP, indices, t + 1)
    return action, rollout.step_environments(env, actor, action, carry, step_keys)


def evaluation_key(run_key: jax.Array, update: jax.Array) -> jax.Array:
    """Return the key of the evaluation after an update."""
    return jax.random.fold_in(rollout.purpose_key(run_key, rollout.Purpose.EVALUATE), update)


def episode_keys(
    key: jax.Array, purpose: rollout.Purpose, indices: jax.Array, step: jax.Array
) -> jax.Array:
    """Return keys `[B]` for one purpose at one step of an evaluation."""
    return rollout.environment_keys(rollout.purpose_key(key, purpose), indices, step[None])[0]


def _hash(hashes: Any, action: Any) -> Any:
    """Return hashes u32 `[B]` of sequences that are longer by one action; for JAX and numpy."""
    words = action.view(np.uint32).reshape(len(hashes), -1)
    for i in range(words.shape[1]):
        hashes = (hashes ^ words[:, i]) * GOLDEN
        hashes = hashes ^ (hashes >> 15)
    return hashes


def _host_evaluator(
    agent: Agent, env: environment.HostEnvironments, rule: ActingRule, episodes: int, max_steps: int
) -> ProgramEvaluator:
    act = jax.jit(partial(rule.act, agent))
    logged = set[str]()  # kinds of faults, over all evaluations of a run

    def evaluate(params: Params, run_key: jax.Array, update: int | jax.Array = 0) -> Evaluation:
        returns, lengths = np.zeros(episodes, np.float64), np.zeros(episodes, np.int32)
        is_over, actions = np.zeros(episodes, bool), np.zeros(episodes, np.uint32)
        broken = np.int32(0)
        steps = host_steps(agent, env, act, params, run_key, update, is_over, logged)
        with contextlib.closing(steps):
            for previous_last, action, timestep in itertools.islice(steps, max_steps):
                actions = np.where(is_over, actions, _hash(actions, action))
                returns += np.where(is_over, 0, timestep.reward)
                lengths += ~is_over & ~previous_last
                is_over |= timestep.ends_episode(previous_last)
                is_lost = ~is_over & timestep.begins_after_loss(previous_last)
                returns[is_lost], lengths[is_lost], actions[is_lost] = 0, 0, 0
                broken += is_lost.sum(dtype=np.int32)
                if is_over.all():
                    break
        # Emulators may differ between hosts, but all hosts must take the same decisions.
        returns = returns.astype(np.float32)
        played = Episodes(returns, lengths, is_over, actions, np.zeros(episodes, bool))
        played, broken = from_first_process((played, broken))
        return dataclasses.replace(to_evaluation(played), broken=int(broken))

    def arguments(
        params: Params, run_key: jax.Array, update: int | jax.Array = 0
    ) -> tuple[Any, ...]:
        params, key, _ = _acting_inputs(params, run_key, update)
        timestep = blank_timestep(env.spec, episodes)
        indices = np.arange(episodes, dtype=np.uint32)
        return params, agent.carry(episodes), timestep, key, indices, np.uint32(1)

    return ProgramEvaluator(act, arguments, evaluate)


def _acting_inputs(
    params: Params, run_key: jax.Array, update: int | jax.Array
) -> tuple[Params, jax.Array, jax.Array]:
    """Return parameters, an evaluation's key and its environments' seed, on one local device."""
    params, run_key, update = evaluation_inputs(params, run_key, update)
    replicated = (params, jax.random.key_data(run_key), update)
    params, data, update_on_device = on_one_device(replicated)
    key = evaluation_key(jax.random.wrap_key_data(data), update_on_device)
    return params, key, jax.random.bits(key)


def host_steps(
    agent: Agent,
    env: environment.HostEnvironments,
    act: Callable[..., tuple[jax.Array, Carry]],
    params: Params,
    run_key: jax.Array,
    update: int | jax.Array,
    is_over: np.ndarray,
    logged: set[str],
) -> Generator[tuple[np.ndarray, np.ndarray, TimeStep]]:
    """Yield steps forever: `last [B]` of the previous timestep, actions, and the next timestep.

    The caller marks in `is_over [B]` rows that only play on, as their episodes are over. Kinds of
    faults that are not yet `logged` are.
    """
    num_envs = len(is_over)
    environments = on_host(env)
    params, key, seed = _acting_inputs(params, run_key, update)
    carry, indices = agent.carry(num_envs), np.arange(num_envs, dtype=np.uint32)
    make = partial(environments.make, num_envs, num_cores())
    with contextlib.closing(_call(make)) as batch:
        timestep = _call(partial(batch.reset, int(seed), indices, 0))
        for t in itertools.count(1):
            environment.log_first_faults(_PLACE, environment.features(batch).first_faults, logged)
            if (lacks_action(environments.spec, timestep) & ~is_over).any():
                raise EnvironmentFault(f"{_PLACE}: {NO_ACTION}")
            previous_last = np.array(timestep.last)  # the next step may overwrite it
            action, carry = act(params, carry, timestep, key, indices, np.uint32(t))
            action = np.asarray(action)
            timestep = _call(partial(batch.step, action))
            yield previous_last, action, timestep


def _call(function: Callable[[], T]) -> T:
    """Call into the environments; a fault's message says that it was in an evaluation."""
    try:
        return environment.call_environment(_PLACE, function)
    except EnvironmentFault as error:
        if not str(error).startswith(_PLACE):  # they raised it themselves
            error.args = (f"{_PLACE}: {error}",)
        raise
