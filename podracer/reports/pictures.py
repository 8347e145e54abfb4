"""Pictures of observations, for environments that cannot draw themselves."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from podracer.types import EnvironmentSpec, PyTree

_PIXELS = 160  # smaller pictures are enlarged to about this many on the longer side
_COLORS = np.array(
    [
        (31, 119, 180),
        (255, 127, 14),
        (44, 160, 44),
        (214, 39, 40),
        (148, 103, 189),
        (140, 86, 75),
        (227, 119, 194),
        (188, 189, 34),
        (23, 190, 207),
        (240, 240, 240),
    ],
    np.uint8,
)


def has_picture(observation: PyTree) -> bool:
    """Return whether an observation, or its spec, has exactly one leaf that is an image."""
    return len(_images(observation)) == 1


def _images(observation: PyTree) -> list[Any]:
    leaves = jax.tree.leaves(observation)
    return [leaf for leaf in leaves if len(leaf.shape) in (2, 3) and min(leaf.shape[:2]) > 1]


def draw_observation(observation: PyTree, spec: EnvironmentSpec) -> np.ndarray:
    """Return a picture of the image `[H, W, C]` in an observation, uint8 `[h, w, 3]`.

    A stack of frames shows its newest one. Three channels are red, green and blue. Other channels
    have a color each, which is shown where they are not 0.
    """
    (image,), (image_spec,) = _images(observation), _images(spec.observation)
    if image.ndim == 2:
        image = image[..., None]
    if image_spec.frame_stack:
        image = image[..., -1:]
    elif image.dtype == np.uint8 and image.shape[-1] % 3 == 0:
        image = image[..., -3:]
    if image.shape[-1] in (1, 3) and image.dtype.kind in "fub":
        bright = image if image.dtype == np.uint8 else np.clip(image, 0, 1) * 255
        picture = np.broadcast_to(bright.astype(np.uint8), (*image.shape[:2], 3))
    elif image.shape[-1] == 1:
        picture = _COLORS[image[..., 0] % len(_COLORS)]
    else:
        picture = np.zeros((*image.shape[:2], 3), np.uint8)
        for channel in range(image.shape[-1]):
            picture[image[..., channel] > 0] = _COLORS[channel % len(_COLORS)]
    factor = -(-_PIXELS // max(picture.shape[:2]))
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)
