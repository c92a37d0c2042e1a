"""Computing on whole matrices of which every rank holds a piece: each matrix is made whole on one rank, its owner.

All pieces travel to the owners in one all-to-all, and pieces of the results travel back in another. A rank sends its
pieces and receives as many numbers as it holds, whatever the number of ranks; an all-gather would bring every matrix to
every rank. Where matrices are cut twice, over tensor-parallel ranks and each piece over data-parallel ones, there is a
pair of all-to-alls for each: the owner of a piece shares it with the owners of its other pieces.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed.collectives import Group, all_to_all, as_group
from distributed.shard.core.redistribute import chunk_sizes_of
from utils import comm
from utils.layout import Sizes, shard_sizes
from utils.torch_private import is_dtensor


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
        full_size = sizes[tp_dim] * group.size
        pieces = shard_sizes(full_size, group.size)
        cuts.append(Cut(tp_dim, pieces, group))
    if is_dtensor(parameter):
        cuts += _cuts_of_dtensor(parameter, sizes)
    return tuple(cuts)


def _cuts_of_dtensor(parameter: Any, sizes: list[int]) -> list[Cut]:
    """The cuts of a DTensor whose parts together have these sizes, in the order in which they are made."""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    # A tensor that is cut twice is cut by tp, and each piece by the data-parallel ranks.
    order = sorted(range(mesh.ndim), key=lambda number: names[number] != "tp")
    cuts: list[Cut] = []
    for number in order:
        # torch's _StridedShard has a dim too, but is no Shard.
        dim = getattr(parameter.placements[number], "dim", None)
        if dim is None or mesh.size(number) == 1:
            continue
        group = as_group(mesh.get_group(number))
        pieces = chunk_sizes_of(sizes[dim], group.size)
        cuts.append(Cut(dim, pieces, group))
        sizes[dim] = pieces[group.rank]  # the next cut is one of this rank's piece
    return cuts


def on_whole_matrices(
    pieces: Sequence[Tensor], cuts: Sequence[Cuts], compute: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Apply a function to matrices, each as a whole; returns this rank's piece of each result.

    pieces: this rank's, (rows, columns), of the same matrices in the same order on all ranks of the groups. cuts: of
    each. compute: (R, C) -> (R, C), called once for a matrix that is cut, and on every rank for one that is not.
    """
    counts = [len(of_piece) for of_piece in cuts]
    deepest = max(counts, default=0)
    if deepest == 0:
        return [compute(whole) for whole in pieces]

    # The last cut is undone first. This call exchanges over one group; the others wait for a call within this one.
    group = next(of_piece[-1].group for of_piece in cuts if len(of_piece) == deepest)
    sent: list[int] = []
    kept: list[int] = []
    for number, of_piece in enumerate(cuts):
        is_sent = bool(of_piece) and of_piece[-1].group == group
        if is_sent:
            sent.append(number)
        else:
            kept.append(number)
    sent_pieces = [pieces[number] for number in sent]
    last_cuts = [cuts[number][-1] for number in sent]
    exchange = Exchange(group, sent_pieces, last_cuts)

    # The matrices that this rank owns have one cut less. Those that were kept have as many as before.
    inner_pieces = exchange.gather()
    inner_cuts = [cuts[sent[place]][:-1] for place in exchange.own]
    for number in kept:
        inner_pieces.append(pieces[number])
        inner_cuts.append(cuts[number])
    computed = on_whole_matrices(inner_pieces, inner_cuts, compute)

    # Each result goes back to the number of its piece.
    owned = len(exchange.own)
    given_back = exchange.give_back(computed[:owned])
    results = dict(zip(kept, computed[owned:], strict=True))
    results.update(zip(sent, given_back, strict=True))
    return [results[number] for number in range(len(pieces))]


