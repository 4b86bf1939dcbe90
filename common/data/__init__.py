"""Data sets: preparation, batches for each rank, augmentation, and data worker processes.

`prepare` finds or creates a data set once per machine, and `sources` and `own_data` provide its arrays. `loader` yields
the batches of a rank, which `workers` prepares in separate processes. `rounds` replaces the loader in a measurement.
How a batch is divided into shards is a setting (`configs/batch_plan.py`).
"""
