"""The symbols of the textbook formulas: how much of the model and of the batch one rank has.

docs/reference/formulas.md explains them. They count numbers, unless they say bytes.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from networks.vit import patch_grid
from utils.config import SHARDED
from utils.layout import Layout
from utils.schema import Config

FULL = 4  # bytes of a float32 number


@dataclass(frozen=True)
class Symbols:
    """The symbols for a rank of one stage of the pipeline. config: of this layout."""

    config: Config
    layout: Layout
    stage: int

    # Ranks that share the work on an image.

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head and the loss."""
        return self.stage == self.layout.pp - 1

    @property
    def t(self) -> int:
        """Tensor-parallel ranks."""
        return self.layout.tp

    @cached_property
    def c(self) -> int:
        """Ranks that share an image."""
        return self.layout.cp * math.prod(self.layout.domain)

    @cached_property
    def method(self) -> str:
        """How attention reaches the tokens of the other ranks of an image."""
        if self.layout.cp > 1:
            return self.config.cp_method
        return self.config.domain_method

    # The batch.

    @property
    def m(self) -> int:
        """Micro-batches of a step."""
        return self.config.gradient_accumulation

    @cached_property
    def members(self) -> int:
        """Members of a sample that this rank computes; 1 without an ensemble. The first rank has the most."""
        return math.ceil(self.config.ensemble_size / self.layout.ens)

    @cached_property
    def b(self) -> int:
        """Samples of a micro-batch, each as often as the rank has members of it."""
        samples = self.config.global_batch_size // self.layout.dp
        return samples // self.m * self.members

    @property
    def rollout(self) -> int:
        """Steps of a forecast."""
        return self.config.longest_rollout

    @cached_property
    def passes(self) -> int:
        """Forward passes of an optimizer step."""
        return self.m * self.rollout

    @cached_property
    def patches(self) -> tuple[int, ...]:
        """Patches of an image along each of its dimensions: rows, columns and, where there are more, levels."""
        return patch_grid(self.config.img_size, self.config.patch_size)[0]

    @cached_property
    def n(self) -> int:
        """Tokens of this rank. The first rank of uneven shares has the largest."""
        rows, columns, *deep = self.patches
        # Context parallelism cuts an image into bands of rows as well.
        rows_here = math.ceil(rows / (self.layout.cp * self.layout.domain[0]))
        columns_here = math.ceil(columns / self.layout.domain[1])
        return rows_here * columns_here * math.prod(deep)

    @cached_property
    def N(self) -> int:
        """Tokens of the whole image."""
        return math.prod(self.patches)

    @cached_property
    def points(self) -> int:
        """Grid points of a patch."""
        return self.config.patch_size ** len(self.patches)

    @cached_property
    def inputs(self) -> int:
        """Inputs of the embedding for a token."""
        return self.points * self.config.model_in_channels

    @property
    def classifies(self) -> bool:
        """Whether the model gives a class for each image, in place of a forecast for each token."""
        return self.config.model == "classifier"

    @cached_property
    def outputs(self) -> int:
        """Outputs of the head: for a token, or for an image that is classified."""
        if self.classifies:
            return self.config.num_classes or 0
        return self.points * self.config.n_out_channels

    @cached_property
    def states(self) -> int:
        """Numbers of a forecast micro-batch; 0 for a classifier, whose output is small."""
        if self.classifies:
            return 0
        return self.b * self.n * self.outputs  # (b, n, outputs)

    # Activations.

    @property
    def D(self) -> int:
        """Features of a token (the embedding dimension)."""
        return self.config.embed_dim

    @cached_property
    def L(self) -> int:
        """Blocks of this rank."""
        return self.config.depth // self.layout.pp

    @cached_property
    def layer(self) -> int:
        """Activations of a layer, (b, n, D)."""
        return self.b * self.n * self.D

    @cached_property
    def stream(self) -> float:
        """Activations of the residual stream that a rank keeps between layers."""
        # Sequence parallelism shares out the tokens between layers over the tensor-parallel ranks.
        return self.layer / (self.t if self.config.sequence_parallel else 1)

    @cached_property
    def hidden(self) -> float:
        """Activations inside an MLP, (b, n, D r / t)."""
        return self.layer * self.config.mlp_ratio / self.t

    @cached_property
    def is_mixed(self) -> bool:
        """Whether matrices are multiplied in a lower precision than they are kept in."""
        return self.config.amp_mode != "none"

    @cached_property
    def w(self) -> int:
        """Bytes of a number in a product of matrices."""
        return 2 if self.is_mixed else FULL

    @cached_property
    def recomputed(self) -> int:
        """Blocks that are computed again in the backward pass."""
        if self.config.activation_checkpointing == "none":
            return 0
        # Checkpointing takes one block of each interval.
        return self.L // self.config.checkpointing_interval

    # Parameters.

    @cached_property
    def matrices(self) -> float:
        """Weights of a block's matrices: 12 D^2 / t where the MLP is four times as wide as the stream."""
        # Attention has four D x D matrices, for q, k, v and its output; the MLP has two, D x r D and r D x D.
        return (4 + 2 * self.config.mlp_ratio) * self.D**2 / self.t

    @cached_property
    def block(self) -> float:
        """Parameters of a block: matrices, their biases, and two norms with the biases of what is summed over tp."""
        # Biases of q, k, v and of the hidden layer are split. Two norms have 4 D, and the biases of what is summed 2 D.
        biases = (3 + self.config.mlp_ratio) * self.D / self.t
        return self.matrices + biases + 6 * self.D

    @cached_property
    def rest(self) -> int:
        """Parameters in no block: the embedding of the first stage, the last norm and the head of the last one."""
        # The embedding has weights, a bias, and a position for each token of the whole image.
        embedding = (self.inputs + 1 + self.N) * self.D if self.is_first else 0
        # The last norm has 2 D, and the head has weights and a bias.
        head = 2 * self.D + (self.D + 1) * self.outputs if self.is_last else 0
        # The noise of a member goes through two layers with biases: to D, and to a factor and a shift of each feature.
        noise = self.config.noise_of_model
        of_noise = (noise + 1) * self.D + (self.D + 1) * 2 * self.D if noise else 0
        return embedding + of_noise + head

    @cached_property
    def parameters(self) -> float:
        """Parameters of the stage, before data parallelism shares them out."""
        return self.L * self.block + self.rest

    # Data parallelism.

    @cached_property
    def replicas(self) -> int:
        """Ranks that compute with the same weights."""
        # Ranks that share an image, or the members of a sample, have the same weights too.
        return self.layout.dp * self.layout.ens * self.c

    @cached_property
    def is_sharded(self) -> bool:
        """Whether fully_shard cuts the parameters."""
        return self.config.data_parallel in SHARDED and self.replicas > 1

    @cached_property
    def shards(self) -> int:
        """Ranks over which fully_shard cuts the parameters."""
        if not self.is_sharded:
            return 1
        # The strategy hsdp cuts over a part of the data-parallel ranks, the others over all.
        return (self.layout.shard or self.layout.dp) * self.layout.ens * self.c

    @cached_property
    def uses_ddp(self) -> bool:
        """Whether DistributedDataParallel reduces the gradients."""
        return self.replicas > 1 and not self.is_sharded and not self.config.noddp

    @cached_property
    def updated(self) -> float:
        """Parameters that the optimizer of this rank updates."""
        share = self.parameters / self.shards
        # The strategy zero1 shares out the optimizer's work, and not the parameters.
        if self.config.data_parallel == "zero1":
            share /= self.replicas
        return share

    @property
    def gathered_bytes(self) -> int:
        """Bytes of a parameter that fully_shard has gathered."""
        return FULL if self.config.gather_dtype == "none" else 2

    @cached_property
    def muon(self) -> float:
        """Of `updated`, those that Muon updates: the matrices of hidden layers. It keeps one moment of them."""
        if not self.config.optimizer_kind.trains_matrices:
            return 0.0
        return self.L * self.matrices * self.updated / self.parameters

    # The pipeline: Narayanan et al. 2021 (arXiv:2104.04473).

    @cached_property
    def chunks(self) -> int:
        """Pieces of the model that a rank has one after another."""
        is_interleaved = self.layout.pp > 1 and self.config.pp_schedule == "interleaved"
        return 2 if is_interleaved else 1

    @cached_property
    def in_flight(self) -> float:
        """Micro-batches of which a rank keeps activations at once."""
        stages = self.layout.pp
        later = stages - self.stage  # this stage and those after it
        # GPipe makes all forward passes before the first backward pass.
        if stages > 1 and self.config.pp_schedule == "gpipe":
            return self.m
        if self.chunks > 1:
            # Counted in chunks, each of which is half of the stage.
            return min(self.m, (stages + 2 * later - 1) / 2)
        return float(min(self.m, later))
