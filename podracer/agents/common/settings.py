"""Settings that agents of one family share: fields, which an agent gives other defaults."""

from __future__ import annotations

from typing import Any, Self

from podracer.agents.common.optimizers import Optimizer, OptimizerBuilder, ScheduledOptimizer
from podracer.arguments import check_static, typed
from podracer.errors import ConfigError
from podracer.fields import bounded, static, struct
from podracer.networks import MLP, NetworkBuilder, TorsoNetwork
from podracer.replay import Replay
from podracer.schedules import Linear, Schedule
from podracer.types import ACTION_MASK, EnvironmentSpec


@struct
class LearnerSettings:
    """Settings of all agents."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Refuse settings without names, and values that cannot be static ones."""
        if args:
            raise ConfigError(
                f"{cls.__name__} takes its settings by their names, such as learning_rate=1e-3: "
                "networks are agent.network=podracer.TorsoNetwork(...), and podracer.train gets "
                "the environment."
            )
        check_static(cls, values)
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        """Have `build` refuse what is no specification."""
        if "build" in vars(cls):
            cls.build = typed(vars(cls)["build"])

    learning_rate: Schedule = bounded(6e-4)
    """Learning rate of the optimizer."""
    discount: float = bounded(0.99, high=1.0)
    """Discount factor gamma, in [0, 1]."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(64, 64))))
    """Network of the agent, without its heads."""


@struct
class ClippedSettings(LearnerSettings):
    """Settings of agents that clip the norm of their gradients."""

    max_gradient_norm: float = bounded(10.0, low=1e-6)
    """Largest global norm of the gradient; a larger gradient is scaled down to it."""
    optimizer: OptimizerBuilder = Optimizer()
    """Optimizer of the parameters."""


@struct
class GroupSettings:
    """Settings of agents whose policy and critics may see different parts of an observation."""

    critic_network: NetworkBuilder | None = static(default=None)
    """Network of each critic, without its head; None for the policy's, or one like
    it."""
    actor_groups: tuple[str, ...] = static(default=())
    """Groups or keys of the observation that the policy sees; by default the group `actor`, or all
    where there is no such group."""
    critic_groups: tuple[str, ...] = static(default=())
    """Groups or keys of the observation that critics see; by default the group `critic`, or all
    where there is no such group. If the policy sees others, it shares no layer with them."""

    def groups(self, spec: EnvironmentSpec) -> dict[str, tuple[str, ...]]:
        """Return the keys that the `actor` and the `critic` see, {} where nothing chooses them."""
        entries = tuple(spec.observation) if isinstance(spec.observation, dict) else ()
        names = {"actor": self.actor_groups, "critic": self.critic_groups}
        declared = {*spec.groups, *entries} & names.keys()
        if not declared and not any(names.values()):
            return {}
        for role in names:
            names[role] = names[role] or ((role,) if role in declared else entries)
        names["actor"] += (ACTION_MASK,) if ACTION_MASK in entries else ()
        return {role: spec.keys(groups) for role, groups in names.items()}


@struct
class GaussianSettings:
    """Settings of agents with Gaussian policies for continuous actions."""

    state_dependent_std: bool = static(default=False)
    """Whether the network outputs the standard deviation of actions; else it is a parameter."""


@struct
class ActorCriticSettings(GroupSettings, GaussianSettings, ClippedSettings):
    """Settings of actor-critics; the defaults are IMPALA's."""

    max_gradient_norm: float = bounded(40 / 640, low=1e-6)
    optimizer: OptimizerBuilder = Optimizer("rmsprop", epsilon=0.01 / 640)
    value_cost: float = bounded(0.5)
    """Weight of the value loss in the total loss."""
    entropy_cost: Schedule = bounded(0.01)
    """Weight of the entropy bonus in the total loss."""


@struct
class VtraceSettings(ActorCriticSettings):
    """Settings of actor-critics that learn by V-trace."""

    trace_lambda: float = bounded(1.0, high=1.0)
    """Trace parameter lambda of V-trace, in [0, 1]: a factor of each trace coefficient c."""
    clip_rho: float = bounded(1.0)
    """Truncation level rho-bar of the importance ratios that weigh temporal differences."""
    clip_c: float = bounded(1.0)
    """Truncation level c-bar of the importance ratios that carry corrections to earlier steps."""


@struct
class EpochSettings:
    """Settings of agents that learn a rollout in epochs of minibatches."""

    num_epochs: int = static(default=4, low=1)
    """Number K of passes over each rollout."""
    num_minibatches: int = static(default=4, low=1)
    """Number of equal minibatches that each epoch splits the rollout of a device into."""


@struct
class TargetNetworkSettings(ClippedSettings):
    """Settings of agents with a replay, n-step returns and a target network."""

    n_step: int = static(default=1, low=1)
    """Rewards n in a return before it bootstraps."""
    target_update_period: int = static(default=250, low=1)
    """Number of updates between copies of the parameters to the target network."""
    replay: Replay = static(default=Replay())
    """Replay buffer."""


@struct
class QLearningSettings(TargetNetworkSettings):
    """Settings of Q-learning from a replay."""

    epsilon: Schedule = bounded(Linear(1.0, 0.01, frames=50_000), high=1.0)
    """Probability epsilon of a random action, in [0, 1]; see `apex_alpha`."""
    apex_alpha: float = bounded(0.0)
    """Spread alpha of epsilon: environment i of B takes epsilon ** (1 + alpha * i / (B - 1))."""


def build_optimizer(settings: ClippedSettings) -> ScheduledOptimizer:
    """Return the optimizer of clipped gradients with its learning rate."""
    method = settings.optimizer.build(settings.max_gradient_norm)
    return ScheduledOptimizer(method, settings.learning_rate)
