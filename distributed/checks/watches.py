"""What sharded parameters need of a model, watched while it trains: the same layers on all ranks, and no writes.

Layers. Under zero2, fsdp and hsdp the data-parallel ranks gather the parameters of a layer together when it is called.
Where a model skips layers by random numbers, each rank draws its own: one would gather the second layer while another
gathers the third. Ranks would hang, or compute with each other's weights in silence.

A model that draws on the host inside its forward function may draw layers. From its first draw on, the ranks compare
which layer they call before they gather it: an all-reduce of two numbers for each layer, for which the host waits.
Models that draw on a GPU alone, such as by dropout, do not pay.

Writes. A forward pass that writes to a weight writes to the gathered copy, which is given up. Where the look at a model
has seen a write, the model is refused before it trains. A model that chooses by what it reads or draws may write in
another pass: there each unit compares the versions of its weights, which torch counts up with every write in place,
before and after its forward function.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distributed.checks.usage import Usage
from utils.errors import LayoutError, UsageError
from utils.host_random import host_generators

END = "the end of the model"


class LayerWatch:
    """Compares, over the ranks of a group, the calls of a model's units. Made after fully_shard."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        device: torch.device,
        strategy: str,
    ):
        from torch.distributed.fsdp import FSDPModule  # slow to import

        self.group = group
        self.device = device
        self.strategy = strategy
        self.found: Any = None  # states of the host's generators as the model was called; None outside of its call
        self.has_drawn = False
        units = []
        for name, module in model.named_modules():
            if issubclass(type(module), FSDPModule):
                units.append((name, module))
        self.names = [name for name, _ in units] + [END]
        # In front of fully_shard's own hooks, which gather.
        for number, (name, unit) in enumerate(units):
            if name:
                unit.register_forward_pre_hook(partial(self._enter, number), prepend=True)
        model.register_forward_pre_hook(self._start, prepend=True)
        model.register_forward_hook(self._finish)

    def _start(self, *_: Any) -> None:
        self.found = host_generators()
        self.has_drawn = False

    def _enter(self, number: int, *_: Any) -> None:
        is_first_call = self.found is not None  # not one that is computed again, in the backward pass
        if is_first_call and not self.has_drawn:
            self.has_drawn = host_generators() != self.found
        if self.has_drawn:
            self._compare(number)

    def _finish(self, *_: Any) -> None:
        if self.found is not None and host_generators() != self.found:
            self.has_drawn = True
        if self.has_drawn:
            self._compare(len(self.names) - 1)
        self.found = None

    def _compare(self, number: int) -> None:
        """Raise UsageError, on every rank and in the same words, where a rank is about to call another unit."""
        # The largest number, and with the sign turned the smallest: they differ where ranks do.
        numbers = torch.tensor([number, -number], device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
        last, first = numbers.tolist()
        if last != -first:
            raise UsageError(
                f"data_parallel {self.strategy}: ranks compute different layers: one has drawn '{self.names[-first]}' "
                f"next, another '{self.names[last]}'. Layers that share out their parameters must be called by all "
                "ranks: use --data_parallel ddp, or draw what does not depend on the rank"
            )


def check_writes(usage: Usage, whole: Collection[str], strategy: str) -> None:
    """Raise LayoutError where a forward pass writes to a parameter that is gathered for it.

    whole: names of parameters that stay whole. strategy: zero2, fsdp or hsdp.
    """
    lost = sorted(usage.written - set(whole))  # the same name first on every rank
    if lost:
        raise LayoutError(lost_write(lost[0], strategy))


def lost_write(name: str, strategy: str) -> str:
    """The line that refuses a forward pass which writes to the weight of this name."""
    return (
        f"the forward pass writes to the weight '{name}', under data_parallel {strategy} into a gathered copy that is "
        "given up: use ddp or zero1, or make it a buffer"
    )


class WriteWatch:
    """Raises UsageError after a forward function of a unit that has written to the unit's weights.

    Made after fully_shard, whose hooks gather before this one looks first, and give up after it looks again.
    names: {unit: names in the model of the weights that it gathers}.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[nn.Module, Collection[str]],
        strategy: str,
    ):
        self.model = model
        self.names = names
        self.strategy = strategy
        # A unit may be called inside another one, so each remembers its versions by itself.
        self.versions: dict[nn.Module, dict[str, int]] = {}
        for unit in names:
            unit.register_forward_pre_hook(self._enter)
            unit.register_forward_hook(self._leave, prepend=True)

    def _enter(self, unit: nn.Module, _: Any) -> None:
        self.versions[unit] = self._versions(unit)

    def _leave(self, unit: nn.Module, *_: Any) -> None:
        before = self.versions.pop(unit)
        for name, version in self._versions(unit).items():
            if version != before[name]:
                raise UsageError(lost_write(name, self.strategy))

    def _versions(self, unit):
        """{name: version} of the weights of a unit, which are gathered now."""
        versions = {}
        for name in self.names[unit]:
            versions[name] = self.model.get_parameter(name)._version
        return versions
