"""Data parallelism: DDP, communication hooks, synchronized BatchNorm, unequal shards, dropout by position."""
