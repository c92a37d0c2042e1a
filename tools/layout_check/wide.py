"""Let a model compute in the default dtype throughout, float64 in a comparison, whatever narrower types its code names.

Layouts sum in unlike orders. What is rounded to float32 on the way differs between them by 1e-7, in which a small
mistake cannot be told from rounding. Weights are widened when the model is built, and casts that its own code asks for,
such as the x.float() of many norms, when they are called. Casts of this repository and of torch stay: what is sent or
gathered in bfloat16 is to be seen.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn, overrides

from distributed.checks.ties import keep_ties
from distributed.shard.core.calls import passes_on
from training.assembly import build_step
from training.models.build import LOOKING_ON, build_model
from training.step.speed_options import lock_progress_bars_by_threads
from training.step.step import TrainingStep
from utils.schema import Config

# Methods that cast without naming a type.
CASTS = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.cfloat: torch.complex64,  # type: ignore[attr-defined]
    torch.Tensor.chalf: torch.complex32,
}


def build_wide_step(config: Config, device: torch.device) -> TrainingStep:
    """The training step of a config, with a model that has no narrower numbers than the default dtype."""

    def build_wide(config: Config, *place: Any) -> nn.Module:
        model = build_model(config, *place)
        with keep_ties(model):
            return model._apply(_widened)

    # The look at a model builds one of its own.
    with patch("training.assembly.build_model", build_wide), patch("training.models.info.build_model", build_wide):
        return build_step(config, device)


def _widened(tensor: Tensor) -> Tensor:
    """A tensor in the default dtype, or its complex one; as it is where it is wider already, or has no such numbers."""
    return tensor.to(_wide_of(tensor.dtype))


def _wide_of(dtype: torch.dtype) -> torch.dtype:
    """The wider of a dtype of numbers and the default one; any other dtype as it is, one of 8 bits too."""
    is_of_numbers = dtype.is_floating_point or dtype.is_complex
    if not is_of_numbers or dtype.itemsize == 1:
        return dtype
    return torch.promote_types(dtype, torch.get_default_dtype())


@contextmanager
def quick_compilation(config: Config) -> Iterator[None]:
    """Inside, compiled code is traced as for the default backend, and no machine code is made of it.

    A model that compiles parts of itself may ask for one graph: hooks on modules inside would refuse it.
    What was compiled inside is forgotten afterwards: it would count against torch's limit in the next comparison.
    """
    lock_progress_bars_by_threads()
    compile_ = torch.compile
    graphs = {} if config.enable_jit else {"fullgraph": False}

    def traced(model: Any = None, **options: Any) -> Any:
        run = compile_(model, **{"backend": "aot_eager", **options, **graphs})
        is_module = model is None or isinstance(model, nn.Module)
        return run if is_module else _without_wide_casts(run)

    with patch.object(torch, "compile", traced):
        try:
            yield
        finally:
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()


def _without_wide_casts(run):
    """A compiled function that is called without our mode, in which torch's tracer takes no Tensor.unflatten."""

    def call(*args, **kwargs):
        mode = overrides._get_current_function_mode()
        is_ours = isinstance(mode, _WideCasts)
        with overrides._pop_mode_temporarily() if is_ours else nullcontext():
            return run(*args, **kwargs)

    return call


@contextmanager
def wide_casts() -> Iterator[None]:
    """Inside, models compute in the default dtype, in backward passes too, where checkpoints compute again."""
    mode = _WideCasts()
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    # torch takes a mode off while it handles a function, and backward() is one.
    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    with patch.object(torch.autograd, "_engine_run_backward", run_in_mode), mode:
        yield


class _WideCasts(overrides.TorchFunctionMode):
    """Inside, a cast in a model's own code gives the default dtype, or its complex one, in place of a narrower one.

    Compiled code is as it was.
    """

    def __torch_function__(
        self,
        func: Callable,
        types: Any,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        names_a_type = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
        is_cast = func in CASTS or (names_a_type and not _reads_bytes(func, args))
        if not is_cast or torch.compiler.is_compiling() or not _is_of_a_model(sys._getframe(1)):
            return func(*args, **kwargs)
        if func in CASTS:
            return args[0].to(_wide_of(CASTS[func]), **kwargs)
        wide_args = [_wide_if_type(value) for value in args]
        wide_kwargs = {name: _wide_if_type(value) for name, value in kwargs.items()}
        return func(*wide_args, **wide_kwargs)


def _reads_bytes(func, args):
    """Tell whether a type says how the bytes of a buffer, or of whole numbers, are read."""
    if func is Tensor.view:
        return not (args[0].is_floating_point() or args[0].is_complex())
    return func is torch.frombuffer


def _wide_if_type(value: Any) -> Any:
    return _wide_of(value) if isinstance(value, torch.dtype) else value


def _is_of_a_model(frame: FrameType) -> bool:
    """Tell whether the code that calls a function of torch is that of a model. frame: the innermost."""
    # The look at a model has a mode of its own.
    while passes_on(frame) and frame.f_back:
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(LOOKING_ON)  # whose casts stay as they are
