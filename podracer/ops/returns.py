"""Value targets and advantages from trajectories.

Every function takes arrays `[T, ...]` and works along the first axis; all other axes are batch.
`valid_tm1` is False where an episode was cut by a time-out: the action there is ignored. Such a
step has no advantage and its target is its own value, so the previous step bootstraps from it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from podracer.devices.fused import scan
from podracer.fields import struct, unchecked

Series = Float[Array, "T *b"]
Mask = Bool[Array, "T *b"]


def _backward(delta: Series, decay: Series) -> Series:
    """Solve `x_t = delta_t + decay_t x_{t+1}` with `x_T = 0`, from the end."""

    def step(x: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta_t, decay_t = inputs
        x = delta_t + decay_t * x
        return x, x

    return scan(step, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)[1]


def generalized_advantages(
    v_tm1: Series,
    v_t: Series,
    r_t: Series,
    discount_t: Series,
    valid_tm1: Mask,
    lambda_: float | jax.Array,
) -> Series:
    """Compute GAE advantages `[T, ...]`.

        δₜ = rₜ + γₜ v(sₜ) − v(sₜ₋₁)        Aₜ₋₁ = δₜ + γₜ λ Aₜ

    `discount_t` is the agent's discount times the environment's. Source: Schulman et al. 2016,
    equation 16 (arXiv 1506.02438).
    """
    delta = r_t + discount_t * v_t - v_tm1
    mask = valid_tm1.astype(delta.dtype)
    return _backward(mask * delta, mask * discount_t * lambda_)


def lambda_returns(
    v_tm1: Series,
    v_t: Series,
    r_t: Series,
    discount_t: Series,
    valid_tm1: Mask,
    lambda_: float | jax.Array,
) -> Series:
    """Compute λ-returns `[T, ...]`: the targets of TD(λ), Q(λ) and A2C.

        Gₜ₋₁ = rₜ + γₜ ((1 − λ) v(sₜ) + λ Gₜ),        G_{T-1} = r_T + γ_T v(s_T)

    Written as `v_tm1` plus the generalized advantage, which is the same sum reordered.
    Source: Sutton and Barto 2018, equation 12.2.
    """
    return v_tm1 + generalized_advantages(v_tm1, v_t, r_t, discount_t, valid_tm1, lambda_)


@unchecked
@struct
class VTrace:
    """Value targets and policy-gradient advantages."""

    targets: Float[Array, "T *b"]
    advantages: Float[Array, "T *b"]


def vtrace(
    v_tm1: Series,
    v_t: Series,
    r_t: Series,
    discount_t: Series,
    valid_tm1: Mask,
    rho_tm1: Series,
    *,
    lambda_: float | jax.Array = 1.0,
    clip_rho: float | jax.Array = 1.0,
    clip_c: float | jax.Array = 1.0,
    clip_pg_rho: float | jax.Array = 1.0,
    alpha_rho: float | jax.Array | None = None,
    alpha_c: float | jax.Array | None = None,
) -> VTrace:
    """Compute V-trace targets and advantages, with ratios `rho_tm1 = π(a|s) / μ(a|s)`.

        vₜ₋₁ − v(sₜ₋₁) = ρ̄ₜ₋₁ δₜ + γₜ c̄ₜ₋₁ (vₜ − v(sₜ))        c̄ = λ min(c_clip, ρ)
        advantageₜ₋₁ = min(ρ_pg, ρₜ₋₁) (rₜ + γₜ vₜ − v(sₜ₋₁))

    The target after the last transition is `v_t[-1]`; after a cut it is the value itself.
    Source: Espeholt et al. 2018, section 4.1 and remark 2 (arXiv 1802.01561).

    With `alpha_rho` (for both `min` with a ρ) and `alpha_c` clips leak: `min(clip, ρ)` becomes
    `α min(clip, ρ) + (1 − α) ρ`. Source: Zahavy et al. 2020, section 3.2 (arXiv 2002.12928).
    """
    mask = valid_tm1.astype(v_tm1.dtype)
    delta = _clipped(rho_tm1, clip_rho, alpha_rho) * (r_t + discount_t * v_t - v_tm1)
    decay = discount_t * lambda_ * _clipped(rho_tm1, clip_c, alpha_c)
    targets = v_tm1 + _backward(mask * delta, mask * decay)
    # Within the rollout the next target belongs to the next step: the bootstrap of remark 2.
    next_targets = jnp.concatenate([lambda_ * targets[1:] + (1 - lambda_) * v_t[:-1], v_t[-1:]])
    weight = _clipped(rho_tm1, clip_pg_rho, alpha_rho)
    advantages = weight * (r_t + discount_t * next_targets - v_tm1)
    return VTrace(targets=targets, advantages=mask * advantages)


def _clipped(rho: Series, clip: float | jax.Array, alpha: float | jax.Array | None) -> Series:
    clipped = jnp.minimum(clip, rho)
    return clipped if alpha is None else alpha * clipped + (1 - alpha) * rho


def retrace(
    q_tm1: Series,
    v_t: Series,
    r_t: Series,
    discount_t: Series,
    valid_tm1: Mask,
    rho_tm1: Series,
    lambda_: float | jax.Array,
) -> Series:
    """Compute Retrace targets `[T, ...]` of the actions taken, with `rho_tm1 = π(a|s) / μ(a|s)`.

        Gₜ₋₁ = rₜ + γₜ (v(sₜ) + cₜ (Gₜ − q(sₜ, aₜ)))        cₜ = λ min(1, ρₜ)

    `q_tm1` are values of actions taken, `v_t` of next states under π.

    Source: Munos et al. 2016, equation 4 (arXiv 1606.02647).
    """
    mask = valid_tm1.astype(q_tm1.dtype)
    traces = lambda_ * jnp.minimum(1.0, rho_tm1)
    next_traces = jnp.concatenate([traces[1:], jnp.zeros_like(traces[:1])])
    delta = r_t + discount_t * v_t - q_tm1
    return q_tm1 + _backward(mask * delta, mask * discount_t * next_traces)


def n_step_returns(
    r_t: Series, discount_t: Series, valid_tm1: Mask
) -> tuple[Float[Array, "*b"], Float[Array, "*b"], Int[Array, "*b"]]:
    """Compute the n-step return `G`, the discount `γ` of its bootstrap value, and the length `k`.

        G = r₁ + γ₁ r₂ + ... + γ₁ ... γₖ₋₁ rₖ        γ = γ₁ ... γₖ

    `k` is the number of transitions summed: T, or less where a time-out cuts the episode, and `γ`
    multiplies the value of the k-th timestep. All results are `[...]`. Source: Sutton and Barto
    2018, equation 7.1.
    """
    alive = jnp.cumprod(valid_tm1.astype(jnp.int32), axis=0)
    factors = jnp.where(alive > 0, discount_t, 1.0)
    products = jnp.cumprod(factors, axis=0)
    past_discounts = jnp.concatenate([jnp.ones_like(products[:1]), products[:-1]])
    return jnp.sum(alive * past_discounts * r_t, axis=0), products[-1], jnp.sum(alive, axis=0)


def n_step_targets(
    v: Float[Array, "T1 *b"], r_t: Series, discount_t: Series, valid_tm1: Mask, n: int
) -> Float[Array, "K *b"]:
    """Compute `G + γ v` of `n_step_returns` for every transition that begins n consecutive ones.

    `v [T + 1, ...]` are the values of all timesteps, the others are of T transitions; the targets
    are those of the first T - n + 1 timesteps.
    """
    count = r_t.shape[0] - n + 1

    def windows(x: jax.Array) -> jax.Array:
        return jnp.stack([x[i : i + count] for i in range(n)])

    returns, discounts, k = n_step_returns(windows(r_t), windows(discount_t), windows(valid_tm1))
    rows = jnp.arange(count).reshape(-1, *(1,) * (k.ndim - 1)) + k
    return returns + discounts * jnp.take_along_axis(v, rows, axis=0)


def discounted_sums(
    initial: Float[Array, "*b"], r_t: Series, decay_t: Series, ended_t: Mask
) -> tuple[Series, Float[Array, "*b"]]:
    """Compute sums of past rewards `Rₜ = rₜ + γ Rₜ₋₁`, `[T, ...]`, and the final sum.

    They start from `initial`, and again from 0 after `ended_t`. Their standard deviation is the
    scale by which rewards are divided (Engstrom et al. 2020, "Implementation Matters", section 3).
    """

    def step(total: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        reward, decay, ended = inputs
        total = reward + decay * total
        return jnp.where(ended, 0.0, total), total

    final, sums = jax.lax.scan(step, initial, (r_t, decay_t, ended_t))
    return sums, final
