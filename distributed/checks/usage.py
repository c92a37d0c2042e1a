"""How a model uses its parts: one look at a forward pass of training, before the model is split over ranks.

fully_shard gathers the weights of a module when the module is called, and DistributedDataParallel has to know whether
each weight gets a gradient in each step. Both follow from what a forward pass does, not from how the model is built: it
may walk over a container, read the weight of a module, call another method of it, or skip it.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.flop_counter import FlopCounterMode

from utils.torch_private import storage_id

SDPA = F.scaled_dot_product_attention
SEED = 0
# Types that a unit of fully_shard may return.
PLAIN = (Tensor, int, float, complex, str, type(None))
# Types of attributes by which a module may choose what it computes.
SETTINGS = (int, float, str, type(None))
# Operations and methods that make Python values of a tensor, by which a model may choose too.
READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
}


class AttentionCall(NamedTuple):
    """A form of scaled_dot_product_attention that a model calls. head: its size. keys: how many."""

    head: int
    keys: int
    masked: bool


@dataclass
class Usage:
    """A forward pass of training. Modules and parameters have their first names in the model.

    calls: {module: how often it was called}, in the order of the first calls; a container that is walked over is not
    among them.
    inside: {parameter: modules that were at work whenever it was used}; a weight that two modules share, or that is
    read from outside its module, has those around all of its uses.
    reached: parameters that the output depends on.
    recomputed: {module that was called in a reentrant checkpoint: whether its first call was}.
    unfit: {module: why it cannot be a unit of fully_shard}.
    written: parameters that the pass writes to.
    varies: why another pass may use other parameters, "" where nothing says so.
    flops: of the pass, in matrix products and convolutions.
    attention: forms of scaled_dot_product_attention in it.
    """

    calls: dict[str, int] = field(default_factory=dict)
    inside: dict[str, frozenset[str]] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    recomputed: dict[str, bool] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    varies: str = ""
    flops: int = 0
    attention: set[AttentionCall] = field(default_factory=set)

    def add(self, other: "Usage") -> None:
        """Take in what another pass has called; what is reached remains what this one has."""
        self.calls = other.calls | self.calls
        self.unfit = other.unfit | self.unfit
        self.written |= other.written
        for name, around in other.inside.items():
            self.inside[name] = self.inside.get(name, around) & around


def watch(model: nn.Module, *inputs: Tensor) -> tuple[Any, Usage]:
    """Call a model in training mode, with all that it takes, and watch. Returns its output, and the Usage.

    The model may lie on the meta device. It keeps nothing for a backward pass; its buffers may change. The random state
    of the program stays as it was. A model whose passes differ is also called in evaluation mode, where most models
    skip nothing.
    """
    model.train()
    with _random_state_kept() as drawn:
        before = _settings(model)
        output, usage = _look(model, inputs)
        if before != _settings(model):  # set by the first pass, or counted in each one
            before = _settings(model)
            output, usage = _look(model, inputs)
        now = _settings(model)
        changed = [name for name in now if now[name] != before.get(name)]
        if changed:
            usage.varies = f"its attribute {changed[0]} changes from pass to pass"
        elif drawn():
            usage.varies = "it draws random numbers of Python or NumPy"
        if usage.varies:
            _, of_evaluation = _look(model.eval(), inputs)
            usage.add(of_evaluation)
    return output, usage


class _WholeModel:
    """In place of the modules that a counter of FLOP follows: its hooks for them refuse gradients of their inputs."""

    parents = ("Global",)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


class _NothingKept(Exception):
    """A backward pass has begun in a look that keeps nothing for it."""


def _look(model, inputs):
    """Call a model once; returns its output, and the Usage."""
    try:
        return _Watch(model).run(inputs, keeps_graph=inputs[0].is_meta)  # where it takes no memory
    except _NothingKept:
        # Few models ask for gradients inside of their forward pass.
        return _Watch(model).run(inputs, keeps_graph=True)


def _refuse(nothing):
    raise _NothingKept


class _Watch:
    """The state of a look: which modules are at work, and what has been seen."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.usage = Usage()
        self.names = {module: name for name, module in model.named_modules()}
        # Parameters are known by themselves, and by the memory that views of them share.
        self.parameters: dict[int, str] = {}
        self.memory: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            self.parameters[id(parameter)] = name
            self.memory[storage_id(parameter)] = name
        self.at_work: list[str] = []  # modules, outermost first
        self.arguments: list[list[tuple[Tensor, int]]] = []  # tensors that each of them was given, and their versions
        self.views: list[tuple[str, Tensor, int]] = []  # (module, view that it has returned, its version)
        self.checkpoints = 0  # reentrant ones, one inside another

    def run(self, inputs: Sequence[Tensor], keeps_graph: bool) -> tuple[Any, Usage]:
        """Call the model once. keeps_graph: whether it can ask for gradients, for which it keeps all that it computes.

        Raises _NothingKept where it asks for them without.
        """
        checkpointed = CheckpointFunction.forward

        def counted(*args: Any) -> Any:
            self.checkpoints += 1
            try:
                return checkpointed(*args)
            finally:
                self.checkpoints -= 1

        def attended(*args: Any, **kwargs: Any) -> Any:
            self.attends(*args, **kwargs)
            return SDPA(*args, **kwargs)

        with ExitStack() as stack:
            for module in self.names:
                # First in line, as the hooks of fully_shard are.
                before = module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
                after = module.register_forward_hook(self.leave)
                stack.callback(before.remove)
                stack.callback(after.remove)
            stack.enter_context(patch.object(CheckpointFunction, "forward", staticmethod(counted)))
            # Inside a function that ShardTensor has a rule for, no mode is told.
            stack.enter_context(patch.object(F, SDPA.__name__, attended))
            if not keeps_graph:
                keeps_nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _refuse)
                stack.enter_context(keeps_nothing)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(uncompiled())
            counter = FlopCounterMode(display=False)
            counter.mod_tracker = _WholeModel()  # type: ignore[assignment]
            stack.enter_context(counter)
            stack.enter_context(_Functions(self))
            stack.enter_context(_Operations(self))
            output = self.model(*inputs)
        self.usage.flops = counter.get_total_flops()
        for name, view, version in self.views:
            if view._version != version:
                self.usage.unfit[name] = "it returns a view that is written to afterwards"
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for leaf in parameters_behind(outputs):
            if id(leaf) in self.parameters:
                self.usage.reached.add(self.parameters[id(leaf)])
        return output, self.usage

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        name = self.names[module]
        usage = self.usage
        if self.checkpoints:
            usage.recomputed.setdefault(name, name not in usage.calls)
        usage.calls[name] = usage.calls.get(name, 0) + 1
        self.at_work.append(name)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.arguments.append([(tensor, tensor._version) for tensor in given])

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module has returned."""
        name = self.at_work.pop()
        unfit = self.usage.unfit
        for tensor, version in self.arguments.pop():
            if tensor._version != version:
                unfit[name] = "it writes to its input"
        for leaf in tree_leaves(output):
            if not isinstance(leaf, PLAIN):
                unfit[name] = f"it returns a {type(leaf).__name__}"
            elif isinstance(leaf, Tensor) and leaf._base is not None:
                self.views.append((name, leaf, leaf._version))

    def used(self, values: Any) -> None:
        """An operation is given these values."""
        for leaf in tree_leaves(values):
            name = self.parameters.get(id(leaf))
            if name is None:
                continue
            around = frozenset(self.at_work)
            self.usage.inside[name] = self.usage.inside.get(name, around) & around
            if self.checkpoints:  # its graph is made in the backward pass
                self.usage.reached.add(name)

    def writes(self, function: Any, args: Any, kwargs: Any) -> None:
        """An operation is called. What it writes to may be a view of a parameter, or its `data`."""
        schema = getattr(function, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        for argument in schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if not is_written:
                continue
            for leaf in tree_leaves(given.get(argument.name)):
                if not isinstance(leaf, Tensor):
                    continue
                name = self.memory.get(storage_id(leaf))
                if name is not None:
                    self.usage.written.add(name)

    def attends(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        *_: Any,
        **__: Any,
    ) -> None:
        """scaled_dot_product_attention is called with these arguments."""
        call = AttentionCall(head=query.shape[-1], keys=key.shape[-2], masked=attn_mask is not None)
        self.usage.attention.add(call)

    def called(self, function: Any) -> None:
        """An operation or a method of tensors is called."""
        if function in READS:
            self.usage.varies = "it reads the value of a tensor"


class _Operations(TorchDispatchMode):
    """Tells a look of operations; scripted functions have them too."""

    def __init__(self, look: _Watch):
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.look.used((args, kwargs))
        self.look.writes(func, args, kwargs or {})
        self.look.called(func)
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Tells a look of attention, and of methods that read memory without an operation."""

    def __init__(self, look: _Watch):
        super().__init__()
        self.look = look

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.look.called(func)
        if func == SDPA:
            self.look.attends(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, what a model compiles by itself runs as it is written.

    Under modes like those of a look the compiler passes code over, and fullgraph=True takes that for an error.
    """
    # The compiler is slow to import. A program that has not imported it has compiled nothing.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def parameters_behind(outputs: Sequence[Tensor]) -> set[Tensor]:
    """The parameters, and other leaves, that get a gradient from some tensors."""
    seen = set()
    found = set()
    # A tensor that is a parameter itself has no node.
    left = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # it adds up the gradient of a leaf
            found.add(node.variable)
        left += [following for following, _ in node.next_functions if following is not None]
    return found


def _settings(model: nn.Module) -> dict[str, Any]:
    """Numbers, words and truth values that the modules of a model hold as attributes; states of generators too."""
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            place = f"{prefix}.{name}" if prefix else name
            if isinstance(value, SETTINGS):
                found[place] = value
            elif isinstance(value, random.Random):
                found[place] = value.getstate()
            elif isinstance(value, np.random.Generator):
                found[place] = repr(value.bit_generator.state)
    return found


@contextmanager
def _random_state_kept() -> Iterator[Callable[[], bool]]:
    """Inside, random numbers are the same on all ranks; afterwards the states of torch, Python and NumPy are as before.

    Yields a function that tells whether Python's or NumPy's numbers were drawn.
    """
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    random.seed(SEED)
    np.random.seed(SEED)
    first_of_python = random.getstate()
    first_of_numpy = np.random.get_state()

    def drawn() -> bool:
        is_python_same = random.getstate() == first_of_python
        is_numpy_same = repr(np.random.get_state()) == repr(first_of_numpy)
        return not (is_python_same and is_numpy_same)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        try:
            yield drawn
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
