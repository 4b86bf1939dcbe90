"""Settings that several experiments share, one dataclass per concern. Imports neither torch nor wandb.

The string below a field is its documentation, which `--help` prints. `check` methods contain the rules that involve
several fields; their errors name a remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from configs.batch_plan import BatchPlan, list_divisors
from configs.launch import Launch
from configs.ranges import at_least, between

__all__ = ["at_least", "between"]

RESNETS = {"resnet18": 11.2e6, "resnet50": 23.5e6, "resnet101": 42.5e6}  # number of parameters with width 64
CONVOLUTIONS = ("convnet", "lenet5", *RESNETS)  # models that need images
DATA_SETS = ("mnist", "digits", "cifar10", "imagefolder", "generated", "vectors")
TRAIN_SAMPLES = {"mnist": 60_000, "digits": 60_000, "cifar10": 50_000}  # sets of fixed size
OPTIMIZERS = ("sgd", "adam", "adamw", "lars", "lamb")
DECAYS = ("linear", "cosine", "constant", "step")
TRAINING_KEYS = ("epochs", "batch", "eval_batch", "dtype", "data", "optim")  # keys and groups that need a model


@dataclass
class Data:
    """Settings of the data set and its loader."""

    name: str = "mnist"
    """mnist, digits, cifar10; imagefolder reads root/train/<class>/* and root/val/<class>/*; generated is random pixels
    and labels, for throughput only; vectors is 10 numbers in 5 classes; FILE.py:function is a custom data set:
    function(root) returns train images, train labels, test images, test labels as NumPy arrays; images are uint8
    [N, H, W] or [N, 3, H, W], vectors uint8 [N, D], labels start at 0. After a fallback this names the data set that
    was actually used."""
    root: str = "data"
    """Folder with the raw files, in the layout of torchvision. The environment variable DATA_ROOT sets the default. Any
    other folder must exist for mnist, and must contain mnist unless it can be downloaded."""
    cache: str = "data/prepared"
    """Folder for prepared data sets (uint8 arrays). It must be writable and visible to all hosts."""
    fallback: Literal["digits", "none"] = "digits"
    """Data set of a local run if MNIST is neither in the default `root` nor downloadable; none fails instead."""
    image_size: int = between(8, 1024, 32)
    """Height and width in pixels of the colour images of imagefolder (resized and cropped once, during preparation) and
    generated."""
    samples: int = between(5, 10_000_000, 10_000)
    """Training samples of generated and vectors, which also have a fifth of this number of test samples."""
    classes: int = between(2, 10_000, 10)
    """Number of classes of generated."""
    download_timeout: float = between(0, 600, 10)
    """Seconds to wait for a download server; 0 disables downloads."""
    block: int = between(1, 100_000, 8)
    """Number of batches that are gathered and normalised in one vectorised operation."""
    augment: Literal["none", "crop", "crop_flip"] = "none"
    """Random augmentation of training images. crop shifts by up to an eighth of the side; crop_flip also mirrors (not
    for digits)."""
    unreadable: Literal["refuse", "skip"] = "refuse"
    """What to do if imagefolder contains files that are truncated or not images: fail and list them, or skip them."""
    workers: int = between(0, 64, 0)
    """Data worker processes per rank that gather and normalise batches in advance; 0 does this in the rank. A data
    worker has failed if it is killed or needs more than half of launch.step_timeout for a block of batches. A failed
    data worker ends the run; with `elastic=true` only its rank is lost."""
    train_limit: int = at_least(0, 0)
    """Use only the first N training samples; 0 uses all."""
    test_limit: int = at_least(0, 0)
    """Use only the first N test samples; 0 uses all."""

    @property
    def train_samples(self) -> int | None:
        """Number of training samples; None if it depends on the files of the data set."""
        samples = self.samples if self.name in ("generated", "vectors") else TRAIN_SAMPLES.get(self.name)
        if samples and self.train_limit:
            return min(samples, self.train_limit)
        return samples or self.train_limit or None

    def check(self) -> None:
        """Raise ValueError for a name that is neither a built-in data set nor a FILE.py:function."""
        if self.name not in DATA_SETS and ":" not in self.name:
            raise ValueError(f"data.name={self.name} is unknown; use {', '.join(DATA_SETS)} or FILE.py:function")


@dataclass
class Optim:
    """Settings of the optimizer and the learning rate."""

    name: str = "sgd"
    """sgd is SGD with momentum; adam, adamw and lamb use their standard betas; lars and lamb scale the step of a layer
    by the norm of its weights; FILE.py:Class is a custom subclass of torch.optim.Optimizer."""
    lr: float = between(0, 100, 0.02)
    """Peak learning rate."""
    base_batch: int = at_least(0, 0)
    """Batch size to which `lr` refers: with another batch size lr * batch / base_batch is used (linear scaling rule,
    arXiv 1706.02677). 0 disables scaling."""
    momentum: float = between(0, 0.9999, 0.9)
    """Momentum of sgd and lars; 0 is plain SGD."""
    nesterov: bool = True
    """Use Nesterov momentum in sgd instead of classical momentum."""
    weight_decay: float = between(0, 10, 0)
    """L2 penalty added to the gradient. adamw instead shrinks weights by lr * weight_decay per step; lamb adds it to
    the step before scaling."""
    decayed: Literal["all", "matrices"] = "all"
    """Parameters with weight decay: all, or those with at least two dimensions, which excludes biases and the scales of
    normalisation layers."""
    trust: float = between(0, 1, 0.001)
    """LARS coefficient: maximum step of a layer relative to the norm of its weights, at a learning rate of 1. Biases
    and the scales of normalisation layers take SGD steps at the full rate. If that rate is too high for them, raise
    the coefficient and lower `lr` by the same factor; the steps of all other parameters do not change."""
    warmup: int = at_least(0, 0)
    """Steps during which the learning rate increases linearly to its peak."""
    decay: str = "linear"
    """Learning rate after the warm-up. linear and cosine decay to zero at the end of the run; step multiplies the rate
    by 0.1 after half of the steps and by 0.01 after three quarters. FILE.py:function is a custom schedule:
    function(step, total) returns the factor of the peak rate for step 0 to total - 1, counted after the warm-up."""

    @property
    def tensors_per_parameter(self) -> int:
        """Tensors in the size of the parameters: the parameters, their gradients, and the optimizer state."""
        state = {"sgd": int(self.momentum > 0), "lars": 1}.get(self.name, 2)
        return 2 + state

    def check(self) -> None:
        """Raise ValueError for a name that is neither built in nor given as FILE.py:NAME."""
        if self.name not in OPTIMIZERS and ":" not in self.name:
            raise ValueError(f"optim.name={self.name} is unknown; use {', '.join(OPTIMIZERS)} or FILE.py:Class")
        if self.decay not in DECAYS and ":" not in self.decay:
            raise ValueError(f"optim.decay={self.decay} is unknown; use {', '.join(DECAYS)} or FILE.py:function")


@dataclass
class Log:
    """Settings of terminal output and metrics.jsonl."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of messages shown on the terminal. The files in attempts/*/logs contain all messages."""
    seconds: float = between(0.05, 60, 0.5)
    """Seconds between two writes of metrics. Every step has a row regardless of this value."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """auto draws a progress bar on a terminal and prints lines elsewhere."""


@dataclass
class Wandb:
    """Settings of Weights & Biases."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto is online if an account is configured and reachable, otherwise offline. WANDB_MODE overrides this."""
    project: str = "distributed-experiments"
    """W&B project."""
    entity: str = ""
    """W&B user or team; empty uses the default of the account."""
    group: str = ""
    """W&B group for related runs."""
    tags: list[str] = field(default_factory=list)
    """Additional W&B tags; the experiment, the data set and the world size are always tags."""
    model: bool = True
    """Upload the trained model to W&B as an artifact. The run folder contains it in any case."""
    finish_timeout: float = between(1, 3600, 60)
    """Seconds to wait for W&B after training. Data not uploaded by then stays on disk for `make sync`."""

    def check(self) -> None:
        """Raise ValueError for names that W&B rejects."""
        if not set("/\\#?%:").isdisjoint(self.project) or len(self.project) > 128:
            raise ValueError(f"wandb.project={self.project}: use at most 128 characters and none of / \\ # ? % :")
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise ValueError(f"wandb.tags: {tag!r} has {len(tag)} characters; a tag must have 1 to 64")


