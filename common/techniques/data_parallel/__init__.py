"""Data parallelism: DDP, communication hooks, synchronized BatchNorm, and unequal shards.

`ddp.replicate` wraps the model of a run, whose buckets are then warmed up before the first step. `shards.set_up_shards`
prepares unequal shards. `sync_batchnorm` converts BatchNorm layers. `single_process_baseline` measures
speeds outside the training loop and reports the scaling. FSDP2 is applied in the scripts.
"""
