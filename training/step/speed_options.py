"""Options that make the same model faster or smaller, applied from outside. Names and weights stay the same."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from distributed.parallel_model import transform_forward
from training.step.cuda_graphs import check_capture
from training.step.determinism import make_repeatable
from training.step.float8 import use_float8
from training.step.recomputation import Contexts, checkpointed
from utils import comm
from utils.choices import choose
from utils.errors import UsageError
from utils.schema import Config
from utils.signals import stop_signals_heard_alone
from utils.torch_private import VERSION

EXPENSIVE = [  # what selective checkpointing keeps rather than computes again
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def apply_speed_options(config: Config, device: torch.device, model: nn.Module) -> None:
    """TF32, kernels, memory format, 8-bit products, activation checkpointing and compilation, as the config says.

    Raises UsageError for an option that this device, or a model without `blocks`, does not have.
    """
    # What a graph cannot hold is refused before anything is changed.
    if config.enable_cuda_graphs:
        check_capture(config, device, model)
    make_repeatable(config)
    if device.type != "cpu":
        torch.set_float32_matmul_precision("high" if config.enable_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.enable_tf32
    if config.enable_channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # the convolution of the patch embedding
    if config.amp_mode == "fp8":
        use_float8(blocks_of(model, "amp_mode fp8"), device)
    recompute = choose("activation_checkpointing", config.activation_checkpointing, RECOMPUTATIONS)
    recompute(config, model)
    if config.enable_jit:
        if comm.get_size("domain") > 1 and VERSION < (2, 13):
            raise UsageError(
                f"enable_jit with domain_parallel needs torch 2.13: torch {torch.__version__} cannot trace it"
            )
        # A graph break is an error. Several ranks compile each block alone: between two blocks gradients are reduced
        # and parameters gathered, while the others compute.
        for module in [model] if comm.world_size() == 1 else blocks_of(model, "enable_jit on several ranks"):
            transform_forward(module, compiled)


def keep_activations(config: Config, model: nn.Module) -> None:
    """Compute nothing twice."""


def recompute_steps(config: Config, model: nn.Module) -> None:
    """Compute each forward pass of a rollout a second time in the backward pass."""
    # One process compiles the whole model as one function, and several compile each block.
    is_inside = config.enable_jit and comm.world_size() == 1  # of a compiled function
    module = None if is_inside else model
    model.forward = checkpointed(model.forward, module, preserve_rng_state=not config.enable_cuda_graphs)


def recompute_blocks(config: Config, model: nn.Module, selective: bool) -> None:
    """Compute blocks a second time. selective: all but their products of matrices and attention."""
    # The last block of every group is computed again, and the others keep what they have.
    every = config.checkpointing_interval
    blocks = blocks_of(model, "activation_checkpointing")[every - 1 :: every]
    generators = not config.enable_cuda_graphs
    checkpoint_activations(blocks, selective, generators, config.enable_jit)


RECOMPUTATIONS: dict[str, Callable[[Config, nn.Module], None]] = {
    "none": keep_activations,
    "full": partial(recompute_blocks, selective=False),
    "selective": partial(recompute_blocks, selective=True),
    "step": recompute_steps,
}


def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled as one graph; its call raises UsageError where torch.compile cannot trace it."""
    from torch._dynamo.exc import TorchDynamoException  # slow to import

    from distributed.shard.core.compiled import refusal_of

    # Each block is a graph of its own already: torch need not cut it at the buckets of DistributedDataParallel.
    torch._dynamo.config.optimize_ddp = False
    hold_signals_back_in_compilations()
    lock_progress_bars_by_threads()
    run = torch.compile(forward, fullgraph=True)

    def call(*args, **kwargs):
        try:
            return run(*args, **kwargs)
        except TorchDynamoException as error:
            raise UsageError(f"enable_jit: {refusal_of(error)}") from error

    return call


_held_back = ExitStack()  # the stop signals, while something compiles


def hold_signals_back_in_compilations() -> None:
    """From now on the processes that compile for this one never receive a stop signal.

    A scheduler signals every process of a job. torch waits without end for a compiler that a signal has ended, and a
    run that was asked to stop would never save.
    """
    from torch._dynamo.callback import callback_handler

    # Whoever calls torch._dynamo.reset() takes all callbacks away, so each compilation looks whether they are there.
    if _hold_signals_back not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_hold_signals_back)
        callback_handler.register_end_callback(_let_signals_come)


def _hold_signals_back(_: object) -> None:
    _held_back.enter_context(stop_signals_heard_alone())


def _let_signals_come(_: object) -> None:
    _held_back.close()


@cache
def lock_progress_bars_by_threads() -> None:
    """From now on the progress bars of torch's compiler take a lock of this process, not a semaphore of the system.

    A rank that a signal ends would leave that semaphore behind, and Python warns of it when the program ends.
    """
    bar = torch.hub.tqdm
    is_real = hasattr(bar, "set_lock")  # torch has a bar of its own where tqdm is not installed
    if is_real:
        bar.set_lock(threading.RLock())


def blocks_of(model: nn.Module, option: str) -> list[nn.Module]:
    """The `blocks` of a model, each of which maps tokens to tokens; raises UsageError, naming `option`, without any."""
    blocks: Any = getattr(model, "blocks", None)
    if blocks is None:
        raise UsageError(f"{option} works block by block, and {type(model).__name__} has no `blocks`")
    return list(blocks)


def checkpoint_activations(
    blocks: Iterable[nn.Module],
    selective: bool = False,
    generators: bool = True,
    compiles: bool = False,
) -> None:
    """Keep only the input of each block for the backward pass, which computes the block a second time.

    selective: also keep the results of matrix products and attention, so that only cheap operations are repeated.
    generators: reset random generators to compute dropout a second time, which a CUDA graph cannot. compiles: the
    blocks are compiled afterwards.
    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174); Korthikanti et al. 2022,
    "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198).
    """
    inner = None
    if selective:
        # The compiler knows torch's contexts alone, and writes the casts into its graph.
        inner = kept_results if compiles else kept_results_of_equal_calls
    for block in blocks:
        module = None if compiles else block
        recomputed = partial(checkpointed, module=module, inner=inner, preserve_rng_state=generators)
        transform_forward(block, recomputed)


def kept_results() -> Contexts:
    """The contexts of a call that keeps its expensive results, and of the same call with them."""
    return create_selective_checkpoint_contexts(EXPENSIVE)


def kept_results_of_equal_calls() -> Contexts:
    """As kept_results, where both calls make the same operations, one by one, which torch counts."""
    first, second = kept_results()
    return casting_each_time(first), casting_each_time(second)


@contextmanager
def casting_each_time(inner: AbstractContextManager) -> Iterator[None]:
    """Inside, autocast casts a weight whenever it is used.

    It would keep the copy of an earlier forward pass, of a rollout or of a block that is used twice. The call in the
    backward pass does not have it any more: it would make one operation more than the first.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with inner:
            yield
    finally:
        torch.set_autocast_cache_enabled(before)
