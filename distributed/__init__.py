"""Everything parallel: collectives, tensor, context, pipeline, data and domain parallelism, applied to plain models."""