@dataclass
class Checkpoint:
    """Settings of saving and resuming."""

    every_seconds: float = between(0, 86_400, 300)
    """Maximum seconds between two checkpoints, and thus the maximum work lost; 0 disables saving by time."""
    every_steps: int = at_least(0, 0)
    """Optimizer steps between two checkpoints; 0 disables saving by steps. If both are 0, only a stop request saves."""
    keep: int = at_least(2, 2)
    """Number of complete checkpoints of a run to keep over all attempts, in addition to the best one. At least 2: if
    the newest is damaged, the previous one is used."""
    best: Literal["none", "test_loss", "test_accuracy"] = "none"
    """Also keep the best checkpoint by this score, saved after each evaluation that improves it."""
    retries: int = between(0, 10, 1)
    """Number of retries after a disk error; after that, training continues without the checkpoint."""
    grace: float = between(1, 3600, 60)
    """Seconds after a stop request within which a process must save and exit; after that it terminates itself. Must
    exceed the time of a step or an evaluation batch plus that of a checkpoint."""
    max_restarts: int = at_least(0, 3)
    """On a cluster, maximum number of consecutive failed attempts without a new checkpoint; after that the job ends."""


@dataclass
class Experiment:
    """Settings of every experiment."""

    trains: ClassVar[bool] = True
    """False if there is neither a model nor data, as in a measurement; settings of training then have no effect."""

    can_mix_devices: ClassVar[bool] = False
    """True if ranks on GPUs and ranks on CPUs can train together."""

    seed: int = at_least(0, 0)
    """Seed of all random choices: initialisation, data order, generated data."""
    epochs: int = at_least(1, 1)
    """Passes over the training set."""
    steps: int = at_least(0, 0)
    """Stop after this number of optimizer steps; 0 runs all epochs."""
    batch: int = at_least(1, 64)
    """Samples per optimizer step over all ranks. The last partial batch of an epoch is dropped."""
    eval_batch: int = at_least(1, 1000)
    """Samples per evaluation batch. The last batch may be smaller: every test sample is evaluated once."""
    dtype: Literal["float32", "float64"] = "float32"
    """Data type of parameters and computation; float64 is for tests of equality."""
    profile: int = at_least(0, 0)
    """Number of steps to record as a Chrome trace per rank, with the ten most expensive operations; 0 records none."""
    runs: str = "runs"
    """Folder that contains the run folders."""
    data: Data = field(default_factory=Data)
    launch: Launch = field(default_factory=Launch)
    optim: Optim = field(default_factory=Optim)
    log: Log = field(default_factory=Log)
    wandb: Wandb = field(default_factory=Wandb)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    def __post_init__(self) -> None:
        if not self.trains:
            self.data.name = "none"

    @property
    def processes(self) -> int:
        """Number of ranks over all hosts."""
        raise NotImplementedError

    @property
    def batch_plan(self) -> BatchPlan:
        """Division of a batch; by default one equal shard per rank."""
        return BatchPlan(self.batch, self.processes)

    @property
    def estimated_parameters(self) -> float:
        """Approximate number of parameters of a ResNet; 0 for other models, which are small."""
        return RESNETS.get(getattr(self, "model", ""), 0)

    @property
    def memory_bytes(self) -> float:
        """Estimated bytes per host: each rank holds all parameters, gradients and optimizer state."""
        ranks_per_host = self.processes // self.launch.nodes
        return ranks_per_host * self.parameter_bytes * self.optim.tensors_per_parameter

    @property
    def parameter_bytes(self) -> float:
        """Estimated bytes of the parameters."""
        return self.estimated_parameters * (8 if self.dtype == "float64" else 4)

    def total_steps(self, epoch_steps: int) -> int:
        """Return the number of optimizer steps of the run; an epoch has `epoch_steps`."""
        total = self.epochs * epoch_steps
        return min(self.steps or total, total)

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError if the model does not accept samples of a shape ([H, W], [C, H, W] or [D])."""
        if len(shape) == 1 and getattr(self, "model", "") in CONVOLUTIONS:
            remedy = "use another data set, or a model for vectors, such as resnet_modelparallel with model=toy"
            raise ValueError(f"data.name={self.data.name}: the model needs images, but the set has vectors; {remedy}")

    def list_paths(self) -> dict[str, str]:
        """Return the files and folders in the settings by dotted name."""
        return {"runs": self.runs, "data.root": self.data.root, "data.cache": self.data.cache}

    def fit_devices(self, gpus: int) -> None:
        """Set values that depend on the GPUs of a local run; called before the run folder is created."""

    def check(self) -> None:
        """Raise ValueError, with a remedy, if settings are incompatible."""
        ranks = self.processes
        if ranks % self.launch.nodes:
            raise ValueError(
                f"{ranks} ranks cannot be divided evenly among launch.nodes={self.launch.nodes}; "
                f"valid numbers of hosts are {list_divisors(ranks)}"
            )
        if not self.runs:
            raise ValueError("runs= is empty; name a folder or omit it")
        if not self.data.cache:
            raise ValueError("data.cache= is empty; name a folder or omit it")
        self.launch.check()
        if self.launch.mixed and not self.can_mix_devices:
            raise ValueError("launch.mixed=true is only available in ddp_multinode and amp_accum; omit it")
        self.wandb.check()
        if self.trains:
            self.check_data()

    def check_data(self) -> None:
        """Raise ValueError, with a remedy, if data, model and batch are incompatible."""
        data = self.data
        data.check()
        self.optim.check()
        if data.name == "vectors":
            self.check_shape((10,))
            if data.augment != "none":
                raise ValueError(
                    f"data.augment={data.augment} needs images, but data.name=vectors has none; omit data.augment"
                )
        if 0 < data.train_limit < self.batch:
            raise ValueError(
                f"data.train_limit={data.train_limit} is smaller than one batch of {self.batch}; "
                "lower batch or raise data.train_limit"
            )
        samples = data.train_samples
        if samples is not None and self.batch > samples:
            raise ValueError(f"batch={self.batch} exceeds the {samples} training samples; lower batch")
