"""A ShardTensor, its Spec, plans of calls that are kept, and moving rows.

They give all that a rule is made of, and import nothing of the other rooms of distributed.shard.
"""
