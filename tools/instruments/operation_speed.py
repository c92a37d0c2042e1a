"""How long the operations of a training step take on this device, by operator, type and size."""

import math
import statistics
from collections import deque
from collections.abc import Callable
from itertools import cycle, islice, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.instruments.clock import device_seconds, timed
from tools.instruments.tracker import ATTENTION, Tracker

FOOTPRINT = {"cpu": 48 * 2**20}  # bytes that a step has touched when it comes to a tensor again; else 256 MiB
ROWS, WIDTHS, RATIOS = (128, 1024, 4096), (32, 64, 128, 256, 512, 1024), (1, 3)
HEADS, TOKENS = (16, 32, 64, 128), (64, 128, 256, 512, 1024, 2048)
MOVED = (2**14, 2**17, 2**19, 2**21, 2**23, 2**25)  # bytes of a tensor
PATCHES = tuple(product((4, 20), (4, 8), (64, 256)))  # channels, size, features
# What fills a device: heads that compute at once, patches along the sides of an image, numbers that are normalised
# together. A core computes heads one after another; a GPU of 132 multiprocessors has all of two heads at once.
FULL = {"cpu": (2, (8, 16), 128)}
FULL_GPU = 64, (64, 128), 512
BATCH, BATCHES = 2e-4, 4  # seconds that a batch of calls takes at least, and how many batches there are
# FLOP of the largest product by device and type; else 1e12. CPUs compute float16 without instructions of its own.
LONGEST = {("cpu", torch.float32): 1.1e9, ("cpu", torch.bfloat16): 1.1e9, ("cpu", torch.float16): 6e7}
OF_HEADS = ", heads of "  # between type and size of a head, of attention
PLAIN: list[Callable[..., Tensor]] = [
    torch.add, lambda x, _: x.clone(), lambda x, _: x.sum(0), lambda x, _: x.mul_(0.999), lambda x, _: x.add_(1e-8),
    lambda x, y: x.lerp_(y, 0.1), lambda x, y: x.addcmul_(y, y, value=1e-3), lambda x, _: x.sqrt(),
    lambda x, y: x.addcdiv_(y, y, value=-1e-3), lambda x, _: x / 0.5,
    lambda x, _: x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32),
]  # fmt: skip
Measured = dict[str, dict[str, list[list[float]]]]  # {operator: {type: [[FLOP, bytes moved, seconds]]}}


def _operations(device, dtype):
    """Operations and sets of tensors on which they work in turn: those of layers forward and backward, then PLAIN."""
    most = LONGEST.get((device.type, dtype), 1e12)
    heads, (down, across), row = FULL.get(device.type, FULL_GPU)
    layers = []  # FLOP, function, shapes: of the bias, and of what has a gradient
    for rows, width, ratio in product(ROWS, WIDTHS, RATIOS):
        for inner, columns in {(width, ratio * width), (ratio * width, width)}:
            shapes = (columns,), (rows, inner), (columns, inner)
            layers.append((2 * rows * inner * columns, lambda b, x, w: F.linear(x, w, b), shapes))
    for size, tokens in product(HEADS, TOKENS):
        shapes = (1,), *[(1, heads, tokens, size)] * 3
        layers.append((4 * heads * tokens**2 * size, lambda _, *qkv: F.scaled_dot_product_attention(*qkv), shapes))
    for channels, size, width in PATCHES:
        shapes = (width,), (4, channels, down * size, across * size), (width, channels, size, size)
        flops = 8 * down * across * channels * size**2 * width
        layers.append((flops, lambda b, x, w: F.conv2d(x, w, b, stride=w.shape[-1]), shapes))
    flat = [(max(1, size // dtype.itemsize // row), row) for size in MOVED]
    layers += [(0, lambda _, x: F.gelu(x), ((1,), shape)) for shape in flat]
    layers += [(0, lambda b, x, w: F.layer_norm(x, (row,), w, b), ((row,), s, (row,))) for s in flat]
    for flops, layer, shapes in layers:
        if flops <= most:
            sets = _sets(device, dtype, shapes)
            yield layer, sets
            yield _backward, [_made(layer, *tensors) for tensors in sets]
    for shape, plain in product(flat, PLAIN):
        yield plain, _sets(device, dtype, (shape, shape))


def _made(layer, bias, *tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = layer(bias, *leaves)
    return out, leaves, torch.ones_like(out)


def _backward(out, leaves, grad):
    return torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _sets(device, dtype, shapes):
    """Sets of tensors, alike: at most 32, and two at least."""
    made = [torch.rand(shape, device=device).add_(0.5).to(dtype) for shape in shapes]
    number = FOOTPRINT.get(device.type, 2**28) // 2 // sum(tensor.nbytes for tensor in made)
    return [[tensor.clone() for tensor in made] for _ in range(min(32, max(2, number)))]


def seconds_of(
    operation: Callable[..., object],
    sets: list[Any],
    device: torch.device,
    seconds: float,
) -> float:
    """Seconds of a call, the median of some batches. Results are kept for a while, as in a step."""
    results: deque[object] = deque(maxlen=len(sets))
    turns = cycle(sets)

    def batch(calls):
        for tensors in islice(turns, calls):
            results.append(operation(*tensors))

    batch(len(sets))  # makes what is made once
    once, _ = timed(device, batch, 2)
    calls = math.ceil(max(BATCH, seconds / BATCHES) / once * 2)
    return statistics.median(device_seconds(device, batch, calls) / calls for _ in range(BATCHES))


def measure_operations(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    seconds: float = 0.002,
) -> Measured:
    """Seconds of operations. seconds: for each of them, at least. What several operators share, each has its part of.

    On a CPU the host's time of the smallest operation is taken out: it counts by operation.
    """
    fastest: dict[tuple[str, str, float, float], float] = {}
    floor = seconds_of(torch.neg, [(torch.ones(1),)], device, seconds) if device.type == "cpu" else 0.0
    types = [(str(dtype).removeprefix("torch."), dtype) for dtype in dtypes]
    types += [("tf32", torch.float32)] if device.type == "cuda" else []
    before = torch.get_float32_matmul_precision()
    for called, dtype in types:
        torch.set_float32_matmul_precision("high" if called == "tf32" else "highest")
        for operation, sets in _operations(device, dtype):
            with Tracker() as tracker:
                operation(*sets[0])
            each = seconds_of(operation, sets, device, seconds) / sum(tracker.operations.values())
            for op in tracker.operations:
                name = f"{called}{OF_HEADS}{sets[0][-1].shape[-1]}" if op.kind == ATTENTION else called
                place = op.name, name, float(op.flops), float(op.moved)
                fastest[place] = min(fastest.get(place, each), max(each / 10, each - floor))
    torch.set_float32_matmul_precision(before)
    found: Measured = {}
    for (name, called, *size), each in fastest.items():
        found.setdefault(name, {}).setdefault(called, []).append([*size, each])
    return found
