"""Data parallelism: DDP, communication hooks, synchronized BatchNorm, and unequal shards."""
