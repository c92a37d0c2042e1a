"""Which weights fully_shard gathers together: units, each of which gathers its own when it is called, and the root.

A unit is a module that the model calls. It takes the weights of which every use is inside of it. All others belong to
the root, the whole model, whose weights are gathered from the beginning of a pass to its end: weights that two modules
share, those that the model reads from a module, and those of modules whose other methods it calls.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from distributed.checks.usage import Usage
from utils.choices import choose

GATHER_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
IsUnit = Callable[[nn.Module], bool]


@dataclass
class Units:
    """units: modules, in the order in which they compute. weights: {unit or the model: parameters that it gathers}.

    whole: names of parameters that stay whole on every rank.
    """

    units: list[nn.Module] = field(default_factory=list)
    weights: dict[nn.Module, set[nn.Parameter]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)


def share_out(
    model: nn.Module,
    usage: Usage,
    policy: str,
    min_params: int,
    apart: Collection[str],
) -> Units:
    """Share the parameters of a model out to units.

    policy: block: each of the model's `blocks`, or each of its direct children where it has none; of a module that
    cannot be a unit, its children. size: the smallest modules that hold min_params parameters. none: the whole model is
    one unit, gathered at once. apart: names of parameters that belong to none.
    """
    names = {module: name for name, module in model.named_modules()}

    def is_unit(module: nn.Module) -> bool:
        name = names[module]
        return module is not model and name in usage.calls and name not in usage.unfit

    policies: dict[str, Callable[[], Iterable[nn.Module]]] = {
        "block": lambda: _outermost(getattr(model, "blocks", model), is_unit),
        "size": lambda: _of_size(model, is_unit, min_params),
        "none": lambda: (),
    }
    found = list(choose("wrap_policy", policy, policies)())
    order = {name: number for number, name in enumerate(usage.calls)}
    found.sort(key=lambda unit: order[names[unit]])

    # Each parameter goes to the innermost unit that holds all of its names and all of its uses, or to the root.
    places: dict[nn.Parameter, list[str]] = {}  # the names of each parameter, in all modules that have it
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    shared = Units(weights={gathering: set() for gathering in (model, *found)})
    for parameter, (name, *others) in places.items():
        if name in apart:
            continue
        # Only tensors with dimensions, of one type, can be cut and joined in one buffer.
        is_whole = parameter.dim() == 0 or parameter.dtype != torch.get_default_dtype()
        if is_whole:
            shared.whole.add(name)
            continue
        around = usage.inside.get(name)  # None: nobody uses it
        owner = model
        for unit in found:
            place = f"{names[unit]}."
            holds_it = all(other.startswith(place) for other in (name, *others))
            holds_uses = around is None or names[unit] in around
            is_inner = owner is model or place.startswith(f"{names[owner]}.")  # inside the best unit so far
            if holds_it and holds_uses and is_inner:
                owner = unit
        shared.weights[owner].add(parameter)
    shared.units = [unit for unit in found if shared.weights[unit]]
    return shared


def _outermost(module: nn.Module, is_unit: IsUnit) -> Iterator[nn.Module]:
    """The units below a module that are in no other one."""
    for child in module.children():
        if is_unit(child):
            yield child
        else:
            yield from _outermost(child, is_unit)


def _of_size(model: nn.Module, is_unit: IsUnit, min_params: int) -> list[nn.Module]:
    """The smallest units that hold min_params parameters which no other one holds."""
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Parameters of the module that no unit holds."""
        own = [p.numel() for p in module.parameters(recurse=False)]
        of_children = [visit(child) for child in module.children()]
        left = sum(own) + sum(of_children)
        if left < min_params or not is_unit(module):
            return left
        units.append(module)
        return 0

    visit(model)
    return units