class Exchange:
    """Pieces of matrices to their owners and back, over one group. own: the places of this rank's matrices.

    pieces: this rank's. cuts: by this group, one for each piece.
    """

    def __init__(self, group: Group, pieces: Sequence[Tensor], cuts: Sequence[Cut]):
        self.group = group
        self.pieces = pieces
        self.cuts = cuts
        shapes = []
        for place, cut in enumerate(cuts):
            full_size = sum(cut.sizes)
            shapes.append(self._shape(place, full_size))
        self.owners = share_out_work(shapes, group.size)
        self.own = self._places_of(group.rank)

    def _places_of(self, rank: int) -> list[int]:
        """The places of the matrices that a rank owns."""
        return [place for place, owner in enumerate(self.owners) if owner == rank]

    def _shape(self, place: int, size: int) -> tuple[int, int]:
        """The shape of a piece with `size` rows or columns along its cut."""
        rows, columns = self.pieces[place].shape
        if self.cuts[place].dim == 0:
            return size, columns
        return rows, size

    def gather(self) -> list[Tensor]:
        """The matrices that this rank owns, whole."""
        # Each rank is sent this rank's pieces of its matrices, and sends its pieces of ours.
        outgoing: list[Tensor] = []
        sent = []
        received = []
        for rank in range(self.group.size):
            for_rank = [self.pieces[place].flatten() for place in self._places_of(rank)]
            outgoing += for_rank
            sent.append(sum(map(len, for_rank)))
            from_rank = [math.prod(self._piece_of(place, rank)) for place in self.own]
            received.append(sum(from_rank))
        incoming = all_to_all(torch.cat(outgoing), sent, received, self.group)  # (sum of received,)

        # The pieces come in the order of the ranks, and those of one rank in the order of our matrices.
        parts: list[list[Tensor]] = [[] for _ in self.own]
        start = 0
        for rank in range(self.group.size):
            for number, place in enumerate(self.own):
                shape = self._piece_of(place, rank)
                end = start + math.prod(shape)
                parts[number].append(incoming[start:end].view(shape))
                start = end
        matrices = []
        for place, pieces in zip(self.own, parts, strict=True):
            matrices.append(torch.cat(pieces, self.cuts[place].dim))  # (R, C)
        return matrices

    def _piece_of(self, place: int, rank: int) -> tuple[int, int]:
        """The shape of a rank's piece of a matrix."""
        return self._shape(place, self.cuts[place].sizes[rank])

    def give_back(self, results: Sequence[Tensor]) -> list[Tensor]:
        """This rank's piece of every result. results: of the matrices that it owns, whole."""
        outgoing = [self.pieces[0].new_empty(0)]  # a rank may own none
        sent = []
        received = []
        for rank in range(self.group.size):
            count = 0
            for result, place in zip(results, self.own, strict=True):
                dim, sizes, _ = self.cuts[place]
                part = result.narrow(dim, sum(sizes[:rank]), sizes[rank])
                outgoing.append(part.flatten())
                count += part.numel()
            sent.append(count)
            from_rank = [self.pieces[place].numel() for place in self._places_of(rank)]
            received.append(sum(from_rank))
        incoming = all_to_all(torch.cat(outgoing), sent, received, self.group)  # (sum of received,)

        # Each owner sends our pieces in the order of its matrices.
        given: dict[int, Tensor] = {}
        start = 0
        for rank in range(self.group.size):
            for place in self._places_of(rank):
                piece = self.pieces[place]
                end = start + piece.numel()
                given[place] = incoming[start:end].view(piece.shape)
                start = end
        return [given[place] for place in range(len(self.pieces))]


def share_out_work(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """The owner of each matrix: the dearest first, each to the rank that has the least work so far.

    Work is that of a product of the matrix and its transpose. Equal matrices go in their order, to the first of equal
    ranks, so that every rank finds the same owners.
    """
    work = [rows * columns * min(rows, columns) for rows, columns in shapes]
    dearest_first = sorted(range(len(shapes)), key=lambda place: -work[place])
    owners = [0] * len(shapes)
    loads = [(0, rank) for rank in range(ranks)]  # a heap: the rank with the least work comes first
    for place in dearest_first:
        load, rank = heapq.heappop(loads)
        owners[place] = rank
        heapq.heappush(loads, (load + work[place], rank))
    return owners
