"""The names that every experiment uses, available from one module.

Experiments import the names of a single technique from the package of that technique. No module of common or slurm
imports this module. This module imports only modules that every run needs, and imports them without garbage collection,
which makes every run start faster. Experiments therefore import this module before torch.
"""

from common.system.imports import import_without_garbage_collection

with import_without_garbage_collection():
    from common.checkpoint.train_state import TrainState
    from common.models.model_file import init_network
    from common.models.networks import ResNet, SimpleNN, build_network
    from common.runs.result import ReportData
    from common.system.errors import UserError
    from common.training.entry_point import start
    from common.training.evaluate import score_replicated, score_test_set
    from common.training.optimizers import build_optimizer
    from common.training.run import Run

__all__ = [
    "ReportData",
    "ResNet",
    "Run",
    "SimpleNN",
    "TrainState",
    "UserError",
    "build_network",
    "build_optimizer",
    "init_network",
    "score_replicated",
    "score_test_set",
    "start",
]
