"""A training run: entry point, attempt, loop over steps, evaluation, optimizers, final report.

`entry_point` turns a command line into ranks that train; `loop` yields the optimizer steps.
"""
