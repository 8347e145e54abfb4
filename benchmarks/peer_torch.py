"""Networks, products and copies in PyTorch, as a contender of `limits.py`; runs in a Python that
has it.

One JSON object, then for each line that it reads, a JSON list of a program's name and its
arguments, the seconds of one repetition. Nothing of podracer is imported here.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import torch
from foreign import take_turns
from torch import nn

Lap = Callable[[], Any]


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        relu, size = nn.ReLU, (channels, channels, 3)
        self.layers = nn.Sequential(
            relu(), nn.Conv2d(*size, padding=1), relu(), nn.Conv2d(*size, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def network(torso: dict[str, Any], shape: list[int]) -> nn.Module:
    """The network of a torso of podracer, given as a dictionary, with seven outputs."""
    layers: list[nn.Module] = []
    hidden = torso["hidden"]
    if "blocks" in torso:
        channels, hidden = shape[-1], [hidden]
        for outputs in torso["channels"]:
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
            layers += [Residual(outputs) for _ in range(torso["blocks"])]
            channels = outputs
        layers += [nn.ReLU()]
    elif "kernels" in torso:
        channels = shape[-1]
        for outputs, size, stride in zip(
            torso["channels"], torso["kernels"], torso["strides"], strict=True
        ):
            layers += [nn.Conv2d(channels, outputs, size, stride), nn.ReLU()]
            channels = outputs
    layers += [nn.Flatten()]
    for width in hidden:
        layers += [nn.LazyLinear(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.LazyLinear(7))


def run_network(
    torso: dict[str, Any], shape: list[int], batch: int, steps: int, backward: bool
) -> Lap:
    picture = len(shape) == 3
    size = (steps, batch, *(shape[-1:] + shape[:-1]))  # channels first, as users of PyTorch do
    data = torch.randint(0, 256, size, dtype=torch.uint8) if picture else torch.randn(size)
    model = network(torso, shape)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return ((model(x.float() / 255.0 if picture else x) - 1) ** 2).mean()

    def lap() -> None:
        for x in data:
            if not backward:
                with torch.no_grad():
                    forward(x)
                continue
            model.zero_grad()
            forward(x).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=1e-4)  # type: ignore[arg-type]

    return lap


def run_product(size: int, steps: int) -> Lap:
    x = torch.randn(size, size)
    return lambda: [x @ x for _ in range(steps)]


def run_copy(size: int, steps: int) -> Lap:
    x = torch.zeros(size)
    return lambda: [x.add_(1.0) for _ in range(steps)]


@functools.cache
def program(request: str) -> Lap:
    name, *arguments = json.loads(request)
    lap = {"network": run_network, "product": run_product, "copy": run_copy}[name](*arguments)
    lap()  # warm
    return lap


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    take_turns({"torch": torch.__version__}, program)


if __name__ == "__main__":
    main()
