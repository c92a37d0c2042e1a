"""ShardTensor: one tensor split over the ranks of a mesh, which computes as the whole would.

A *Spec* says of each dimension which ranks hold which rows, and over which ranks a value is still a sum (partial). A
*rule* is what stands for a torch function: it is called with ShardTensors, communicates where it must, and gives back
local results with their Spec. Three worlds meet in a rule: `local(x)` and what is computed from it is this rank's part;
a Spec speaks of the whole; and `dispatch(func, x)` calls the rule of another function on ShardTensors. In ops/ and
extra/ a method of a tensor is local, and only dispatch is global; extra/composed.py and extra/formulas.py write
everything in terms of the whole.

In core/: the class (tensor.py), the Spec (spec.py, axes.py), plans of calls that are kept (plans.py), moving rows
(redistribute.py, halo.py, order.py) and compiled code (compiled.py). In missing_rules/: what has no rule.
"""
