"""Computing on whole matrices of which every rank holds a piece: each matrix is made whole on one rank, its owner.

All pieces travel to the owners in one all-to-all, and pieces of the results travel back in another. A rank sends its
pieces and receives as many numbers as it holds, whatever the number of ranks; an all-gather would bring every matrix to
every rank. Where matrices are cut twice, over tensor-parallel ranks and each piece over data-parallel ones, there is a
pair of all-to-alls for each: the owner of a piece shares it with the owners of its other pieces.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distributed.collectives import Group, all_to_all, as_group
from distributed.shard.redistribute import chunk_sizes_of
from utils import comm
from utils.layout import Sizes, shard_sizes
from utils.sharded import is_dtensor


class Cut(NamedTuple):
    """A matrix is cut along `dim`, rank i of a group has sizes[i] of its rows or columns."""

    dim: int
    sizes: Sizes
    group: Group


Cuts = tuple[Cut, ...]  # of a matrix, then of the piece that is left, and so on


def cuts_of(parameter: Tensor, tp_dim: int | None) -> Cuts:
    """The cuts of which this rank's part of a parameter is the result; () where it is whole.

    tp_dim: the dimension along which our tensor-parallel layers cut it, None where they do not.
    """
    cuts: list[Cut] = []
    sizes = list(parameter.shape)  # of a DTensor, of all its parts
    if tp_dim is not None:
        group = as_group(comm.get_group("tp"))
        cuts.append(Cut(tp_dim, shard_sizes(sizes[tp_dim] * group.size, group.size), group))
    if is_dtensor(parameter):
        mesh = parameter.device_mesh
        names = mesh.mesh_dim_names or ()
        order = sorted(range(mesh.ndim), key=lambda number: names[number] != "tp")  # tp cuts first
        for number in order:
            dim = getattr(parameter.placements[number], "dim", None)  # also of torch's _StridedShard, which is no Shard
            if dim is not None and mesh.size(number) > 1:
                group = as_group(mesh.get_group(number))
                pieces = chunk_sizes_of(sizes[dim], group.size)
                cuts.append(Cut(dim, pieces, group))
                sizes[dim] = pieces[group.rank]
    return tuple(cuts)


def on_whole_matrices(
    pieces: Sequence[Tensor], cuts: Sequence[Cuts], compute: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Apply a function to matrices, each as a whole; returns this rank's piece of each result.

    pieces: this rank's, (rows, columns), of the same matrices in the same order on all ranks of the groups. cuts: of
    each. compute: (R, C) -> (R, C), called once for a matrix that is cut, and on every rank for one that is not.
    """
    deepest = max((len(of_piece) for of_piece in cuts), default=0)
    if deepest == 0:
        return [compute(whole) for whole in pieces]
    group = next(of_piece[-1].group for of_piece in cuts if len(of_piece) == deepest)
    sent: list[int] = []
    kept: list[int] = []
    for number, of_piece in enumerate(cuts):
        is_sent = bool(of_piece) and of_piece[-1].group == group
        (sent if is_sent else kept).append(number)
    exchange = Exchange(group, [pieces[number] for number in sent], [cuts[number][-1] for number in sent])
    owned = exchange.gather()
    here = [sent[place] for place in exchange.own]
    inner_pieces = [*owned, *(pieces[number] for number in kept)]
    inner_cuts = [*(cuts[number][:-1] for number in here), *(cuts[number] for number in kept)]
    computed = on_whole_matrices(inner_pieces, inner_cuts, compute)
    results = dict(zip(kept, computed[len(here) :], strict=True))
    results |= dict(zip(sent, exchange.give_back(computed[: len(here)]), strict=True))
    return [results[number] for number in range(len(pieces))]


class Exchange:
    """Pieces of matrices to their owners and back, over one group. own: the places of this rank's matrices.

    pieces: this rank's. cuts: by this group, one for each piece.
    """

    def __init__(self, group: Group, pieces: Sequence[Tensor], cuts: Sequence[Cut]):
        self.group, self.pieces, self.cuts = group, pieces, cuts
        shapes = [self._shape(place, sum(cut.sizes)) for place, cut in enumerate(cuts)]
        self.owners = share_out_work(shapes, group.size)
        self.own = [place for place, owner in enumerate(self.owners) if owner == group.rank]

    def _shape(self, place: int, size: int) -> tuple[int, int]:
        """The shape of a piece with `size` rows or columns along its cut."""
        rows, columns = self.pieces[place].shape
        return (size, columns) if self.cuts[place].dim == 0 else (rows, size)

    def gather(self) -> list[Tensor]:
        """The matrices that this rank owns, whole."""
        outgoing: list[Tensor] = []
        sent, received = [], []
        for rank in range(self.group.size):
            for_rank = [self.pieces[place].flatten() for place, owner in enumerate(self.owners) if owner == rank]
            outgoing += for_rank
            sent.append(sum(map(len, for_rank)))
            received.append(sum(math.prod(self._piece_of(place, rank)) for place in self.own))
        incoming = all_to_all(torch.cat(outgoing), sent, received, self.group)
        parts: list[list[Tensor]] = [[] for _ in self.own]
        start = 0
        for rank in range(self.group.size):
            for number, place in enumerate(self.own):
                shape = self._piece_of(place, rank)
                parts[number].append(incoming[start : start + math.prod(shape)].view(shape))
                start += math.prod(shape)
        return [torch.cat(own, self.cuts[place].dim) for own, place in zip(parts, self.own, strict=True)]

    def _piece_of(self, place: int, rank: int) -> tuple[int, int]:
        return self._shape(place, self.cuts[place].sizes[rank])

    def give_back(self, results: Sequence[Tensor]) -> list[Tensor]:
        """This rank's piece of every result. results: of the matrices that it owns, whole."""
        outgoing = [self.pieces[0].new_empty(0)]  # a rank may own none
        sent, received = [], []
        for rank in range(self.group.size):
            count = 0
            for result, place in zip(results, self.own, strict=True):
                dim, sizes, _ = self.cuts[place]
                part = result.narrow(dim, sum(sizes[:rank]), sizes[rank])
                outgoing.append(part.flatten())
                count += part.numel()
            sent.append(count)
            received.append(sum(self.pieces[place].numel() for place, owner in enumerate(self.owners) if owner == rank))
        incoming = all_to_all(torch.cat(outgoing), sent, received, self.group)
        given: dict[int, Tensor] = {}
        start = 0
        for rank in range(self.group.size):
            for place, owner in enumerate(self.owners):
                if owner == rank:
                    piece = self.pieces[place]
                    given[place] = incoming[start : start + piece.numel()].view(piece.shape)
                    start += piece.numel()
        return [given[place] for place in range(len(self.pieces))]


def share_out_work(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """The owner of each matrix: the dearest first, each to the rank that has the least work so far.

    Work is that of a product of the matrix and its transpose. Equal matrices go in their order, to the first of equal
    ranks, so that every rank finds the same owners.
    """
    work = [rows * columns * min(rows, columns) for rows, columns in shapes]
    owners = [0] * len(shapes)
    loads = [(0, rank) for rank in range(ranks)]
    for place in sorted(range(len(shapes)), key=lambda place: -work[place]):
        load, rank = heapq.heappop(loads)
        owners[place] = rank
        heapq.heappush(loads, (load + work[place], rank))
    return owners
