"""Everything parallel: collectives, tensor, context, pipeline, data and domain parallelism, applied to plain models.

One file for each mechanism; what is refused or watched lies in the room checks, and ShardTensor in the room shard.
It gives training the functions that make a model parallel, and imports networks and utils.
"""

import utils  # noqa: F401  # sets how threads wait, before torch is loaded
