"""Functions without a rule: guards.py refuses where silence would be wrong, fallback.py computes on whole tensors.

They may import core and ops; rules import nothing from here.
"""
