"""Exercise 15, rung 2: what each collective leaves on each rank.

Everything in rungs 2 to 4 is made of five collectives. Say what each of them leaves on every rank, for numbers that
you are given. `before[r]` is the list that rank r puts in; return a list with what each rank has afterwards. Nothing is
sent here: the check runs the real collectives on as many ranks and compares.

Done for real in distributed/collectives.py. Chapter: docs/ranks_and_collectives.md, "Five collectives".
"""

Lists = list[list[int]]  # of each rank, its numbers


def broadcast(before: Lists) -> Lists:
    """Every rank gets what rank 0 has."""
    # TODO
    return before
    # END


def all_reduce(before: Lists) -> Lists:
    """Every rank gets the sum, element by element."""
    # TODO
    return before
    # END


def all_gather(before: Lists) -> Lists:
    """Every rank gets the lists of all ranks, one behind the other."""
    # TODO
    return before
    # END


def reduce_scatter(before: Lists) -> Lists:
    """The sum is cut into as many equal pieces as there are ranks: rank r gets piece r."""
    # TODO: say it with all_reduce
    return before
    # END


def all_to_all(before: Lists) -> Lists:
    """Each rank cuts its list into equal pieces: piece i goes to rank i, which has them in the order of the senders."""
    # TODO
    return before
    # END


def sent(kind: str, numbers: int, ranks: int) -> float:
    """Numbers that a rank sends, at least, in a collective over a tensor of so many numbers (the whole one)."""
    # TODO: for "all_gather", "reduce_scatter" and "all_reduce"; the last one is the first two, one after the other
    return 0.0
    # END
