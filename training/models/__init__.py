"""The model of a run: built from its config, checked, counted, and the roles of its weights.

It gives the other rooms build_model. It imports nothing of theirs.
"""
