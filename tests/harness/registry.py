"""The one list of experiments: what every experiment must do is tested for each entry of it.

An experiment whose ranks all train the same model needs no entry of its own (`make_entry`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.config import config
from configs.shared import TrainingExperiment
from slurm.launch.tour import SMALLEST_SETTINGS

MLP = ("model=mlp", "bucket_mb=0.05")  # several buckets, as a larger model has them
FEW_STEPS = ("steps=4", "batch=6", "checkpoint.every_steps=2", "data.test_limit=20", "eval_batch=4")
ONE_SIDE = ("algorithms=[ring]", "transports=[memory]")  # of the built-in backend
SCORES = ("test_accuracy", "test_loss", "test_samples", "samples_per_second")


@dataclass(frozen=True)
class Entry:
    """An experiment, its smallest settings, and what its result must hold."""

    name: str
    smallest: tuple[str, ...]
    processes: int
    produces: tuple[str, ...]
    spread: Callable[[int], tuple[str, ...]]
    """The settings that give a run so many processes; they take a batch of 24."""
    others: tuple[tuple[str, ...], ...] = ()
    """Settings under which resuming is no matter of course: each must go on to the bit, too."""
    learns_at_once: bool = True
    """Whether the 40th loss of the smallest settings is below the first; else there is a checkpoint after each 20."""
    keeps_ranks: bool = False
    """Whether only as many ranks as saved a checkpoint can go on from it."""

    @property
    def trains(self) -> bool:
        """Whether there is a model: else there are neither losses nor scores."""
        return issubclass(config.import_schema(self.name), TrainingExperiment)


EXPERIMENTS = [
    Entry(
        name="mnist_pipeline",
        smallest=SMALLEST_SETTINGS["mnist_pipeline"],
        processes=2,
        produces=SCORES,
        spread=lambda count: ("depth=3", f"stages={count}", "microbatches=2"),
        others=(
            ("engine=torch", "schedule=zero_bubble", "stages=2", "microbatches=2"),
            ("stages=4", "stages_per_process=2", "depth=3", "microbatches=2", "optim.name=adam"),
        ),
    ),
    Entry(
        name="ddp_multinode",
        smallest=(*SMALLEST_SETTINGS["ddp_multinode"], *MLP),
        processes=2,
        produces=(*SCORES, "ranks", "communication_exposed"),
        spread=lambda count: (f"processes_per_node={count}", *MLP),
        others=(
            ("strategy=fsdp", "optim.name=adam", "clip=1", "shards=[3,1]", "dropout=0.3"),
            ("model=resnet18", "sync_batchnorm=true", "communication=bf16", "shards=[0,1]", *FEW_STEPS),
            ("communication=powersgd", "optim.lr=0.01", "model=mlp"),  # which begins to compress at the tenth step
        ),
    ),
    Entry(
        name="amp_accum",
        smallest=SMALLEST_SETTINGS["amp_accum"],
        processes=2,
        produces=(
            "test_accuracy",
            "samples_per_second",
            "training_bytes",
            "bytes_sent",
            "steps_skipped",
            "final_loss",
        ),
        # three microbatches of 8 samples: the last window of an epoch of 320 has only one of them
        spread=lambda count: (
            f"processes_per_node={count}",
            "precision=fp32",
            "model=mlp",
            f"accumulate={2 if count == 3 else 3}",
        ),
        others=(
            ("model=mlp", "precision=fp16", "growth_interval=4", "init_scale=1e8", "accumulate=3", "dropout=0.3"),
            ("precision=bf16", "no_sync=false", "optim.name=adam", "clip=1", "accumulate=3", "shards=[1,4]"),
        ),
    ),
    Entry(
        name="param_server",
        smallest=(*SMALLEST_SETTINGS["param_server"], "model=mlp"),
        processes=2,
        produces=(*SCORES, "pushes", "bytes_received", "staleness_counts"),
        spread=lambda count: (f"processes_per_node={count}", f"servers={min(2, count)}", "model=mlp", "plot=false"),
        others=(("servers=3", "processes_per_node=3", "model=mlp", "optim.name=adam", "plot=false"),),
    ),
    Entry(
        name="local_sgd",
        smallest=(*SMALLEST_SETTINGS["local_sgd"], "model=mlp"),
        processes=2,
        produces=(*SCORES, "exchanges", "bytes_sent", "exchange_seconds"),
        # the settings with which it is what one process does
        spread=lambda count: (f"processes_per_node={count}", "every=1", "momentum_of=averaged", "model=mlp"),
        others=(
            ("model=mlp", "every=4", "start=2", "outer=nesterov", "outer_lr=0.7", "optim.name=adamw", "optim.lr=0.001"),
            ("model=mlp", "every=5", "delay=3", "communication=powersgd", "optim.lr=0.05", "momentum_of=reset"),
            ("model=mlp", "every=4", "communication=int8", "momentum_of=averaged"),
            ("model=mlp", "every=3", "delay=2", "communication=topk", "topk=0.1"),
        ),
        keeps_ranks=True,
    ),
    Entry(
        name="resnet_dataparallel",
        smallest=SMALLEST_SETTINGS["resnet_dataparallel"],
        processes=2,
        produces=(*SCORES, "devices", "memory"),
        spread=lambda count: ("model=mlp", "compare=false", f"processes_per_node={count}"),
    ),
    Entry(
        name="resnet_modelparallel",
        smallest=SMALLEST_SETTINGS["resnet_modelparallel"],
        processes=2,
        produces=(*SCORES, "idle_share", "memory"),
        spread=lambda count: ("width=4", f"stages={count}", "split=[]", "split_size=12", "plot=false"),
        others=(
            ("width=8", "replicas=2", "split_size=6", "plot=false"),
            ("width=8", "devices=[cpu,cpu]", "split_size=8", "plot=false"),
            ("width=8", "schedule=zero_bubble", "split_size=12", "plot=false"),
        ),
    ),
    Entry(
        name="sparse_prune",
        smallest=SMALLEST_SETTINGS["sparse_prune"],
        processes=1,
        produces=(
            "test_accuracy",
            "samples_per_second",
            "sparsity",
            "nonzero",
            "masks",
            "bytes_compressed",
            "csr_seconds",
        ),
        spread=lambda count: (
            f"processes_per_node={count}",
            "every=4",
            "criterion=taylor",
            "export=false",
            "int8=false",
        ),
        others=(
            ("schedule=rigl", "every=4", "optim.name=sgd", "processes_per_node=2", "export=false", "int8=false"),
            (
                "model=lenet5",
                "scope=n:m",
                "sparsity=0.5",
                "schedule=iterative",
                "criterion=gradient",
                "export=false",
                "int8=false",
            ),
            (
                "model=lenet5",
                "scope=structured",
                "l1=0.01",
                "criterion=random",
                "export=false",
                "int8=false",
            ),
        ),
    ),
    Entry(
        name="collectives",
        smallest=(*SMALLEST_SETTINGS["collectives"], *ONE_SIDE),
        processes=2,
        produces=("points", "lines", "exact_results"),
        spread=lambda count: (
            *SMALLEST_SETTINGS["collectives"],
            *ONE_SIDE,
            f"processes_per_node={count}",
            "rounds=2000",
        ),
    ),
]


def make_entry(name: str) -> Entry:
    """The entry of an experiment that has none in the list: one of configs.dataparallel.Replicated."""
    return Entry(
        name=name,
        smallest=(*SMALLEST_SETTINGS.get(name, ("batch=16",)), "checkpoint.every_steps=20"),
        processes=config.load_config(config.import_schema(name), [], {}).processes,
        produces=SCORES,
        spread=lambda count: (f"processes_per_node={count}",),
        learns_at_once=False,
    )


EXPERIMENTS += [make_entry(name) for name in config.list_experiments() if name not in {e.name for e in EXPERIMENTS}]
TRAINING = [entry for entry in EXPERIMENTS if entry.trains]
BY_NAME = {entry.name: entry for entry in EXPERIMENTS}
STAGED, REPLICATED = BY_NAME["mnist_pipeline"], BY_NAME["ddp_multinode"]
ARCHETYPES = [STAGED, REPLICATED]
"""How a run spreads over processes: the model cut into stages, or a replica of it in each."""
