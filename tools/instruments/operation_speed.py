"""How long the operations of a training step take on this device, by operator, type and size."""

import math
import statistics
from collections import deque
from collections.abc import Callable
from itertools import cycle, islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.instruments.clock import device_seconds, timed
from tools.instruments.tracker import ATTENTION, Tracker

FOOTPRINT = {"cpu": 48 * 2**20}  # bytes that a step has touched when it comes to a tensor again; else 256 MiB
# _operations reads these tables of sizes.
ROWS = (128, 1024, 4096)
WIDTHS = (32, 64, 128, 256, 512, 1024)
RATIOS = (1, 3)
HEADS = (16, 32, 64, 128)
TOKENS = (64, 128, 256, 512, 1024, 2048)
MOVED = (2**14, 2**17, 2**19, 2**21, 2**23, 2**25)  # bytes of a tensor
PATCHES = tuple(product((4, 20), (4, 8), (64, 256)))  # channels, size, features


class FillingSizes(NamedTuple):
    """Sizes that fill a device. A core computes heads one after another; 132 multiprocessors have room for many.

    heads: of attention that compute at once. down, across: patches along the sides of an image. row: numbers that are
    normalised together.
    """

    heads: int
    down: int
    across: int
    row: int


FULL = {"cpu": FillingSizes(heads=2, down=8, across=16, row=128)}
FULL_GPU = FillingSizes(heads=64, down=64, across=128, row=512)
BATCH = 2e-4  # seconds that a batch of calls takes at least
BATCHES = 4
# FLOP of the largest product by device and type; else 1e12. CPUs compute float16 without instructions of its own.
LONGEST = {
    ("cpu", torch.float32): 1.1e9,
    ("cpu", torch.bfloat16): 1.1e9,
    ("cpu", torch.float16): 6e7,
}
OF_HEADS = ", heads of "  # between type and size of a head, of attention


def _cast_other(x, _):
    """Cast as mixed precision does: float32 to bfloat16, and every other type to float32."""
    other = torch.bfloat16 if x.dtype == torch.float32 else torch.float32
    return x.to(other)


# Operations that move memory and compute little: those of the residual stream, of optimizers and of casts.
PLAIN: list[Callable[..., Tensor]] = [
    torch.add,
    lambda x, _: x.clone(),
    lambda x, _: x.sum(0),
    lambda x, _: x.mul_(0.999),
    lambda x, _: x.add_(1e-8),
    lambda x, y: x.lerp_(y, 0.1),
    lambda x, y: x.addcmul_(y, y, value=1e-3),
    lambda x, _: x.sqrt(),
    lambda x, y: x.addcdiv_(y, y, value=-1e-3),
    lambda x, _: x / 0.5,
    _cast_other,
]
Measured = dict[str, dict[str, list[list[float]]]]  # {operator: {type: [[FLOP, bytes moved, seconds]]}}


class _Layer(NamedTuple):
    """A layer to measure. shapes: first the bias, which takes no gradient here, then the tensors that take one."""

    flops: float
    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]


def _operations(device, dtype):
    """Operations and sets of tensors on which they work in turn: those of layers forward and backward, then PLAIN."""
    filling = FULL.get(device.type, FULL_GPU)
    flat_shapes = []  # (rows, filling.row) for each size in MOVED
    for size in MOVED:
        rows = size // dtype.itemsize // filling.row
        flat_shapes.append((max(1, rows), filling.row))

    layers = [
        *_linear_layers(),
        *_attention_layers(filling.heads),
        *_patch_layers(filling.down, filling.across),
        *_pointwise_layers(flat_shapes),
    ]
    most = LONGEST.get((device.type, dtype), 1e12)
    for layer in layers:
        if layer.flops > most:
            continue
        sets = _tensor_sets(device, dtype, layer.shapes)
        yield layer.function, sets
        yield _backward, [_run_forward(layer.function, *tensors) for tensors in sets]
    for shape, plain in product(flat_shapes, PLAIN):
        yield plain, _tensor_sets(device, dtype, (shape, shape))


def _linear_layers():
    """Linear layers, of which each width stands on the side of the input and on that of the output."""

    def linear(b, x, w):
        return F.linear(x, w, b)

    for rows, width, ratio in product(ROWS, WIDTHS, RATIOS):
        wide = ratio * width
        for inner, columns in {(width, wide), (wide, width)}:  # one of them where the ratio is 1
            flops = 2 * rows * inner * columns  # multiplications and additions
            yield _Layer(flops, linear, ((columns,), (rows, inner), (columns, inner)))


