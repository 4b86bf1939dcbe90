"""Pruning: masks, schedules, and the savings of a pruned network.

`pruning_masks.Masks` keeps pruned weights at zero, `pruning_schedules` computes the sparsity after each step, and
`pruning_savings.report_savings` measures size and speed. `int8` quantizes linear layers. The scores of weights are
in experiments/sparse_prune.py.
"""
