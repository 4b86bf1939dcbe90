"""Execution of a training run: entry point, attempts, training loop, evaluation, optimizers, and final report.

`entry_point.start` parses the command line and starts the ranks. `run.Run` is the interface of a script, `loop` yields
its optimizer steps, and `hooks.StepHook` lets a technique act between them. `optimizers` builds optimizers,
`learning_rate` computes the learning rate of a step, `losses` contains losses other than cross-entropy, `evaluate`
scores models, and `final_report` writes the result. `custom_training` checks a custom network and a custom loss, and
`model_errors` explains errors of layers. This package imports no technique.
"""
