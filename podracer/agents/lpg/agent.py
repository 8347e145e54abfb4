"""LPG: an update rule, learned from many lifetimes of learners that it teaches.

Every group of environments has a learner of its own in a world of its own (`types.Lifetimes`). The
rule updates the learner after each rollout. After K updates, the next rollout says how good they
were: its policy gradient goes back through all K to the rule, which is what is trained.
Source: Oh et al. 2020 (arXiv 2007.08794); hyperparameters of Jackson et al. 2023 (2310.02782).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import actor_critic, value_based
from podracer.agents.common.meta import meta_grad
from podracer.agents.lpg import rule as update_rule
from podracer.agents.lpg.figures import draw_targets
from podracer.agents.lpg.rule import Experience, UpdateRule, experience
from podracer.agents.lpg.rule_file import encode_rule
from podracer.agents.lpg.students import Students, by_life, each, empty, in_order
from podracer.environment import TaskGroups
from podracer.mesh import global_mean
from podracer.networks import Head, Table, TorsoNetwork
from podracer.ops.distributions import Categorical
from podracer.types import (
    Carry,
    ConfigError,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
    static,
    struct,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@struct
class LPG:
    """A learner of update rules for discrete actions.

    `shared` holds the rule, `local` its learners, whose leaves lead with the lifetimes L.
    """

    learning_rate: float = 1e-4
    """Of the rule."""
    discount: float = 0.99
    lambda_: float = 0.95
    learner_rate: float = 40.0
    """Step size of the learners."""
    prediction_cost: float = 0.5
    """Weight of a learner's prediction against its policy."""
    value_rate: float = 0.03
    """Of the values that say how good a learner's rollout was."""
    policy_entropy_cost: float = 0.05
    prediction_entropy_cost: float = 1e-3
    policy_target_cost: float = 5e-3
    prediction_target_cost: float = 1e-3
    max_gradient_norm: float = 0.5
    inner_updates: int = static(default=5)
    """K: updates of a learner that the gradient goes back through."""
    update_steps: int = static(default=20)
    """Of each environment before each of them: the driver's rollout length."""
    optimizer: Literal["sgd", "adam"] = static(default="sgd")
    """Of the learners."""
    lifetime_groups: int = static(default=1)
    """Differentiate so many groups of lifetimes one after another: their share of the memory."""
    recompute: bool = static(default=False)
    """Compute inner values again on the way back instead of keeping them."""
    rule: UpdateRule = static(default=UpdateRule())
    network: Table | TorsoNetwork = static(default=Table())
    """Of the learners."""
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        lives = self._count(num_envs)
        rule = self.rule.init(jax.random.fold_in(key, 0))
        keys = jax.random.split(jax.random.fold_in(key, 1), lives)
        learner, critic = self._learners.fresh(keys)
        shared = {
            "rule": rule,
            "optimizer": self._rule_optimizer.init(rule),
            "stored": jnp.int32(0),
            "shown": dict.fromkeys(("loss", "gradient_norm", *self._reward_names), jnp.float32(0)),
        }
        local = {
            "learner": learner,
            "critic": critic,
            "start": jax.tree.map(jnp.copy, learner),
            "window": empty(
                self._seen, (lives, self.inner_updates), self.update_steps, self._lifetimes.num_envs
            ),
            "life": jnp.zeros(lives, jnp.int32),
            "whole": jnp.ones(lives, bool),
        }
        return LearnerState(shared, local)

    def carry(self, num_envs: int) -> Carry:
        return ()

    def actor_params(self, state: LearnerState) -> Params:
        return state.local["learner"]["params"]

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        seen = timestep.observation["observation"]
        observation = jax.tree.map(lambda x: x[None], seen)
        outputs = each(self._learners.network, params, observation, timestep.first[None])
        policy = Categorical(actor_critic.mask_logits(seen, outputs["policy"][0]))
        return policy.sample(keys) if explore else policy.mode(), (), carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        shared, local, learners = state.shared, state.local, self._learners
        data, life, world = self._experience(trajectory)
        born = life != local["life"]
        # What happened in two lives says nothing of what the rule did in one.
        whole = local["whole"] & ~born
        critic, advantages = learners.judge(local["critic"], data)
        now = by_life(data, self._lifetimes.num_envs)
        gains = by_life(advantages, self._lifetimes.num_envs)

        due = shared["stored"] == self.inner_updates
        shared = jax.lax.cond(
            due,
            partial(self._improve, axis=axis),
            lambda shared, *_: shared,
            shared, (local["start"], local["window"], now, gains, whole, world),
        )  # fmt: skip
        slot = jnp.where(due, 0, shared["stored"])
        learner, taught = learners.teach(shared["rule"], local["learner"], data)
        learner, critic = learners.reborn(born, (learner, critic), key)
        local = {
            "learner": learner,
            "critic": critic,
            "start": jax.lax.cond(due, lambda: local["learner"], lambda: local["start"]),
            "window": jax.tree.map(lambda w, x: w.at[:, slot].set(x), local["window"], now),
            "life": life,
            "whole": jnp.where(due, ~born, whole),
        }
        metrics = shared["shown"] | {name: jnp.mean(x) for name, x in taught.items()}
        return LearnerState({**shared, "stored": slot + 1}, local), metrics

    def export(self, state: LearnerState, about: Mapping[str, Any]) -> bytes:
        return encode_rule(self.rule, state.shared["rule"], about)

    def draw(self, state: LearnerState, figure: Figure) -> None:
        draw_targets(figure, self.rule, state.shared["rule"], self.discount)

    # --- the rule --------------------------------------------------------------------------------

    def _improve(self, shared: PyTree, judged: PyTree, axis: str | None) -> PyTree:
        """One step of the rule on what the learners did after K updates."""
        groups = self.lifetime_groups
        parts = jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), judged)
        one = partial(self._rule_grad, shared["rule"])

        def add(total: PyTree, part: PyTree) -> tuple[PyTree, None]:
            return jax.tree.map(lambda t, x: t + x / groups, total, one(*part)), None

        shapes = jax.eval_shape(one, *jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        grads, loss, rewards = global_mean(jax.lax.scan(add, zeros, parts)[0], axis)
        updates, optimizer = self._rule_optimizer.update(grads, shared["optimizer"])
        shown, before = {"loss": loss, "gradient_norm": optax.tree.norm(grads)}, shared["shown"]
        for name, total, count in zip(self._reward_names, *rewards, strict=True):
            shown[name] = jnp.where(count > 0, total / jnp.maximum(count, 1e-8), before[name])
        return {
            **shared,
            "rule": optax.apply_updates(shared["rule"], updates),
            "optimizer": optimizer,
            "shown": shown,
        }

    def _rule_grad(
        self,
        rule: Params,
        start: PyTree,
        window: Experience,
        now: Experience,
        gains: jax.Array,
        whole: jax.Array,
        world: jax.Array,
    ) -> tuple[Params, jax.Array, list[jax.Array]]:
        """The rule's gradient on some lifetimes, its loss, and rewards and steps by world."""
        data, advantages = jax.tree.map(
            lambda x: x[0], in_order(jax.tree.map(lambda x: x[:, None], (now, gains)))
        )

        def objective(rule: Params, learner: PyTree, aux: Metrics) -> tuple[jax.Array, jax.Array]:
            loss = self._objective(learner, aux, data, advantages, whole.astype(jnp.float32))
            return loss, loss

        grads, (_, loss) = meta_grad(
            self._learners.teach, objective, rule, start, in_order(window),
            recompute=self.recompute,
        )  # fmt: skip
        kinds = whole[:, None] * jax.nn.one_hot(world, len(self._lifetimes.tasks))
        counted = (now.valid * now.reward, now.valid)
        return grads, loss, [jnp.mean(x, axis=(1, 2)) @ kinds for x in counted]

    def _objective(
        self,
        learner: PyTree,
        aux: Metrics,
        data: Experience,
        advantages: jax.Array,
        weights: jax.Array,
    ) -> jax.Array:
        """Policy gradient of the learners `[L]` after K updates, and the regularizers over these;
        `aux` leaves are `[K, L]`."""
        gains, last = self._learners.gain(learner, data, advantages)
        # Entropies are of the learners that the rule made, targets of what it said.
        made = {name: jnp.concatenate([aux[name][1:], x[None]]) for name, x in last.items()}
        means = {name: jnp.mean(weights[None] * x) for name, x in {**aux, **made}.items()}
        return (
            -jnp.mean(weights * gains)
            - self.policy_entropy_cost * means["policy_entropy"]
            - self.prediction_entropy_cost * means["prediction_entropy"]
            + self.policy_target_cost * means["policy_target"]
            + self.prediction_target_cost * means["prediction_target"]
        )

    # --- lifetimes -------------------------------------------------------------------------------

    def _experience(self, trajectory: Trajectory) -> tuple[Experience, jax.Array, jax.Array]:
        """What the learners see of a rollout, and at its end the life of each and its world."""
        steps = trajectory.steps.action.shape[0]
        if steps != self.update_steps:
            raise ConfigError(
                f"update_steps is {self.update_steps}, but a rollout has {steps} steps: "
                "the two must be equal."
            )
        data, shown = experience(trajectory), trajectory.final.observation
        envs = self._lifetimes.num_envs
        seen = dataclasses.replace(data, observation=data.observation["observation"])
        return seen, shown["task_count"][::envs], shown["task"][::envs]

    def _count(self, num_envs: int) -> int:
        """Lifetimes among so many environments."""
        envs, groups = self._lifetimes.num_envs, self.lifetime_groups
        if num_envs % (envs * groups):
            raise ConfigError(
                f"{num_envs} environments on a device are no multiple of {envs * groups}: "
                f"{envs} share a life, and lifetime_groups is {groups}."
            )
        return num_envs // envs

    @property
    def _lifetimes(self) -> TaskGroups:
        spec = actor_critic.require_spec(self.spec)
        groups = spec.extension
        if not isinstance(groups, TaskGroups):
            raise ConfigError(f"LPG teaches learners in lifetimes: take lifetimes:{spec.name}.")
        # Two windows: with less a birth falls into every one, and nothing is ever learned.
        least = 2 * (self.inner_updates + 1) * self.update_steps
        if groups.num_steps < least:
            raise ConfigError(
                f"lives of {groups.num_steps} steps are too short for {self.inner_updates} "
                f"updates of {self.update_steps}: take steps={least} or more."
            )
        return groups

    @property
    def _reward_names(self) -> list[str]:
        """Metrics: the mean reward of a step in each world."""
        return [f"reward_{world}" for world in self._lifetimes.tasks]

    @property
    def _seen(self) -> PyTree:
        return actor_critic.require_spec(self.spec).observation["observation"]

    @property
    def _learners(self) -> Students:
        num_actions = value_based.discrete(self.spec).num_actions
        heads = update_rule.heads(num_actions, self.rule.predictions)
        network = self.network.build(self._seen, heads)
        if network.carry(1) != ():
            raise ConfigError("LPG's learners have no memory: take a network without.")
        return Students(
            self.rule,
            network,
            self.network.build(self._seen, {"value": Head(1)}),
            update_rule.optimizer(self.optimizer, self.learner_rate),
            optax.adam(self.value_rate),
            self.discount,
            self.lambda_,
            self.prediction_cost,
        )

    @property
    def _rule_optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm), optax.adam(self.learning_rate)
        )
