"""Weights after some steps must be those of Adam on everything, and the moments shared out evenly."""

import copy
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # which an optimizer imports, for seconds
from torch import nn

from exercises.checks.common import Draw, Recorder, Wrong, expect, same

WORLD_SIZES = (2, 3)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `Zero1` beside Adam on all parameters. Raises Wrong."""
    for _ in range(2):
        number = draw.integer(7, 12)
        shapes = [(draw.integer(1, 9), draw.integer(1, 9)) for _ in range(number)]
        mine = [torch.nn.Parameter(draw.tensor(*shape)) for shape in shapes]
        plain = copy.deepcopy(mine)
        before = [p.detach().clone() for p in mine]

        def adam(parameters):
            return torch.optim.Adam(parameters, lr=0.05)

        zero = exercise.Zero1(mine, adam)
        reference = adam(plain)
        for step in range(3):
            for p, q in zip(mine, plain, strict=True):
                q.grad = draw.tensor(*p.shape)
                p.grad = q.grad.clone()
            with Recorder() as record:
                zero.step()
            reference.step()
            if step == 0:
                compare_state(zero, mine, rank, size)
            for i, (p, q) in enumerate(zip(mine, plain, strict=True)):
                if same(p.detach(), q.detach(), 1e-5):
                    continue
                owner = zero.owners[i]
                hint = f"its value came from elsewhere than its owner, rank {owner}"
                if owner == rank:
                    hint = "it is this rank's own: did a broadcast of somebody else overwrite it?"
                elif torch.equal(p.detach(), before[i]):
                    hint = f"it is the old value: did its owner, rank {owner}, send it?"
                raise Wrong(f"parameter {i} after step {step + 1} is not that of Adam: {hint}")
            others = sorted(set(record.kinds()) - {"broadcast", "all_gather"})
            expect(not others, f"{' and '.join(others)} called: gradients are averaged already, only weights are sent")
            before = [p.detach().clone() for p in mine]


def compare_state(zero: Any, parameters: list[nn.Parameter], rank: int, size: int) -> None:
    """zero: the learner's optimizer after a step, to own and keep what the rule says."""
    sizes = [p.numel() for p in parameters]
    kept = sum(p.numel() for p in parameters if p in zero.optimizer.state)
    expect(
        kept < sum(sizes),
        f"this rank keeps the moments of all {len(sizes)} parameters: under ZeRO-1 a rank keeps its share",
    )

    # By the rule, a parameter goes to the first of those ranks that own least.
    held = [0] * size
    owners = []
    for numbers in sizes:
        owner = held.index(min(held))
        owners.append(owner)
        held[owner] += numbers
    owned = [0] * size
    for numbers, owner in zip(sizes, zero.owners, strict=True):
        if owner in range(size):
            owned[owner] += numbers
    expect(
        max(owned) <= max(held),
        f"ranks own {owned} numbers: giving each parameter to the rank that owns least so far makes it {held}",
    )
    expect(list(zero.owners) == owners, f"owners are {list(zero.owners)}, by the rule they are {owners}")
