"""ShardTensors under torch.compile: mends of its tracer, and a guard against all that does not ask for a rule.

The tracer of torch.compile calls rules as torch does, by __torch_function__, and puts what they compute into its graph,
where a ShardTensor is the rank's part. What does not ask for a rule would compute with that part alone: a function
whose tuple of ShardTensors the tracer overlooks, for example. So the guard looks at every operation that enters a
graph. Outside of rules none may take a ShardTensor, whatever its name.

All private names of the tracer stand here. Where a release of torch lacks one of a mend, the guard refuses what would
be wrong without it. Where it lacks one of the guard, `wrap` refuses ShardTensors in compiled code.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Proxy
from torch.fx.node import map_aggregate

from distributed.shard.core.calls import INSIDE, name_of
from utils.errors import first_line

if TYPE_CHECKING:
    from torch._dynamo.exc import TorchDynamoException  # slow to import

is_guarded = False  # whether the tracer refuses what would see a part alone
RAISED = re.compile(r"raised exception \w+\(([\"'])(.*)\1\)")  # what traced code raises, in messages of torch
# Python's protocols that the tracer computes by itself: {its method: the method of Tensor that has a rule}.
BY_METHOD = {"nb_absolute_impl": "abs", "unpack_var_sequence": "unbind"}

READ_ATTRIBUTE = "var_getattr", "tp_getattro_impl"  # the tracer's method in torch 2.13, and in 2.15


class ProxyOfPart(Proxy):
    """What stands in a graph for a ShardTensor, where no rule has asked for it."""


def guard_compiler(cls: type) -> None:
    """Let torch.compile treat tensors of this class as torch itself does, and refuse what it would not ask a rule."""
    global is_guarded
    torch.compiler.assume_constant_result(let_rules_apply)
    # What a mend does not find in this torch it leaves, and the guard refuses what would be wrong without it.
    for mend in (_look_into_tuples, _read_attributes_of_parts, _compute_by_methods):
        with suppress(ImportError, AttributeError):
            mend(cls)
    with suppress(ImportError, AttributeError):
        _guard(cls)
        _keep_class(cls)
        _keep_collectives()
        is_guarded = True


def let_rules_apply(value: bool) -> bool:
    """Let rules apply, or not, to what is traced from here on, as AsShardTensors does; returns what was before.

    The tracer calls this function itself, where it meets it.
    """
    state = _trace_state()
    before = state.torch_function_subclass_enabled
    state.torch_function_subclass_enabled = value
    return before


def _trace_state():
    """What the tracer knows of __torch_function__ at this place of the traced code."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().symbolic_torch_function_state


def _guard(cls):
    """Refuse every operation of a graph that takes a ShardTensor outside of rules."""
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.output_graph import SubgraphTracer
    from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable as Subclassed

    proxy_of = Subclassed.as_proxy
    create = SubgraphTracer.create_proxy

    def as_proxy(self: Any) -> Proxy:
        proxy = proxy_of(self)
        is_outside = issubclass(self.class_type, cls) and _trace_state().torch_function_subclass_enabled
        return ProxyOfPart(proxy.node, proxy.tracer) if is_outside else proxy

    def create_proxy(self: Any, kind: str, target: Any, args: Any, kwargs: Any, *others: Any, **named: Any) -> Proxy:
        def look(x: Any) -> Any:
            if isinstance(x, ProxyOfPart):
                name = target if isinstance(target, str) else name_of(target)
                raise Unsupported(f"ShardTensor: no rule for {name} in compiled code, which would see a part alone")
            return x

        map_aggregate((args, kwargs), look)
        return create(self, kind, target, args, kwargs, *others, **named)

    Subclassed.as_proxy = as_proxy  # type: ignore[method-assign]
    SubgraphTracer.create_proxy = create_proxy  # type: ignore[method-assign]


