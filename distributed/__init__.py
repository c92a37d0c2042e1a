"""Everything parallel: collectives, tensor, context, pipeline, data and domain parallelism, applied to plain models."""

import utils  # noqa: F401  # sets how threads wait, before torch is loaded
