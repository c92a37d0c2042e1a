"""Memory, operations and messages of a rank in a training step, by formula.

The result is the trace of tools.planner.trace, in about a millisecond and without running the step. The tables, the
meaning of the short names, and what is less exact than a trace, are in docs/reference/formulas.md.
"""

from collections.abc import Iterable
from itertools import product

from tools.planner.memory_formulas import memory_of
from tools.planner.message_formulas import messages_of
from tools.planner.operation_formulas import Operations
from tools.planner.rank_share import RankShare
from tools.planner.trace import Trace
from utils.errors import UsageError
from utils.layout import Layout
from utils.schema import Config

MODELS = ("vit", "classifier")  # that the formulas describe


def formula_traces(config: Config, layout: Layout, bands: Iterable[int] = (0,)) -> list[Trace]:
    """Traces of the ranks of which tools.planner.trace.trace_step gives them: of a pipeline its first and last one.

    config: of this layout. Whether the model can be split so is not checked, see tools.planner.layouts.
    bands: places along cp; the first band has the most tokens, but another one may send more.
    Raises UsageError for models that the formulas do not describe.
    """
    if config.model not in MODELS:
        raise UsageError(f"{config.config}: the formulas describe {' and '.join(MODELS)}, not model {config.model}")
    traces = []
    for stage, band in product(sorted({0, layout.pp - 1}), bands):
        share = RankShare(config, layout, stage, band)
        memory, held = memory_of(share)
        messages, groups = messages_of(share)
        traces.append(Trace(memory, held, None, Operations(share).counted, messages, groups))
    return traces
