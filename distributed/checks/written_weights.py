"""Weights that a forward pass writes to, under strategies that gather weights for it: the gathered copy is given up.

Where the look at a model has seen a write, the model is refused before it trains. A model that chooses by what it reads
or draws may write in another pass: there each unit compares the versions of its weights, which torch counts up with
every write in place, before and after its forward function.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from distributed.checks.usage import Usage
from utils.errors import LayoutError, UsageError


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
