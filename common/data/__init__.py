"""Data sets, their preparation, the loader, data workers and unequal shards.

`prepare` finds or creates a data set once per machine; `loader` yields batches; `shards` divides batches unequally.
"""
