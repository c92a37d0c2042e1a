"""Everything parallel: collectives, tensor, context, pipeline, data and domain parallelism, applied to plain models."""

import utils.signals  # noqa: F401  # Ctrl-C is quiet from here on
