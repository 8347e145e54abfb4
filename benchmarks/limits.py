"""Our networks beside the limits of the machine: a roofline, in CPU seconds.

First the machine: matrix products and memory bandwidth. Then each network, forward and with its
gradient, in a scan as learners have it: its arithmetic, the rate reached, and the share of the rate
of a product of 1024 x 1024. Where `--torch-python` names a Python with PyTorch, that takes turns
with the same programs on the same cores. With `--parts` the layers one by one, and the three parts
that lose most: the time that they take beyond what their arithmetic would take at the rate of the
product. With `--programs` whole training programs of the other benchmarks (`programs.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from anakin_parts import Timing
from harness import Contender, Process, Result, alternate, append, here, parse, parser
from programs import measure_programs

from podracer.networks import CNN, MLP, Head, ResNet, TorsoNetwork
from podracer.networks.layers import dense
from podracer.networks.torsos import Torso
from podracer.ops.convolution import convolution
from podracer.types import ArraySpec

PIXELS = (84, 84, 4)
NETWORKS: dict[str, tuple[Torso, tuple[int, ...]]] = {
    "MinAtar CNN": (CNN((16,), (3,), (1,), (128,)), (10, 10, 4)),
    "Nature": (CNN(), PIXELS),
    "IMPALA shallow": (CNN((16, 32), (8, 4), (4, 2), (256,)), PIXELS),
    "IMPALA deep": (ResNet(), PIXELS),
    "MLP 64x64": (MLP((64, 64)), (4,)),
    "MLP 256x256": (MLP((256, 256)), (17,)),
}
OUTPUTS = 7  # six actions and a value


@dataclasses.dataclass(frozen=True)
class Layer:
    """A convolution, or a product where the picture is one pixel."""

    name: str
    image: tuple[int, int, int]
    size: int
    outputs: int
    stride: int = 1
    padding: int = 0

    @property
    def result(self) -> tuple[int, int]:
        height, width, _ = self.image
        edge = 2 * self.padding - self.size
        return (height + edge) // self.stride + 1, (width + edge) // self.stride + 1

    @property
    def flops(self) -> int:
        """Floating-point operations of a row, forward."""
        return 2 * math.prod(self.result) * self.size**2 * self.image[2] * self.outputs


def layers(torso: Torso, shape: tuple[int, ...]) -> list[Layer]:
    """All convolutions and products of a network, in order."""
    found: list[Layer] = []

    def add(image: tuple[int, int, int], *settings: int) -> tuple[int, int, int]:
        found.append(Layer(f"layer {len(found) + 1}", image, *settings))
        return (*found[-1].result, found[-1].outputs)

    image = (1, 1, shape[0]) if isinstance(torso, MLP) else (shape[0], shape[1], shape[2])
    if isinstance(torso, CNN):
        for outputs, size, stride in zip(torso.channels, torso.kernels, torso.strides, strict=True):
            image = add(image, size, outputs, stride)
    elif isinstance(torso, ResNet):
        for outputs in torso.channels:
            height, width, _ = add(image, 3, outputs, 1, 1)
            image = ((height + 1) // 2, (width + 1) // 2, outputs)
            for _ in range(2 * torso.blocks):
                add(image, 3, outputs, 1, 1)
    image = (1, 1, math.prod(image))
    hidden = torso.hidden if isinstance(torso.hidden, tuple) else (torso.hidden,)
    for width in (*hidden, OUTPUTS):
        image = add(image, 1, width)
    return found


def flops(torso: Torso, shape: tuple[int, ...], backward: bool) -> int:
    """Operations of a row. A gradient is two more products, but none for the observation."""
    first, *others = [layer.flops for layer in layers(torso, shape)]
    return 2 * first + 3 * sum(others) if backward else first + sum(others)


def product(size: int, steps: int) -> Contender:
    """`steps` products of two square matrices."""

    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x @ x, None

    program = jax.jit(lambda x: jax.lax.scan(step, x, length=steps)[0])
    return here("XLA", program, jnp.eye(size), 2 * size**3 * steps)


def copy(size: int, steps: int) -> Contender:
    """`steps` times reading and writing `size` floats."""
    program = jax.jit(
        lambda x: jax.lax.scan(lambda x, _: (x + 1.0, None), x, length=steps)[0], donate_argnums=0
    )
    return here("XLA", program, jnp.zeros(size), 8 * size * steps)


def network(
    torso: Torso, shape: tuple[int, ...], batch: int, steps: int, backward: bool
) -> Contender:
    """`steps` minibatches of `batch` rows in a scan, each with a step of SGD or forward alone."""
    dtype = jnp.uint8 if len(shape) == 3 else jnp.float32
    built = TorsoNetwork(torso).build(
        ArraySpec(shape, dtype), {"policy": Head(OUTPUTS - 1), "value": Head(1)}
    )
    bits = jax.random.bits(jax.random.key(0), (steps, 1, batch, *shape), jnp.uint8)
    observations = bits if dtype == jnp.uint8 else bits / 128.0 - 1.0
    first = jnp.zeros((1, batch), bool)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        outputs, _ = built.apply(params, built.carry(batch), x, first)
        return sum((jnp.sum((y - 1) ** 2) for y in outputs.values()), jnp.zeros(())) / batch

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        if not backward:
            return params, loss(params, x)
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-4 * g, params, grads), value

    def program(state: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
        params, x, _ = state
        params, losses = jax.lax.scan(step, params, x)
        return params, x, losses

    state = (built.init(jax.random.key(1)), observations, jnp.zeros(steps))
    return here("podracer", jax.jit(program), state, batch * steps)


def part(layer: Layer, batch: int, steps: int, which: str) -> Contender:
    """The forward pass of a layer, or one of its gradients, in a scan.

    Each step adds a number of the last result to all inputs, so that nothing can leave the loop;
    the part "inputs" is that addition alone.
    """
    x = jax.random.normal(jax.random.key(0), (batch, *layer.image))
    w = jax.random.normal(jax.random.key(1), (layer.size,) * 2 + (layer.image[2], layer.outputs))
    w = w / math.sqrt(layer.size**2 * layer.image[2])

    def apply(x: jax.Array, w: jax.Array) -> jax.Array:
        if layer.image[:2] == (1, 1):
            return dense(x.reshape(batch, -1), w[0, 0])
        return convolution(x, w, layer.stride, layer.padding)

    g = jnp.ones_like(apply(x, w))
    compute: Callable[..., jax.Array]
    compute, inputs = {
        "forward": (apply, (x, w)),
        "weight gradient": (lambda x, g: jax.vjp(partial(apply, x), w)[1](g)[0], (x, g)),
        "input gradient": (lambda w, g: jax.vjp(lambda x: apply(x, w), x)[1](g)[0], (w, g)),
        "inputs of forward": (lambda x, w: x[:1, 0, 0, 0], (x, w)),
        "inputs of weight gradient": (lambda x, g: x[:1, 0, 0, 0], (x, g)),
        "inputs of input gradient": (lambda w, g: w[:1, 0, 0, 0], (w, g)),
    }[which]

    def step(state: tuple[jax.Array, Any], _: None) -> tuple[tuple[jax.Array, Any], None]:
        result, inputs = state
        small = result.reshape(-1)[0] * 1e-20
        inputs = jax.tree.map(lambda x: x + small, inputs)
        return (compute(*inputs), inputs), None

    program = jax.jit(lambda state: jax.lax.scan(step, state, length=steps)[0])
    return here(which, program, (compute(*inputs), inputs), batch * steps)


def torch(process: Process | None, ours: Contender, *request: Any) -> list[Contender]:
    """The contender, and beside it the same program of PyTorch, if there is one."""
    if process is None:
        return [ours]
    line = json.dumps(request)
    peer = dataclasses.replace(
        ours, name="PyTorch", compile_seconds=0.0, lap=lambda: Timing(**process.ask(line))
    )
    return [ours, peer]


def microseconds(result: Result) -> float:
    """CPU time of a row."""
    return 1e6 / result.cpu_rate()


def measure_machine(process: Process | None, options: argparse.Namespace) -> tuple[float, float]:
    """Print the rates of products and copies a CPU second.

    Returns the FLOPs of a 1024 x 1024 product and the bytes of the largest copy.
    """
    print(f"\nThe machine, {options.cores} core(s)\n\n{'':24}{'XLA':>12}{'PyTorch':>12}")
    limit = bandwidth = 0.0
    for size in (128, 256, 512, 1024, 2048):
        steps = max(1, (1024 if options.quick else 4096) ** 3 // 8 // size**3)
        pair = torch(process, product(size, steps), "product", size, steps)
        rates = [result.cpu_rate() / 1e9 for result in alternate(pair, options.repetitions)]
        limit = rates[0] if size == 1024 else limit
        print(f"{f'product {size}, GFLOP/s':24}" + "".join(f"{rate:>12.0f}" for rate in rates))
        append(options.out, {"benchmark": "limits", "product": size, "gflops": rates})
    for name, size in (("16 MB", 2**22), ("256 MB", 2**26)):
        steps = 1 if options.quick else 2**28 // size
        pair = torch(process, copy(size, steps), "copy", size, steps)
        rates = [result.cpu_rate() / 1e9 for result in alternate(pair, options.repetitions)]
        bandwidth = rates[0]
        print(f"{f'x + 1 of {name}, GB/s':24}" + "".join(f"{rate:>12.1f}" for rate in rates))
        append(options.out, {"benchmark": "limits", "copy": size, "gigabytes": rates})
    return limit * 1e9, bandwidth * 1e9


def measure_network(
    name: str, batch: int, limit: float, process: Process | None, options: argparse.Namespace
) -> float:
    """Print the rates of a network; return the microseconds of a row with its gradient."""
    torso, shape = NETWORKS[name]
    steps = 2 if options.quick else max(2, 512 // batch)
    taken = 0.0
    for backward in (False, True):
        ours = network(torso, shape, batch, steps, backward)
        request = ("network", dataclasses.asdict(torso), shape, batch, steps, backward)
        results = alternate(torch(process, ours, *request), options.repetitions)
        taken, work = microseconds(results[0]), flops(torso, shape, backward)
        line = (
            f"{name:16}{batch:>5}{'gradient' if backward else 'forward':>10}{work / 1e6:>10.2f}"
            f"{taken:>10.1f}{work / taken / 1e3:>10.0f}{work / taken * 1e6 / limit:>9.0%}"
        )
        record = {
            "benchmark": "limits", "network": name, "batch": batch, "backward": backward,
            "flops": work, "microseconds": taken, "share": work / taken * 1e6 / limit,
        }  # fmt: skip
        if len(results) == 2:
            ratios = sorted(
                its.cpu_seconds / mine.cpu_seconds
                for mine, its in zip(results[0].laps, results[1].laps, strict=True)
            )
            record |= {"torch_microseconds": microseconds(results[1]), "ratios": ratios}
            line += f"{microseconds(results[1]):>10.1f}{statistics.median(ratios):>8.2f}"
            line += f"  {ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(line, flush=True)
        append(options.out, record)
    return taken


def measure_parts(name: str, batch: int, limit: float, options: argparse.Namespace) -> list[Any]:
    """Print the time of a row in each layer's parts; return `(lost, part, network)` of each."""
    torso, shape = NETWORKS[name]
    steps = 2 if options.quick else max(2, 256 // batch)
    kinds = ("forward", "weight gradient", "input gradient")
    print(f"\n{name}, {batch} rows: microseconds of a row (GFLOP/s)\n")
    print(f"{'':60}" + "".join(f"{kind:>22}" for kind in kinds))
    lost: list[tuple[float, str, str]] = []
    measured: dict[Layer, list[float]] = {}
    for index, layer in enumerate(layers(torso, shape)):
        alike = dataclasses.replace(layer, name="")
        wanted = kinds if index else kinds[:2]
        if alike not in measured:
            pairs = [
                part(layer, batch, steps, w) for kind in wanted for w in (kind, f"inputs of {kind}")
            ]
            times = [microseconds(result) for result in alternate(pairs, options.repetitions)]
            measured[alike] = [
                max(0.0, whole - inputs)
                for whole, inputs in zip(times[::2], times[1::2], strict=True)
            ]
        times = measured[alike]
        kernel = f"{layer.size}x{layer.size}x{layer.outputs}, stride {layer.stride}"
        about = f"{layer.name}: {layer.image}, {kernel}"
        print(
            f"{about:60}"
            + "".join(f"{t:>14.1f} ({layer.flops / max(t, 1e-9) / 1e3:>4.0f})" for t in times),
            flush=True,
        )
        least = layer.flops / limit * 1e6
        lost += [
            (t - least, f"{kind} of {layer.name}", name)
            for kind, t in zip(wanted, times, strict=True)
        ]
    return lost


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    made.add_argument("--rows", nargs="+", type=int, default=[64, 256, 512])
    made.add_argument("--cores", type=int, default=1, help="cores to use (default 1)")
    made.add_argument("--torch-python", type=Path, help="a Python that has PyTorch")
    made.add_argument("--parts", action="store_true", help="also time the layers one by one")
    made.add_argument("--programs", action="store_true", help="also whole training programs")
    options = parse(made)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.cores :])
    python, script = options.torch_python, str(Path(__file__).with_name("peer_torch.py"))
    process = Process("PyTorch", [str(python), script]) if python else None
    limit, bandwidth = measure_machine(process, options)
    print(
        f"\n{'':16}{'rows':>5}{'':>10}{'MFLOP/row':>10}{'us/row':>10}{'GFLOP/s':>10}{'share':>9}"
        f"{'torch us':>10}{'times':>8}  range"
    )
    rows = [4] if options.quick else options.rows
    taken = {}
    for name in options.only:
        for batch in rows:
            taken[name, batch] = measure_network(name, batch, limit, process, options)
    if options.parts:
        lost = [x for name in options.only for x in measure_parts(name, rows[0], limit, options)]
        lost.sort(key=lambda x: x[0] / taken[x[2], rows[0]], reverse=True)
        print("\nThe parts that lose most, in shares of a gradient of their network\n")
        for seconds, which, name in lost[:3]:
            print(f"{name}, {which}: {seconds / taken[name, rows[0]]:.0%}, {seconds:.1f} us a row")
    if options.programs:
        measure_programs(limit, bandwidth, options)


if __name__ == "__main__":
    main()
