"""Data sets: preparation, batches for each rank, augmentation, and data worker processes.

`prepare` finds or creates a data set once per machine, and `sources` and `own_data` provide its arrays. `samples` loads
samples of these arrays, and `map_style` reads samples on demand. `loader` yields the batches of a rank, which `workers`
prepares in separate processes. `step_source` declares what the training loop
needs from a loader. `preprocessing` describes the inputs of a trained model for other programs.
How a batch is divided into shards is a setting (`configs/batch_plan.py`).
"""
