"""The decision of a policy: a pure function of named arrays, which a file can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from podracer.agent import Agent, policy_params
from podracer.policy import add_start, from_start
from podracer.types import ArraySpec, Carry, Discrete, LearnerState, Params, PyTree, TimeStep
from podracer_deploy.export.inline import Inliner

Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """A policy as a function of named arrays that lead with B, its parameters inside.

    Inputs are those that the policy reads: `observation`, with its leaf's name if there are
    several, `reward` of the step before, `first` where an episode begins, `key`, two random uint32
    for each row, and its `memory`. Outputs are `action`, `scores` that a discrete action is the
    largest of, and `next_memory`, the memory at the next call.
    """

    inputs: dict[str, ArraySpec]
    outputs: dict[str, ArraySpec]
    initial_memory: dict[str, np.ndarray]
    """Memory of one row at the start, by the names of inputs."""
    sampled: bool
    _row: ClosedJaxpr
    _arguments: dict[str, Any]  # all of `_row`, with constants for those that are not inputs
    _results: tuple[str, ...]

    def row(self, arrays: Arrays, *, keys_as_words: bool = False) -> dict[str, jax.Array]:
        """Return the outputs for one row of inputs, without the axis B; may be traced."""
        inliner = Inliner(keys_as_words=keys_as_words)
        arguments = [arrays.get(name, constant) for name, constant in self._arguments.items()]
        results = dict(zip(self._results, inliner(self._row, arguments), strict=True))
        if "scores" in self.outputs:
            results["scores"] = inliner.argmax_inputs[0].reshape(-1)
        return {name: results[name] for name in self.outputs}

    def __call__(self, arrays: Arrays, *, keys_as_words: bool = False) -> dict[str, jax.Array]:
        """Return the outputs `[B, ...]` for inputs `[B, ...]`; may be traced."""
        return jax.vmap(partial(self.row, keys_as_words=keys_as_words))(dict(arrays))

    def structs(self, batch: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the inputs' shapes and dtypes for a batch size, a number or a symbol."""
        return {
            name: jax.ShapeDtypeStruct((batch, *spec.shape), spec.dtype)
            for name, spec in self.inputs.items()
        }


def make_decision(agent: Agent, state: LearnerState, *, sampled: bool = False) -> Decision:
    """Return the decision of an agent at a learner's state, `sampled` or its best.

    Each row acts as the first environment does where agents explore differently in each. Raises
    `ConfigError` for an agent that learns no policy.
    """
    params, spec = policy_params(agent, state), agent.spec
    memory = jax.tree.map(lambda x: np.asarray(x[0]), agent.carry(1))
    initial_memory = named_leaves("memory", memory)
    structs = named_leaves("observation", spec.observation) | initial_memory
    structs |= {"reward": ArraySpec(()), "first": ArraySpec((), bool)}
    if sampled:
        structs["key"] = ArraySpec((2,), np.uint32)
    arguments = {name: np.zeros(x.shape, x.dtype) for name, x in structs.items()} | initial_memory
    constant_memory: set[str] = set()

    def act(*values: Any) -> dict[str, jax.Array]:
        arrays = dict(zip(arguments, values, strict=True))
        return _act(agent, params, sampled, memory, arrays, constant_memory)

    row, shapes = jax.make_jaxpr(act, return_shape=True)(*arguments.values())
    results = {name: ArraySpec(x.shape, x.dtype) for name, x in shapes.items()}
    results = dict(sorted(results.items()))  # the order in which JAX has them
    decision = Decision(structs, results, {}, sampled, row, arguments, tuple(results))
    live = _live_inputs(decision, {"action"}, initial_memory) - constant_memory
    outputs = {"action": results["action"]}
    if isinstance(spec.action, Discrete) and not sampled:
        outputs |= _scores(decision, spec.action)
    live_memory = {name: x for name, x in initial_memory.items() if name in live}
    outputs |= {f"next_{name}": results[f"next_{name}"] for name in live_memory}
    inputs = {n: ArraySpec(x.shape, x.dtype) for n, x in structs.items() if n in live}
    return dataclasses.replace(decision, inputs=inputs, outputs=outputs, initial_memory=live_memory)


def _act(
    agent: Agent,
    params: Params,
    sampled: bool,
    memory: Carry,
    arrays: Arrays,
    constant_memory: set[str],
) -> dict[str, jax.Array]:
    """Return the named outputs of one row; add the names of memory that stays the same."""
    spec = agent.spec
    observation = _from_names("observation", spec.observation, arrays)
    observation = from_start(spec.observation, observation)
    timestep = TimeStep(
        observation=jax.tree.map(lambda x: x[None], observation),
        reward=arrays["reward"][None],
        discount=jnp.ones(1),
        first=arrays["first"][None],
        last=jnp.zeros(1, bool),
    )
    carry = jax.tree.map(lambda x: x[None], _from_names("memory", memory, arrays))
    # The best action ignores its key.
    words = arrays["key"][None] if sampled else jnp.zeros((1, 2), jnp.uint32)
    keys = jax.random.wrap_key_data(words, impl="threefry2x32")
    action, _, new_carry = agent.act(params, carry, timestep, keys, sampled)
    old, new = (named_leaves("memory", x) for x in (carry, new_carry))
    constant_memory.update(name for name in old if old[name] is new[name])
    row = jax.tree.map(lambda x: x[0], new_carry)
    return {"action": add_start(spec.action, action[0]), **named_leaves("next_memory", row)}


def named_leaves(prefix: str, tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by a prefix and their path, `memory.shared.0`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
    names = (f"{prefix}.{path}" if path else prefix for path in paths)
    return dict(zip(names, (leaf for _, leaf in leaves), strict=True))


def _from_names(prefix: str, tree: PyTree, arrays: Arrays) -> PyTree:
    """Return the named arrays of a prefix with the structure of a tree."""
    leaves = [arrays[name] for name in named_leaves(prefix, tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _scores(decision: Decision, space: Discrete) -> dict[str, ArraySpec]:
    """Return the output for what the action is the largest of, if there is such a thing.

    A search has none: it compares the actions that it visited most, by values whose range it
    stretches, and their rounding with it.
    """
    inliner = Inliner()
    jax.make_jaxpr(lambda *x: inliner(decision._row, x))(*decision._arguments.values())
    if inliner.has_loop or [x.size for x in inliner.argmax_inputs] != [space.num_actions]:
        return {}
    return {"scores": ArraySpec((space.num_actions,), inliner.argmax_inputs[0].dtype)}


def _live_inputs(decision: Decision, wanted: Iterable[str], memory: Arrays) -> set[str]:
    """Return the inputs that wanted outputs depend on, through the memory of later calls too."""
    specs = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in decision.inputs.items()}
    row = jax.make_jaxpr(decision.row)(specs).jaxpr
    variables = dict(zip(sorted(decision.inputs), row.invars, strict=True))
    results = dict(zip(sorted(decision.outputs), row.outvars, strict=True))
    names = set(wanted)
    while True:
        needed = needed_variables(row, [results[name] for name in names])
        live = {name for name, x in variables.items() if x in needed}
        next_memory = {f"next_{name}" for name in live if name in memory}
        if next_memory <= names:
            return live
        names |= next_memory


def needed_variables(jaxpr: Any, results: Iterable[Any]) -> set[Any]:
    """Return the variables that results depend on."""
    needed = {x for x in results if not isinstance(x, Literal)}
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed |= {x for x in equation.invars if not isinstance(x, Literal)}
    return needed
