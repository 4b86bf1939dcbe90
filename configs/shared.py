"""Settings that experiments share, with one dataclass per topic. This module imports neither torch nor wandb.

The string below a field is its documentation, which `--help` prints. The `check` methods contain rules that involve
several fields; their error messages include a remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from configs.batch_plan import BatchPlan, list_divisors
from configs.launch import Launch
from configs.ranges import at_least, between, custom_code

__all__ = ["at_least", "between"]

RESNETS = {"resnet18": 11.2e6, "resnet50": 23.5e6, "resnet101": 42.5e6}  # number of parameters at width 64
CONVOLUTIONS = ("convnet", "lenet5", *RESNETS)  # models that require images
DATA_SETS = ("mnist", "digits", "cifar10", "imagefolder", "generated", "vectors")
TRAIN_SAMPLES = {"mnist": 60_000, "digits": 60_000, "cifar10": 50_000}  # data sets of fixed size
OPTIMIZER_CHECKER = "common.training.custom_optimizer:check_optimizer_of_config"
OPTIMIZERS = ("sgd", "adam", "adamw", "lars", "lamb")
DECAYS = ("linear", "cosine", "constant", "step")
TRAINING_KEYS = ("epochs", "batch", "eval_batch", "dtype", "data", "optim")  # keys and groups that only training uses


@dataclass
class Data:
    """Settings for the data set and its loader."""

    name: str = "mnist"
    """Data set: mnist, digits, cifar10, imagefolder, generated, vectors, or a custom data set. imagefolder reads
    root/train/<class>/* and root/val/<class>/*. generated contains random pixels and labels, for measuring throughput
    only. vectors contains samples of 10 numbers in 5 classes. FILE.py:function is a custom data set: function(root)
    returns train images, train labels, test images and test labels as NumPy arrays. Images are uint8 [N, H, W] or [N,
    3, H, W], vectors are uint8 [N, D], and labels start at 0. After a fallback, `data.name` is the name of the data set
    that was used."""
    root: str = "data"
    """Folder with the raw files, in the layout of torchvision. The environment variable DATA_ROOT sets the default.
    With data.name=mnist, a folder other than the default must already exist, and it must contain MNIST unless MNIST can
    be downloaded."""
    cache: str = "data/prepared"
    """Folder for prepared data sets (uint8 arrays). The folder must be writable and visible to all hosts."""
    fallback: Literal["digits", "none"] = "digits"
    """Data set that a local run uses if MNIST is neither in the default `root` nor downloadable. With
    data.fallback=none, the run fails instead."""
    image_size: int = between(8, 1024, 32)
    """Height and width, in pixels, of the color images of imagefolder and generated. The images of imagefolder are
    resized and cropped once, during preparation."""
    samples: int = between(5, 10_000_000, 10_000)
    """Number of training samples of generated and vectors. The number of test samples is a fifth of `samples`."""
    classes: int = between(2, 10_000, 10)
    """Number of classes of the generated data set."""
    download_timeout: float = between(0, 600, 10)
    """Maximum seconds to wait for a download server; 0 disables downloads."""
    block: int = between(1, 100_000, 8)
    """Number of batches that are gathered and normalized in one vectorized operation."""
    augment: Literal["none", "crop", "crop_flip"] = "none"
    """Random augmentation of training images. crop shifts an image by up to an eighth of its side length; crop_flip
    also flips images horizontally, which is not suitable for digits."""
    unreadable: Literal["refuse", "skip"] = "refuse"
    """How to handle imagefolder files that are truncated or are not images. refuse lists these files and fails; skip
    skips these files."""
    workers: int = between(0, 64, 0)
    """Number of data worker processes per rank, which gather and normalize batches in advance. With 0, the rank itself
    prepares its batches. A data worker fails if it is killed or needs more than half of launch.step_timeout for a block
    of batches. A failed data worker ends the run; with `elastic=true`, only the rank of this worker is lost."""
    train_limit: int = at_least(0, 0)
    """Use only this number of training samples, from the start of the data set; 0 uses all samples."""
    test_limit: int = at_least(0, 0)
    """Use only this number of test samples, from the start of the data set; 0 uses all samples."""

    @property
    def train_samples(self) -> int | None:
        """Number of training samples, or None if the number depends on files of the data set."""
        samples = self.samples if self.name in ("generated", "vectors") else TRAIN_SAMPLES.get(self.name)
        if samples and self.train_limit:
            return min(samples, self.train_limit)
        return samples or self.train_limit or None

    def check(self) -> None:
        """Raise ValueError if the name is neither a built-in data set nor of the form FILE.py:function."""
        if self.name not in DATA_SETS and ":" not in self.name:
            raise ValueError(f"data.name={self.name} is unknown; use {', '.join(DATA_SETS)} or FILE.py:function")


@dataclass
class Optim:
    """Settings for the optimizer and the learning rate."""

    name: str = custom_code("sgd", "optimizer", OPTIMIZER_CHECKER)
    """Optimizer. sgd is SGD with momentum. adam, adamw and lamb use their standard betas. lars and lamb scale the step
    of each layer by the norm of the layer's weights. FILE.py:Class is a custom subclass of torch.optim.Optimizer."""
    lr: float = between(0, 100, 0.02)
    """Peak learning rate."""
    base_batch: int = at_least(0, 0)
    """Batch size to which `lr` refers. With a different batch size, the learning rate is lr * batch / base_batch
    (linear scaling rule, arXiv 1706.02677). 0 disables scaling."""
    momentum: float = between(0, 0.9999, 0.9)
    """Momentum of sgd and lars. With a momentum of 0, sgd is plain SGD."""
    nesterov: bool = True
    """Use Nesterov momentum in sgd instead of classical momentum."""
    weight_decay: float = between(0, 10, 0)
    """L2 penalty that is added to the gradient. adamw instead shrinks weights by lr * weight_decay per step; lamb adds
    the penalty to the step before the step is scaled."""
    decayed: Literal["all", "matrices"] = "all"
    """Parameters to which weight decay applies. matrices selects the parameters with at least two dimensions, which
    excludes biases and the scales of normalization layers."""
    trust: float = between(0, 1, 0.001)
    """LARS coefficient: the maximum step of a layer relative to the norm of the layer's weights, at a learning rate of
    1. Biases and the scales of normalization layers take SGD steps at the full learning rate. If `lr` is too high for
    these parameters, raise `trust` and lower `lr` by the same factor. Then only the steps of these parameters
    change."""
    warmup: int = at_least(0, 0)
    """Number of steps during which the learning rate increases linearly to its peak."""
    decay: str = custom_code("linear", "decay", OPTIMIZER_CHECKER)
    """Learning rate schedule after the warm-up. linear and cosine decay to zero at the end of the run. step multiplies
    the peak rate by 0.1 after half of the steps and by 0.01 after three quarters. FILE.py:function is a custom
    schedule: function(step, total) returns the factor that multiplies the peak rate at a step from 0 to total - 1,
    counted after the warm-up."""

    @property
    def tensors_per_parameter(self) -> int:
        """Number of tensors per parameter: the parameter, its gradient and the optimizer state of the same size."""
        state = {"sgd": int(self.momentum > 0), "lars": 1}.get(self.name, 2)
        return 2 + state

    def check(self) -> None:
        """Raise ValueError if a name is neither built in nor of the form FILE.py:NAME."""
        if self.name not in OPTIMIZERS and ":" not in self.name:
            raise ValueError(f"optim.name={self.name} is unknown; use {', '.join(OPTIMIZERS)} or FILE.py:Class")
        if self.decay not in DECAYS and ":" not in self.decay:
            raise ValueError(f"optim.decay={self.decay} is unknown; use {', '.join(DECAYS)} or FILE.py:function")


@dataclass
class Log:
    """Settings for terminal output and metrics.jsonl."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of messages that the terminal shows. The log files in attempts/*/logs contain all messages."""
    seconds: float = between(0.05, 60, 0.5)
    """Seconds between two writes to metrics.jsonl. The file contains a row for every step, regardless of
    `log.seconds`."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """Display of progress. auto draws a progress bar on a terminal and prints lines elsewhere."""


@dataclass
class Wandb:
    """Settings for Weights & Biases (W&B)."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """W&B mode. auto is online if an account is configured and the W&B server is reachable, and otherwise offline. The
    environment variable WANDB_MODE overrides `wandb.mode`."""
    project: str = "distributed-experiments"
    """W&B project of the run."""
    entity: str = ""
    """W&B user or team. An empty value uses the default of the account."""
    group: str = ""
    """W&B group that related runs share."""
    tags: list[str] = field(default_factory=list)
    """Additional W&B tags. The experiment, the data set and the world size are always added as tags."""
    model: bool = True
    """Upload the trained model to W&B as an artifact. The run folder always contains the model."""
    finish_timeout: float = between(1, 3600, 60)
    """Maximum seconds to wait for W&B after training. Data that has not been uploaded by then stays on disk for `make
    sync`."""

    def check(self) -> None:
        """Raise ValueError for names that W&B rejects."""
        if not set("/\\#?%:").isdisjoint(self.project) or len(self.project) > 128:
            raise ValueError(f"wandb.project={self.project} must have at most 128 characters and none of / \\ # ? % :")
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise ValueError(f"wandb.tags: {tag!r} has {len(tag)} characters; a tag must have 1 to 64")


@dataclass
class Checkpoint:
    """Settings for saving and resuming."""

    every_seconds: float = between(0, 86_400, 300)
    """Maximum seconds between two checkpoints, and thus the maximum training time lost; 0 disables saving by time."""
    every_steps: int = at_least(0, 0)
    """Number of optimizer steps between two checkpoints; 0 disables saving by steps. If every_steps and every_seconds
    are both 0, a checkpoint is saved only after a stop request."""
    keep: int = at_least(2, 2)
    """Number of complete checkpoints of a run to keep across all attempts, in addition to the best one. The minimum is
    2, so that the previous checkpoint can be used if the newest one is damaged."""
    best: Literal["none", "test_loss", "test_accuracy"] = "none"
    """Also keep the checkpoint with the best value of this score. The checkpoint is saved after each evaluation that
    improves the score."""
    retries: int = between(0, 10, 1)
    """Number of retries after a disk error. If all retries fail, training continues without the checkpoint."""
    grace: float = between(1, 3600, 60)
    """Maximum seconds between a stop request and the exit of a process. A process that does not exit within
    `checkpoint.grace` seconds terminates itself. The value must exceed the time of a step or an evaluation batch plus
    the time of a checkpoint."""
    max_restarts: int = at_least(0, 3)
    """On a cluster, the maximum number of consecutive failed attempts without a new checkpoint. If more attempts fail,
    the job ends."""


@dataclass
class Experiment:
    """Settings that every experiment has."""

    trains: ClassVar[bool] = True
    """Whether the experiment trains a model. A pure measurement has no model and ignores the settings for training."""

    can_mix_devices: ClassVar[bool] = False
    """Whether ranks on GPUs and ranks on CPUs can train together."""

    ranks_have_separate_models: ClassVar[bool] = False
    """Whether a checkpoint contains a model per rank, so that only the same number of ranks can resume from it."""

    smallest_settings: ClassVar[tuple[str, ...]] = ("batch=16",)
    """Settings that make a run small, for `make tour`."""

    seed: int = at_least(0, 0)
    """Seed of all random choices: initialization, data order and generated data."""
    epochs: int = at_least(1, 1)
    """Number of passes over the training set."""
    steps: int = at_least(0, 0)
    """Stop after this number of optimizer steps; 0 runs all epochs."""
    batch: int = at_least(1, 64)
    """Number of samples per optimizer step, over all ranks. The last partial batch of an epoch is dropped."""
    eval_batch: int = at_least(1, 1000)
    """Number of samples per evaluation batch. The last batch may be smaller, because every test sample is evaluated
    once."""
    dtype: Literal["float32", "float64"] = "float32"
    """Data type of parameters and computation. float64 is intended for tests that compare results."""
    profile: int = at_least(0, 0)
    """Number of steps to profile; 0 disables profiling. Each rank writes a Chrome trace and lists the ten most
    expensive operations."""
    runs: str = "runs"
    """Folder that contains all run folders."""
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
        """Division of a batch into shards and microbatches. By default, each rank gets an equal shard."""
        return BatchPlan(self.batch, self.processes)

    @property
    def estimated_parameters(self) -> float:
        """Approximate number of parameters of a ResNet, or 0 for other models, which are small."""
        return RESNETS.get(getattr(self, "model", ""), 0)

    @property
    def memory_bytes(self) -> float:
        """Estimated memory per host in bytes. Each rank holds all parameters, gradients and optimizer state."""
        ranks_per_host = self.processes // self.launch.nodes
        return ranks_per_host * self.parameter_bytes * self.optim.tensors_per_parameter

    @property
    def parameter_bytes(self) -> float:
        """Estimated size of the parameters in bytes."""
        return self.estimated_parameters * (8 if self.dtype == "float64" else 4)

    def compute_total_steps(self, epoch_steps: int) -> int:
        """Return the number of optimizer steps of the run, from the number of steps per epoch."""
        total = self.epochs * epoch_steps
        return min(self.steps or total, total)

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError if the model does not accept samples of this shape: [H, W], [C, H, W] or [D]."""
        if len(shape) == 1 and getattr(self, "model", "") in CONVOLUTIONS:
            remedy = "use another data set, or a model for vectors, such as resnet_modelparallel with model=toy"
            raise ValueError(f"data.name={self.data.name} contains vectors, but the model needs images; {remedy}")

    def list_paths(self) -> dict[str, str]:
        """Return the files and folders that settings refer to, by the dotted name of the setting."""
        return {"runs": self.runs, "data.root": self.data.root, "data.cache": self.data.cache}

    def adapt_to_gpus(self, gpus: int) -> None:
        """Set values that depend on the number of GPUs.

        A local run calls this method before the run folder is created.
        """

    def check(self) -> None:
        """Raise ValueError if settings are incompatible. The error message includes a remedy."""
        ranks = self.processes
        if ranks % self.launch.nodes:
            raise ValueError(
                f"{ranks} ranks cannot be divided evenly among launch.nodes={self.launch.nodes}; "
                f"valid numbers of hosts are {list_divisors(ranks)}"
            )
        if not self.runs:
            raise ValueError("runs= must not be empty; name a folder or omit runs")
        if not self.data.cache:
            raise ValueError("data.cache= must not be empty; name a folder or omit data.cache")
        self.launch.check()
        if self.launch.mixed and not self.can_mix_devices:
            raise ValueError("launch.mixed=true is available only in ddp_multinode and amp_accum; omit launch.mixed")
        self.wandb.check()
        if self.trains:
            self.check_data()

    def check_data(self) -> None:
        """Raise ValueError if data, model and batch are incompatible. The error message includes a remedy."""
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
