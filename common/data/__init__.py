"""Data sets: preparation, batches for each rank, augmentation, and data worker processes.

The module `prepare` finds or creates a data set once per machine. The module `loader` yields the
batches of a rank, and `workers` prepares batches in separate processes.
"""
