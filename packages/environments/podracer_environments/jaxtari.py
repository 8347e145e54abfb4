"""The Atari games of JAXtari (Delfosse et al. 2025), reimplemented in JAX.

JAXtari draws its games with sprites that its user installs: nothing is downloaded or asked here.
Rules and pictures differ a little from the Atari 2600, so scores are not comparable with
the core's `atari:NAME`. Settings have the names that they have there.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import check_known, strongly_typed
from podracer.errors import ConfigError
from podracer.fields import bounded, check_ranges, struct
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, PyTree, TimeStep
from podracer_environments.suites import cast_like, import_suite, refusing

SIZE = (84, 84)  # height and width of observations
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue


def jaxtari(name: str, *, resets_per_step: int = 4, **settings: Any) -> AutoReset:
    """Return an Atari game of JAXtari, such as `jaxtari:pong` or `jaxtari:pong,objects=true`.

    It needs jaxtari and its sprites, and restarts by itself. A reset draws a picture too, so only
    `resets_per_step` of them are computed at each step for the whole batch, see `auto_reset`.
    `settings` replace fields of `Jaxtari`. Raises `ConfigError` where jaxtari or its sprites are
    not installed and for an unknown game.
    """
    return auto_reset(Jaxtari(name, **settings), resets_per_step=resets_per_step)


@struct
class JaxtariState:
    """A game between two steps."""

    game: PyTree
    """JAXtari's own state, with the raw key of the game's randomness."""
    frame: jax.Array
    """Number of frames since the game began, i32."""
    action: jax.Array
    """Action of the last frame, i32."""
    observation: jax.Array


@dataclasses.dataclass(frozen=True)
class Jaxtari:
    """One game, without restarts. An episode is a whole game.

    Observations are u8 `[84, 84, stack]`, gray, or with `objects` the numbers that describe the
    game's objects, f32 `[numbers, stack]`. The newest frame is the last; a game begins with copies
    of its first.
    """

    name: str
    objects: bool = False
    """Whether observations are positions and properties of objects, in JAXtari's units."""
    frame_skip: int = bounded(4, low=1)
    """Frames that each action is repeated for; a picture is the maximum over the last two."""
    stack: int = bounded(4, low=1)
    """Observations of consecutive steps that are stacked in one."""
    repeat_action_probability: float = bounded(0.25, high=1.0)
    """Probability that a frame repeats the previous action (sticky actions), in [0, 1]."""
    clip_rewards: bool = True
    """Whether the reward of each step is clipped to [-1, 1]."""
    max_frames: int = bounded(108_000, low=1)
    """Frames after which a time-out cuts a game: 30 minutes of play."""

    def __post_init__(self) -> None:
        check_ranges(self, f"jaxtari:{self.name}")
        _load(self.name)

    @property
    def spec(self) -> EnvironmentSpec:
        return _spec_of(self)

    def for_evaluation(self) -> Jaxtari:
        """Return the same game with unclipped rewards."""
        return dataclasses.replace(self, clip_rewards=False)

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        _, game = strongly_typed(_load(self.name).reset(jax.random.key_data(key)))
        observation = jnp.stack([self._frame(game)] * self.stack, axis=-1)
        state = JaxtariState(game, jnp.int32(0), jnp.int32(0), observation)
        return state, restart(observation)

    def step(
        self, key: jax.Array, state: JaxtariState, action: jax.Array
    ) -> tuple[PyTree, TimeStep]:
        env = _load(self.name)

        def play(carry: Any, repeats: jax.Array) -> tuple[Any, None]:
            game, _, previous_action, reward, is_over = carry
            frame_action = jnp.where(repeats, previous_action, action)
            _, next_game, frame_reward, ends, _ = env.step(game, frame_action)
            next_carry = (
                cast_like(next_game, game),
                game,
                frame_action,
                reward + jnp.asarray(frame_reward, jnp.float32),
                jnp.asarray(ends, bool),
            )
            frozen = jax.tree.map(lambda x, y: jnp.where(is_over, x, y), carry, next_carry)
            return frozen, None

        repeats = jax.random.bernoulli(key, self.repeat_action_probability, (self.frame_skip,))
        carry = (state.game, state.game, state.action, jnp.float32(0), jnp.bool_(False))
        (game, previous_game, last_action, reward, is_over), _ = jax.lax.scan(play, carry, repeats)
        newest = self._frame(game, previous_game if self.frame_skip > 1 else None)
        observation = jnp.concatenate([state.observation[..., 1:], newest[..., None]], axis=-1)
        frame = state.frame + self.frame_skip
        timestep = transition(
            observation,
            jnp.clip(reward, -1, 1) if self.clip_rewards else reward,
            terminal=is_over,
            timeout=frame >= self.max_frames,
        )
        return JaxtariState(game, frame, last_action, observation), timestep

    def render(self, state: JaxtariState) -> np.ndarray:
        """Return the game's picture in color, uint8 `[H, W, 3]`."""
        return np.asarray(_load(self.name).render(state.game))

    def _frame(self, game: PyTree, previous_game: PyTree | None = None) -> jax.Array:
        """Return what one frame adds to observations, u8 `[84, 84]` or f32 `[numbers]`."""
        env = _load(self.name)
        if self.objects:
            numbers = jax.tree.leaves(env._get_observation(game))
            return jnp.concatenate([jnp.ravel(x).astype(jnp.float32) for x in numbers])
        picture = env.render(game)
        if previous_game is not None:
            picture = jnp.maximum(picture, env.render(previous_game))
        gray = picture.astype(jnp.float32) @ jnp.asarray(LUMA)
        return jnp.round(jax.image.resize(gray, SIZE, "linear")).astype(jnp.uint8)


@functools.cache
def _load(name: str) -> Any:
    library = import_suite("jaxtari", f"jaxtari:{name}")
    check_known(name, library.list_available_games(), "jaxtari has no game")
    # Otherwise `make` would ask at the terminal whether to download.
    if not library.ownership_or_alt_markers_present() or (
        library.sprite_update_needed()
        and not library.declined_update_for_required_version()
        and not library.env_flag("JAXTARI_SKIP_SPRITE_UPDATE")
    ):
        raise ConfigError(
            f"jaxtari:{name} needs the sprites of JAXtari, which are missing or old: "
            "run `python -m jaxtari.install_sprites`, which asks for your consent."
        )
    with (
        jax.ensure_compile_time_eval(),
        refusing(f"jaxtari cannot make {name!r}", ImportError, OSError),
    ):
        return library.make(name)


@functools.cache
def _spec_of(game: Jaxtari) -> EnvironmentSpec:
    """Return a game's specification, for which its picture is traced only once."""
    env = _load(game.name)
    frame = jax.eval_shape(lambda: game._frame(env.reset(jax.random.PRNGKey(0))[1]))
    observation = ArraySpec((*frame.shape, game.stack), frame.dtype, frame_stack=game.stack > 1)
    return EnvironmentSpec(f"jaxtari:{game.name}", observation, Discrete(int(env.action_space().n)))
