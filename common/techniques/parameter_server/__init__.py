"""Parameter server: server ranks hold shards of the parameters, and workers push gradients to them.

`worker.ParameterServerRank` is the entry point of a rank, `server` implements the shards and the policy for stale
gradients, `state.ServerWorkerState` is the training state, and `report.ServerReport` the report.
The loss of workers is handled by `common.techniques.elastic`.
"""
