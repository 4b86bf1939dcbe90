"""Data sets: their preparation, batches for each rank, data worker processes, and shards of unequal size.

`prepare` finds or creates a data set once per machine. `loader` yields batches. `shards` divides each batch among ranks
of unequal speed.
"""
