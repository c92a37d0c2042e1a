"""Exercise 4, rung 2: which rank trains on which sample.

Every sample must come once an epoch, on one rank. So all ranks shuffle alike, without talking, and each takes its own
part. If they shuffle differently, some samples come twice and others never, and no error says so. A run that was
stopped goes on in the middle of an epoch, with the samples that are left.

Below each rank shuffles for itself, and forgets the rest that does not divide. Mend it.

Done for real in utils/sample_order.py (epoch_order, training_indices, Order). Chapter: docs/data_parallel.md,
"The code".
"""

import torch


def samples_of(rank: int, size: int, length: int, seed: int, epoch: int, done: int = 0) -> list[int]:
    """The samples of one rank in an epoch, in order: a list of numbers from 0 to length - 1.

    Over all ranks each sample comes exactly once; a rank has as many samples as any other, or one more. The order is
    drawn from seed and epoch alone, and torch's default generator is left as it is: dropout draws from it.
    done: so many samples of this epoch each rank has trained on before; they are left out.
    """
    # TODO: one shuffle for all ranks, a part for each, the rest shared out too
    order = torch.randperm(length).tolist()
    own = length // size
    return order[rank * own : (rank + 1) * own][done:]
    # END
