"""Many layouts: the best ones for a number of GPUs, and how far the best one scales."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tools.planner.at_scale import Assumptions
from tools.planner.formulas import formula_traces
from tools.planner.layouts import candidates
from tools.planner.plan import Plan, plan_layout
from tools.planner.request import Request

VERDICTS = ("fits", "marginal", "no")


def best_layouts(request: Request, gpus: int, top: int) -> list[Plan]:
    """Traced plans of the best layouts: those that fit first, the fastest first.

    All candidates are compared by formula; of candidates that split the model alike only the best is kept.
    Sets request.compared, and request.refused: {reason: number of layouts that no script runs}.
    """
    found, request.refused = formula_plans(request, gpus)
    request.compared = len(found)
    kept: dict[tuple, Plan] = {}
    for plan in sorted(found, key=_order):
        layout = plan.layout
        kept.setdefault((layout.tp, layout.cp, layout.pp, layout.domain), plan)
    best = [plan for plan in kept.values() if plan.fits != "no"][:top] or list(kept.values())[:top]
    traced = [
        replace(plan_layout(plan.config, plan.layout, request.gpu, request.calibration), formula_peak=plan.peak)
        for plan in best
    ]
    return sorted(traced, key=_order)


def formula_plans(request: Request, gpus: int, times: int = 1) -> tuple[list[Plan], dict[str, int]]:
    """Plans by formula of all layouts that the scripts can run, and {reason: number of refused layouts}.

    times: factor on the batch that was asked for.
    """
    config, gpu = request.any_layout(), request.gpu
    config = config.model_copy(update={"global_batch_size": times * config.global_batch_size})
    valid, refused = candidates(config, gpus, gpu.gpus_per_node, request.named)
    return [plan_layout(c, layout, gpu, request.calibration, formula_traces(c, layout)) for c, layout in valid], refused


def _order(plan: Plan) -> tuple[int, float]:
    cost = plan.needed if plan.fits == "no" else plan.time.seconds / plan.config.global_batch_size
    return VERDICTS.index(plan.fits), cost


@dataclass(frozen=True)
class Point:
    """A point of a scaling curve. scaling: strong or weak. efficiency: samples/s per GPU, relative to the first.

    seconds, bound: of a step with the slowest of all ranks and with reading, see tools.planner.at_scale.
    """

    plan: Plan
    scaling: str
    seconds: float
    bound: str
    efficiency: float

    @property
    def samples_per_sec(self) -> float:
        """Samples of all GPUs together."""
        return self.plan.config.global_batch_size / self.seconds

    def to_json(self) -> dict[str, Any]:
        """The point as JSON can hold it."""
        own = {"step_time_s": self.seconds, "bound": self.bound, "samples_per_sec": self.samples_per_sec}
        return {"scaling": self.scaling, "efficiency": self.efficiency} | self.plan.to_json() | own


def scaling(request: Request, counts: Sequence[int], assumed: Assumptions) -> list[Point]:
    """Points of the best layouts by formula. Strong: the same batch on all. Weak: it grows with the GPUs."""
    points = []
    for kind in ("strong", "weak"):
        first = None
        for gpus in counts:
            plans, _ = formula_plans(request, gpus, gpus // counts[0] if kind == "weak" else 1)
            if not plans:  # the batch is too small for so many
                continue
            plan = min(plans, key=_order)
            seconds, bound = assumed.seconds(plan)
            speed = plan.config.global_batch_size / seconds / gpus
            first = first or speed
            points.append(Point(plan, kind, seconds, bound, speed / first))
    return points
