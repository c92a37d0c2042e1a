"""A rank's share of the model and of the batch, in numbers: the input of the planner's formulas."""

import math
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from distributed.collectives import shard_sizes
from distributed.data_parallel import DTYPES, SHARDED
from networks.vit import patch_grid
from tools.planner.trace import GROUPS
from training.step import AMP_DTYPES
from utils.comm import COMBINED
from utils.layout import PARTS, Layout
from utils.schema import Config

Shape = tuple[int, ...]  # of a parameter


class Stage(NamedTuple):
    """Consecutive blocks of a rank. repeated: how many of them are computed again in the backward pass."""

    blocks: int
    repeated: int
    first: bool
    last: bool


class RankShare:
    """The share of one rank: the one at place `stage` along pp and at `band` along cp, first along all others.

    Short names are those of docs/reference/formulas.md. Sizes count numbers, not bytes, unless the name
    says so, and sizes of activations are those of a micro-batch.
    """

    def __init__(self, config: Config, layout: Layout, stage: int, band: int = 0):
        self.config, self.layout, self.stage, self.band = config, layout, stage, band
        self.dims = layout.mesh_dims
        self.t, self.p, self.d, self.heads = layout.tp, layout.pp, config.embed_dim, config.num_heads
        self.hidden, self.micro_batches = int(config.embed_dim * config.mlp_ratio), config.gradient_accumulation
        self.steps = config.longest_rollout  # of a forecast
        self.passes = self.micro_batches * self.steps  # forward passes in an optimizer step
        self.classifies, self.classes = config.model == "classifier", config.num_classes or 0

        # The model: stages, blocks, parameters.
        self.first, self.last = stage == 0, stage == layout.pp - 1
        self.chunks = 2 if layout.pp > 1 and config.pp_schedule == "interleaved" else 1  # stages of this rank
        self.blocks = config.depth // layout.pp
        every = config.checkpointing_interval
        self.repeats_steps = config.activation_checkpointing == "step"  # the whole model is computed twice
        by_blocks = config.activation_checkpointing in ("full", "selective")
        self.repeated = self.blocks // every if by_blocks else 0  # computed twice

        # The batch: samples, tokens, points.
        self.patches = patch_grid(config.img_size, config.patch_size)[0]
        self.domain, self.image = math.prod(layout.domain) > 1, layout.cp * math.prod(layout.domain)
        self.method = config.domain_method if self.domain else config.cp_method
        cuts = layout.cp * layout.domain[0], layout.domain[1]
        rows, columns = (shard_sizes(n, k) for n, k in zip(self.patches, cuts, strict=False))
        deep = math.prod(self.patches[2:])
        self.shares = [r * c * deep for r in rows for c in columns]  # tokens of the ranks that share an image
        self.tokens, self.all_tokens = self.shares[self.band], sum(self.shares)
        self.sequence = config.sequence_parallel and self.t > 1
        self.slice = -(-self.tokens // self.t) if self.sequence else self.tokens  # tokens between tensor-parallel pairs
        self.samples = config.global_batch_size // layout.dp // self.micro_batches
        points = self.samples * self.tokens * config.patch_size ** len(self.patches)
        self.inputs, self.state = points * config.model_in_channels, points * config.n_in_channels
        self.outputs = 0 if self.classifies else points * config.n_out_channels
        # Activations of one layer: of all tokens of this rank, and of its slice under sequence parallelism.
        self.whole, self.stream = (self.samples * n * self.d for n in (self.tokens, self.slice))

        # Data parallelism.
        self.replicas = layout.dp * self.image  # ranks that share gradients
        self.sharded = config.data_parallel in SHARDED and self.replicas > 1
        self.replicated = not self.sharded and not config.noddp and self.replicas > 1  # by DDP
        self.shards = (layout.shard or layout.dp) * self.image if self.sharded else 1
        by_rows = config.data_parallel == "ddp" or (config.data_parallel != "zero1" and config.amp_mode != "fp16")
        self.own_positions = self.domain and by_rows  # the position embedding is split, see split_images

        # Precision.
        gathered = DTYPES[config.gather_dtype] if self.sharded else None
        self.low = config.amp_mode != "none"
        self.width = 2 if self.low else 4  # bytes of what a matrix product takes and gives
        self.gathered_width = gathered.itemsize if gathered else 4
        self.copies = self.low and gathered != AMP_DTYPES[config.amp_mode]  # weights in low precision

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages of this rank; without a pipeline the model is one stage."""
        each = [(i == 0 and self.first, i == self.chunks - 1 and self.last) for i in range(self.chunks)]
        return [Stage(self.blocks // self.chunks, self.repeated // self.chunks, *ends) for ends in each]

    def schedule(self) -> list[tuple[bool, int]]:
        """[(backward, stage)] of this rank of a pipeline, in the order in which it computes micro-batches."""
        m, p, chunks = self.micro_batches, self.p, self.chunks
        if chunks == 1:
            ahead = m if self.config.pp_schedule == "gpipe" else min(m, p - self.stage)
            forward = backward = [0] * m
        else:
            turn = m // max(1, m // p)  # micro-batches of a stage in a row
            ahead = min(m * chunks, (chunks - 1) * turn + 2 * (p - 1 - self.stage) + 1)
            forward = [i // turn % chunks for i in range(m * chunks)]
            backward = [chunks - 1 - chunk for chunk in forward]
        order = [(False, chunk) for chunk in forward[:ahead]]
        for i, chunk in enumerate(backward):
            order.append((True, chunk))
            order += [(False, chunk) for chunk in forward[ahead + i : ahead + i + 1]]
        return order

    @cached_property
    def block_shapes(self) -> list[Shape]:
        """Shapes of the parameters of a block, in the order of its parameters."""
        d, t, hidden = self.d, self.t, self.hidden
        return [
            (d,), (d,), (3 * d // t, d), (3 * d // t,), (d, d // t), (d,),
            (d,), (d,), (hidden // t, d), (hidden // t,), (d, hidden // t), (d,),
        ]  # fmt: skip

    @cached_property
    def first_shapes(self) -> list[Shape]:
        """Shapes of the embeddings; without the position embedding where it is split by tokens."""
        patch = (self.config.patch_size,) * len(self.patches)
        shapes = [(self.d, self.config.model_in_channels, *patch), (self.d,), *[(self.d,)] * (2 * self.classifies)]
        return shapes if self.own_positions else [*shapes, (self.all_tokens, self.d)]

    @cached_property
    def last_shapes(self) -> list[Shape]:
        """Shapes of the last norm and the head."""
        points = self.config.patch_size ** len(self.patches)
        rows = self.classes if self.classifies else self.config.n_out_channels * points
        return [(self.d,), (self.d,), (rows, self.d), (rows,)]

    @cached_property
    def shapes(self) -> tuple[list[list[Shape]], list[Shape]]:
        """(shapes of each block, shapes outside the blocks), as data parallelism sees them."""
        rest = (self.first_shapes if self.first else []) + (self.last_shapes if self.last else [])
        return [self.block_shapes] * self.blocks, rest

    @property
    def positions(self) -> int:
        """Size of the part of the position embedding that data parallelism leaves alone."""
        return self.tokens * self.d if self.own_positions and self.first else 0

    def group(self, name: str) -> tuple[str, int]:
        """(name of a group of ranks in the planner, its size)."""
        return _group(self.layout, name)

    def ranks(self, name: str) -> tuple[int, ...]:
        """The ranks in this rank's group along a dimension, or along a combined one."""
        places = {"pp": self.stage, "cp": self.band}
        grid = np.arange(self.layout.world_size).reshape(*self.dims.values())
        own = tuple(slice(None) if name == "world" or d in _parts(name) else places.get(d, 0) for d in self.dims)
        return tuple(grid[own].ravel().tolist())


def _parts(name):
    return COMBINED.get(name) or PARTS.get(name) or (name,)


@lru_cache(maxsize=4096)
def _group(layout, name):
    sizes = layout.mesh_dims
    several = {known: {d for d, n in sizes.items() if n > 1 and d in _parts(known)} for known in (*GROUPS, name)}
    wanted = set(sizes) if name == "world" else several[name]
    size = math.prod(sizes[d] for d in wanted)
    wanted = {d for d in wanted if sizes[d] > 1}
    return next((known for known in GROUPS if several[known] == wanted), "world"), size