def _keep_class(cls):
    """Let a ShardTensor stay one when it is changed in place. The tracer looks at the part anew, a plain tensor."""
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable as Subclassed

    look_anew = TensorVariable.synchronize_attributes

    def synchronize_attributes(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self.class_type
        look_anew(self, *args, **kwargs)
        if issubclass(before, cls):
            self.class_type = before

    Subclassed.synchronize_attributes = synchronize_attributes  # type: ignore[method-assign]


def _keep_collectives():
    """Let equal collectives stay two. Ranks without a row send equal zeros for two rows, and others two rows."""
    from torch._functorch.compile_utils import rand_ops

    # Operations of this list are never merged with equal ones.
    collectives = torch.ops._c10d_functional
    rand_ops += [
        collectives.all_reduce,
        collectives.all_gather_into_tensor,
        collectives.reduce_scatter_tensor,
        collectives.all_to_all_single,
    ]


def _look_into_tuples(cls):
    """Let the tracer find ShardTensors in tuples as in lists: torch.cat((a, b))."""
    from torch._dynamo.variables import torch_function
    from torch._dynamo.variables.lists import BaseListVariable

    flatten = torch_function._flatten_vts

    def flatten_all(variables: Iterable[Any]) -> list[Any]:
        found: list[Any] = []
        flat: list[Any] = flatten(variables)
        for variable in flat:
            is_sequence = variable.is_realized() and isinstance(variable, BaseListVariable)
            found += flatten_all(variable.items) if is_sequence else [variable]
        return found

    torch_function._flatten_vts = flatten_all  # type: ignore[assignment]


def _read_attributes_of_parts(cls):
    """Let rules read attributes of a part where torch has a mode, such as torch.set_default_device.

    The tracer would ask for the attribute's rule again and again, as long as there is a mode.
    """
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable as Subclassed

    def reading(method: str) -> Callable[[Any, Any, str], Any]:
        ask = getattr(Subclassed, method)

        def getattribute(self: Any, tx: Any, name: str) -> Any:
            in_rule = not _trace_state().torch_function_subclass_enabled
            is_of_tensors = hasattr(torch.Tensor, name) and name not in vars(cls)
            if issubclass(self.class_type, cls) and in_rule and is_of_tensors:
                return getattr(TensorVariable, method)(self, tx, name)
            return ask(self, tx, name)

        return getattribute

    for method in READ_ATTRIBUTE:
        if method in vars(Subclassed):
            setattr(Subclassed, method, reading(method))


def _compute_by_methods(cls):
    """Let abs(x) and `for row in x` ask for rules."""
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable as Subclassed

    def by_method(name: str, plain: Callable) -> Callable:
        def compute(self: Any, tx: Any, *args: Any) -> Any:
            if not (issubclass(self.class_type, cls) and _trace_state().torch_function_subclass_enabled):
                return plain(self, tx, *args)
            result = self.call_method(tx, name, [], {})
            return result.unpack_var_sequence(tx) if name == "unbind" else result

        return compute

    for protocol, name in BY_METHOD.items():
        # A release that has none of this name computes in another way, which the guard sees.
        plain = getattr(TensorVariable, protocol, None)
        if plain is not None:
            setattr(Subclassed, protocol, by_method(name, plain))


def refusal_of(error: "TorchDynamoException") -> str:
    """Why torch.compile could not trace a model, and the model's line that it could not trace, as one line of text."""
    # What a rule refuses is quoted in the middle of torch's message.
    raised = RAISED.search(str(error))
    reason = raised[2] if raised else first_line(error)
    if "data-dependent" in reason.lower():
        reason = "a size or a branch depends on values, which compiled code does not know"
    # The innermost line outside of torch, of ShardTensor and of modes is the model's.
    stack = getattr(error, "real_stack", None) or []
    lines = []
    for frame in stack:
        is_between = frame.filename.startswith(INSIDE) or frame.name == "__torch_function__"
        if not is_between:
            lines.append(frame)
    if not lines:
        return reason
    frame = lines[-1]
    return f'{reason}, File "{frame.filename}", line {frame.lineno}, in {frame.name}: {frame.line}'
