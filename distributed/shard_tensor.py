"""ShardTensor, the public name: one tensor split over the ranks of a mesh, and the rules by which it computes.

    from distributed.shard_tensor import ShardTensor

The class is in distributed/shard/core/tensor.py, and the rules of its operations are in distributed/shard/ops/ and
distributed/shard/extra/, of functions that are not torch's in distributed/neighborhood.py. Importing this module
registers all of them, and gives distributed/shard what it takes from outside.
"""

from distributed import neighborhood  # noqa: F401
from distributed.attention import METHODS
from distributed.layers import rank_random
from distributed.shard import extra, ops  # noqa: F401
from distributed.shard.core.given import Hooks, attention_methods
from distributed.shard.core.operands import redistribute, replicate, scatter_tensor, sum_partial, whole_weight  # noqa: F401
from distributed.shard.core.spec import part_of  # noqa: F401
from distributed.shard.core.tensor import ShardTensor, dispatch, local, named, no_rule, rule, wrap  # noqa: F401
from distributed.shard.missing_rules import guards  # noqa: F401
from distributed.shard.missing_rules.fallback import set_fallback  # noqa: F401
from distributed.shard.ops.attention import set_attention_method  # noqa: F401
from utils import comm

attention_methods.update(METHODS)
Hooks.random_stream = rank_random
Hooks.prepare_group = comm.set_group_timeout
