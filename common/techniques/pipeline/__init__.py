"""Pipeline parallelism: partition, schedules, the built-in executor, torch's engine, messages and the report.

`model_split` splits a model and builds its engine (`split_model`). `schedules` represents a schedule as plain data,
`executor` executes the actions of a schedule, `split_backward` computes a backward in two parts, and `stage_messages`
derives the messages from a schedule. `torch_engine` uses torch.distributed.pipelining, and `mesh` replicates pipelines.
Networks that can be split are in `common.models`. Other techniques import `api`.
"""
