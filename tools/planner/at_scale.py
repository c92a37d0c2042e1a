"""What grows with the number of ranks and is no message: the slowest of many ranks, and reading. Both are assumptions.

Every step waits for its slowest rank. The step times of ranks are taken to be independent and normal, with a relative
standard deviation `jitter`: of n ranks the slowest is expected at 1 + jitter z(n), z(n) the mean of the largest of n
standard normal numbers (Blom 1958). Batches are read ahead, so a step takes the longer of computing and reading.
"""

import math
from argparse import Namespace
from dataclasses import dataclass

from scipy.stats import norm

from tools.planner.plan import Plan
from utils.errors import ArgumentParser, real
from utils.schema import Config

READING = "reading"


def expected_slowest(ranks: int) -> float:
    """Mean of the largest of so many standard normal numbers, within 2 %; 0 of one."""
    return float(norm.ppf((ranks - 0.375) / (ranks + 0.25))) if ranks > 1 else 0.0


def sample_bytes(config: Config) -> int:
    """Bytes of a sample in year files: its state, and what follows it for the target, in float32."""
    points = math.prod(config.img_size)
    targets = config.n_out_channels * config.longest_rollout if config.task == "forecast" else 0
    return 4 * points * (config.n_in_channels + targets)


@dataclass(frozen=True)
class Assumptions:
    """jitter: relative standard deviation of a rank's step time. node_read, total_read: bytes/s of files."""

    jitter: float
    node_read: float
    total_read: float

    def seconds(self, plan: Plan) -> tuple[float, str]:
        """(seconds of a step, what bounds it) of a plan at its number of ranks."""
        computing = plan.time.seconds * (1 + self.jitter * expected_slowest(plan.layout.world_size))
        read = plan.config.global_batch_size * sample_bytes(plan.config)
        reading = read / min(self.total_read, plan.nodes * self.node_read)
        return (reading, READING) if reading > computing else (computing, plan.time.bound)

    def text(self, config: Config) -> str:
        """The assumptions in a line."""
        return (
            f"Assumed: step times of ranks vary by {self.jitter:.1%} (--jitter), each step waits for the slowest; a "
            f"sample of {sample_bytes(config) / 1e6:.2f} MB is read at {self.node_read / 1e9:g} GB/s a node "
            f"(--node_read), {self.total_read / 1e9:g} GB/s of all (--total_read), while the step before computes."
        )


def add_options(parser: ArgumentParser) -> None:
    """The options of the assumptions."""
    option = parser.add_argument
    option("--jitter", type=real(0, 1), default=0.02, metavar="S", help="of a curve: how step times vary (%(default)s)")
    option("--node_read", type=real(1e-3, 1e6), default=10.0, metavar="GB/S", help="files read by a node (%(default)s)")
    option("--total_read", type=real(1e-3, 1e9), default=1000.0, metavar="GB/S", help="by all (%(default)s)")


def assumptions(options: Namespace) -> Assumptions:
    """The Assumptions that the options name."""
    return Assumptions(options.jitter, options.node_read * 1e9, options.total_read * 1e9)
