"""Data parallelism: DDP, communication hooks, synchronized BatchNorm, and unequal shards.

`ddp` wraps models (`wrap_ddp`), registers communication hooks, and warms up buckets. `sync_batchnorm` converts
BatchNorm layers. `single_process_baseline` measures speeds outside the training loop, and sets up unequal shards
(`set_up_shards`) with the hook `shards.AutoShards`. FSDP2 is applied in the scripts.
"""