def _attention_layers(heads):
    def attention(_, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    for size, tokens in product(HEADS, TOKENS):
        flops = 4 * heads * tokens**2 * size  # queries with keys, then weights with values
        of_each = (1, heads, tokens, size)  # (B, heads, N, d)
        # Attention has no bias, so a single number takes its place.
        yield _Layer(flops, attention, ((1,), of_each, of_each, of_each))


def _patch_layers(down, across):
    """Patch embeddings of a batch of four images: convolutions whose kernels do not overlap."""

    def embed_patches(b, x, w):
        return F.conv2d(x, w, b, stride=w.shape[-1])

    for channels, size, width in PATCHES:
        flops = 8 * down * across * channels * size**2 * width  # the four images included
        images = (4, channels, down * size, across * size)
        kernel = (width, channels, size, size)
        yield _Layer(flops, embed_patches, ((width,), images, kernel))


def _pointwise_layers(flat_shapes):
    """GELU and layer norms. They count as no FLOP, so that none is too long to be measured."""

    def gelu(_, x):
        return F.gelu(x)

    def layer_norm(b, x, w):
        return F.layer_norm(x, w.shape, w, b)

    for shape in flat_shapes:
        yield _Layer(0, gelu, ((1,), shape))
    for shape in flat_shapes:
        features = shape[1:]
        yield _Layer(0, layer_norm, (features, shape, features))


def _run_forward(layer, bias, *tensors):
    """Arguments of _backward. The graph is kept, so that one forward pass serves many backward passes."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = layer(bias, *leaves)
    return out, leaves, torch.ones_like(out)


def _backward(out, leaves, grad):
    return torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _tensor_sets(device, dtype, shapes):
    """Sets of tensors, alike: at most 32, and two at least.

    They and their results take about as many bytes as FOOTPRINT says. An operation then finds its tensors in no cache,
    as in a step.
    """
    first = []
    for shape in shapes:
        # Without zeros, no operation divides by them.
        values = torch.rand(shape, device=device).add_(0.5)
        first.append(values.to(dtype))
    size_of_set = sum(tensor.nbytes for tensor in first)
    footprint = FOOTPRINT.get(device.type, 2**28)
    # The other half of the footprint is for the results.
    number = footprint // 2 // size_of_set
    number = min(32, max(2, number))
    sets = []
    for _ in range(number):
        sets.append([tensor.clone() for tensor in first])
    return sets


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

    batch(len(sets))  # whatever is allocated once is allocated now
    seconds_of_two, _ = timed(device, batch, 2)
    seconds_of_batch = max(BATCH, seconds / BATCHES)
    calls = math.ceil(seconds_of_batch / seconds_of_two * 2)
    measured = [device_seconds(device, batch, calls) / calls for _ in range(BATCHES)]
    return statistics.median(measured)


def measure_operations(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    seconds: float = 0.002,
) -> Measured:
    """Seconds of operations. seconds: for each of them, at least. What several operators share, each has its part of.

    On a CPU the host's time of the smallest operation is taken out: it counts by operation.
    """
    # On a CPU, the host's work for an operator stands in the measured time. A tiny operation is nothing but that work.
    host_seconds = 0.0
    if device.type == "cpu":
        smallest = [(torch.ones(1),)]
        host_seconds = seconds_of(torch.neg, smallest, device, seconds)
    types = [(str(dtype).removeprefix("torch."), dtype) for dtype in dtypes]
    if device.type == "cuda":
        types.append(("tf32", torch.float32))

    # Several operations may use an operator at the same size. The fastest of them counts.
    fastest: dict[tuple[str, str, float, float], float] = {}
    precision_before = torch.get_float32_matmul_precision()
    for type_name, dtype in types:
        precision = "high" if type_name == "tf32" else "highest"
        torch.set_float32_matmul_precision(precision)
        for operation, sets in _operations(device, dtype):
            with Tracker() as tracker:
                operation(*sets[0])
            number_of_operators = sum(tracker.operations.values())
            each = seconds_of(operation, sets, device, seconds) / number_of_operators
            # The host's time varies, so at least a tenth of the measured time is left.
            on_device = max(each / 10, each - host_seconds)
            for op in tracker.operations:
                name = type_name
                if op.kind == ATTENTION:
                    # The last tensor of a set, values or a gradient, is (B, heads, N, d).
                    head_size = sets[0][-1].shape[-1]
                    name = f"{type_name}{OF_HEADS}{head_size}"
                place = (op.name, name, float(op.flops), float(op.moved))
                fastest[place] = min(fastest.get(place, each), on_device)
    torch.set_float32_matmul_precision(precision_before)

    found: Measured = {}
    for (operator, name, flops, moved), each in fastest.items():
        by_type = found.setdefault(operator, {})
        by_type.setdefault(name, []).append([flops, moved, each])
    return found
