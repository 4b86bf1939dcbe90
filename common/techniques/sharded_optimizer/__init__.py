"""Sharded optimizer state (ZeRO stage 1): ranks that hold the same parameters divide the optimizer state.

`divide_optimizer_state` applies the technique to the optimizer of a run. `api.assign_to_ranks` determines which rank
updates which parameter, also for formulas that know only the sizes of the parameters.
"""

from common.techniques.sharded_optimizer.optimizer_shards import divide_optimizer_state

__all__ = ["divide_optimizer_state"]
