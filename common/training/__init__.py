"""Execution of a training run: entry point, attempts, training loop, evaluation, optimizers, and final report.

`entry_point` parses the command line and starts the ranks. `loop` yields the optimizer steps.
"""
