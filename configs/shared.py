"""Settings that several experiments share, one dataclass for each concern. Imports neither torch nor wandb.

The string under a field is its documentation: `--help` prints it. `check` methods hold the rules that span several
fields and name the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from configs.batch_plan import BatchPlan, list_divisors
from configs.launch import Launch
from configs.ranges import at_least, between

__all__ = ["at_least", "between"]

RESNETS = {"resnet18": 11.2e6, "resnet50": 23.5e6, "resnet101": 42.5e6}  # parameters, of width 64
CONVOLUTIONS = ("convnet", "lenet5", *RESNETS)  # models that take images only
DATA_SETS = ("mnist", "digits", "cifar10", "imagefolder", "generated", "vectors")
TRAIN_SAMPLES = {"mnist": 60_000, "digits": 60_000, "cifar10": 50_000}  # where they are known beforehand
OPTIMIZERS = ("sgd", "adam", "adamw", "lars", "lamb")
DECAYS = ("linear", "cosine", "constant", "step")
OF_TRAINING = ("epochs", "batch", "eval_batch", "dtype", "data", "optim")  # settings and groups that need a model


@dataclass
class Data:
    """Settings of the data set and of its loader."""

    name: str = "mnist"
    """mnist, digits, cifar10; imagefolder reads root/train/<class>/* and root/val/<class>/*; generated is random pixels
    and labels, for throughput only; vectors are 10 numbers in 5 classes; FILE.py:function is a set of your own:
    function(root) returns train images, train labels, test images, test labels as NumPy arrays, of images uint8
    [N, H, W] or [N, 3, H, W], or vectors uint8 [N, D], and labels from 0. After a fallback this names the set that was
    really used."""
    root: str = "data"
    """Folder with the raw files, as torchvision lays them out. The variable DATA_ROOT sets the default; another one
    has to exist for mnist, and mnist has to be there or downloadable."""
    cache: str = "data/prepared"
    """Folder for prepared sets (uint8 arrays). Writable, and visible from every node."""
    fallback: Literal["digits", "none"] = "digits"
    """What a local run takes when MNIST is neither in the default `root` nor downloadable; `none` refuses instead."""
    image_size: int = between(8, 1024, 32)
    """Side in pixels of the colour images of imagefolder (resized and cropped once, when prepared) and generated."""
    samples: int = between(5, 10_000_000, 10_000)
    """Training samples of generated and vectors; they have a fifth as many test samples."""
    classes: int = between(2, 10_000, 10)
    """Classes of generated."""
    download_timeout: float = between(0, 600, 10)
    """Seconds to wait for a download server; 0 never downloads."""
    block: int = between(1, 100_000, 8)
    """Batches that are gathered and normalised in one vectorised step."""
    augment: Literal["none", "crop", "crop_flip"] = "none"
    """How training images change by chance: shifted by up to an eighth of their side; also mirrored (no digits)."""
    unreadable: Literal["refuse", "skip"] = "refuse"
    """What to do with files of imagefolder that are no images or cut off: name and refuse them, or go on without."""
    workers: int = between(0, 64, 0)
    """Processes beside each rank that gather and normalise batches ahead; 0 does it in the rank. One has failed
    if it is killed, or makes no block of batches within half of launch.step_timeout. A failed data worker ends the run;
    with `elastic=true` only its rank is lost."""
    train_limit: int = at_least(0, 0)
    """Number of training samples to use, the first ones; 0 uses all."""
    test_limit: int = at_least(0, 0)
    """Number of test samples to use, the first ones; 0 uses all."""

    @property
    def train_samples(self) -> int | None:
        """Return the samples of the training part, where the settings tell."""
        held = self.samples if self.name in ("generated", "vectors") else TRAIN_SAMPLES.get(self.name)
        return min(held, self.train_limit) if held and self.train_limit else held or self.train_limit or None

    def check(self) -> None:
        """Raise ValueError for a name that is neither a set nor looks like a function of a file."""
        if self.name not in DATA_SETS and ":" not in self.name:
            raise ValueError(f"data.name={self.name} is unknown; use {', '.join(DATA_SETS)} or FILE.py:function")


@dataclass
class Optim:
    """Settings of the optimizer and of the learning rate."""

    name: str = "sgd"
    """sgd is SGD with momentum; adam, adamw and lamb have their usual betas; lars and lamb set a layer's step in
    proportion to its weights; FILE.py:Class is a subclass of torch.optim.Optimizer of your own."""
    lr: float = between(0, 100, 0.02)
    """Peak learning rate."""
    base_batch: int = at_least(0, 0)
    """The batch that `lr` is meant for: with another batch, lr * batch / base_batch is used (linear scaling rule, arXiv
    1706.02677). 0 does not scale."""
    momentum: float = between(0, 0.9999, 0.9)
    """Momentum of sgd and lars; 0 is plain SGD."""
    nesterov: bool = True
    """Whether the momentum of sgd is Nesterov's; else the classical one."""
    weight_decay: float = between(0, 10, 0)
    """L2 penalty added to the gradient; with adamw, weights shrink by lr * weight_decay a step instead; lamb adds it to
    the step before that is scaled."""
    decayed: Literal["all", "matrices"] = "all"
    """Which parameters have weight decay: all, or those of two dimensions and more, which leaves biases and the scales
    of normalisation out."""
    trust: float = between(0, 1, 0.001)
    """LARS coefficient: the largest step of a layer, by the norm of its weights, at a learning rate of 1. Biases and
    the scales of normalisation take steps of SGD at the full rate; where that is too high for them, a larger
    coefficient and a smaller `lr` leave the steps of the others as they are."""
    warmup: int = at_least(0, 0)
    """Steps in which the learning rate rises to its peak in equal parts."""
    decay: str = "linear"
    """Learning rate after the warm-up: linear and cosine fall to zero at the end of the run; step is a tenth after half
    of the steps and a hundredth after three quarters; with FILE.py:function it is function(step, total), the factor
    of the peak in a step, from 0, of as many as are left after the warm-up."""

    @property
    def tensors_per_parameter(self) -> int:
        """Return the number of tensors as large as the parameters: these, gradients, and the optimizer's state."""
        return 2 + {"sgd": int(self.momentum > 0), "lars": 1}.get(self.name, 2)

    def check(self) -> None:
        """Raise ValueError for a name that is neither built in nor looks like one of a file."""
        if self.name not in OPTIMIZERS and ":" not in self.name:
            raise ValueError(f"optim.name={self.name} is unknown; use {', '.join(OPTIMIZERS)} or FILE.py:Class")
        if self.decay not in DECAYS and ":" not in self.decay:
            raise ValueError(f"optim.decay={self.decay} is unknown; use {', '.join(DECAYS)} or FILE.py:function")


@dataclass
class Log:
    """Settings of the screen and of metrics.jsonl."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is told on the screen; the files under attempts/*/logs hold everything."""
    seconds: float = between(0.05, 60, 0.5)
    """Seconds between two writes of metrics; every step has its row all the same."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """auto draws a bar on a terminal and prints plain lines elsewhere."""


@dataclass
class Wandb:
    """Settings of Weights & Biases."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto is online with an account that can be reached, else offline. WANDB_MODE goes first."""
    project: str = "distributed-experiments"
    """W&B project."""
    entity: str = ""
    """W&B user or team; empty takes the account's default."""
    group: str = ""
    """W&B group, to set related runs side by side."""
    tags: list[str] = field(default_factory=list)
    """Extra W&B tags, beside the experiment, the data set and the world size."""
    model: bool = True
    """Whether W&B gets the trained model as an artifact; it lies in the run folder in any case."""
    finish_timeout: float = between(1, 3600, 60)
    """Seconds to wait for W&B after training; what is missing by then stays on disk for `make sync`."""

    def check(self) -> None:
        """Raise ValueError for names that W&B would not take, online or offline."""
        bad = [c for c in "/\\#?%:" if c in self.project]
        if bad or len(self.project) > 128:
            raise ValueError(f"wandb.project={self.project}: at most 128 characters, and none of / \\ # ? % :")
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise ValueError(f"wandb.tags: {tag!r} has {len(tag)} characters; a tag has 1 to 64")


@dataclass
class Checkpoint:
    """Settings of saving and resuming."""

    every_seconds: float = between(0, 86_400, 300)
    """Seconds from one save to the next; 0 goes by steps alone. That much work is lost at worst."""
    every_steps: int = at_least(0, 0)
    """Optimizer steps from one save to the next; 0 goes by seconds alone. With both at 0 only a stop request saves."""
    keep: int = at_least(2, 2)
    """Complete checkpoints of a run that stay on disk, beside the best one, over all its attempts. At least 2: should
    the newest be damaged, the one before it is used."""
    best: Literal["none", "test_loss", "test_accuracy"] = "none"
    """Save after every evaluation in which this is better than ever before, and keep that until a better one comes."""
    retries: int = between(0, 10, 1)
    """How often writing is tried again after an error of the disk, before training goes on without."""
    grace: float = between(1, 3600, 60)
    """Seconds after a stop request until a process that has not saved and left ends itself. Longer than a step, or an
    evaluation batch, and a checkpoint take."""
    max_restarts: int = at_least(0, 3)
    """On a cluster, attempts in a row that may fail without a new checkpoint before the job is given up."""


@dataclass
class Experiment:
    """Settings of every experiment."""

    trains: ClassVar[bool] = True
    """False where there is neither model nor data, as in a measurement: settings of training then mean nothing."""

    joins_devices: ClassVar[bool] = False
    """True where ranks on GPUs and on CPUs can train together."""

    seed: int = at_least(0, 0)
    """Seed of every random choice: initialisation, data order, generated data."""
    epochs: int = at_least(1, 1)
    """Passes over the training set."""
    steps: int = at_least(0, 0)
    """Number of optimizer steps after which to stop; 0 runs all epochs."""
    batch: int = at_least(1, 64)
    """Samples in one optimizer step, over all ranks together. The last partial batch of an epoch is left out."""
    eval_batch: int = at_least(1, 1000)
    """Samples in one evaluation batch. The last one may be smaller: every test sample counts once."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of parameters and arithmetic; float64 is for proofs of equality."""
    profile: int = at_least(0, 0)
    """Number of steps to write as a Chrome trace per rank, with the ten costliest operations; 0 writes none."""
    runs: str = "runs"
    """Folder that receives the run folders."""
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
        """Return the number of ranks that the run needs, over all hosts."""
        raise NotImplementedError

    @property
    def batch_plan(self) -> BatchPlan:
        """Return how a batch is divided; every rank takes a shard unless an experiment says otherwise."""
        return BatchPlan(self.batch, self.processes)

    @property
    def estimated_parameters(self) -> float:
        """Return the approximate number of parameters of a ResNet; 0 for other models, which are small."""
        return RESNETS.get(getattr(self, "model", ""), 0)

    @property
    def memory_bytes(self) -> float:
        """Return the bytes of parameters, gradients and optimizer of a host's ranks, which all hold the whole model."""
        return self.processes // self.launch.nodes * self.parameter_bytes * self.optim.tensors_per_parameter

    @property
    def parameter_bytes(self) -> float:
        """Return the bytes of the model's parameters."""
        return self.estimated_parameters * (8 if self.dtype == "float64" else 4)

    def total_steps(self, epoch_steps: int) -> int:
        """Return the optimizer steps of the whole run, where an epoch has `epoch_steps`."""
        return min(self.steps or self.epochs * epoch_steps, self.epochs * epoch_steps)

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError where the model does not take samples of a shape ([H, W], [C, H, W] or [D])."""
        if len(shape) == 1 and getattr(self, "model", "") in CONVOLUTIONS:
            remedy = "use another set or model, such as resnet_modelparallel with model=toy"
            raise ValueError(f"data.name={self.data.name}: the model takes images, and this set has vectors; {remedy}")

    def list_paths(self) -> dict[str, str]:
        """Return the files and folders that the settings name, by setting."""
        return {"runs": self.runs, "data.root": self.data.root, "data.cache": self.data.cache}

    def fit_devices(self, gpus: int) -> None:
        """Choose what depends on the GPUs that a local start sees; called before the run folder is made."""

    def check(self) -> None:
        """Raise ValueError, with the remedy, where fields do not fit together."""
        if self.processes % self.launch.nodes:
            what = f"{self.processes} ranks cannot be shared evenly by launch.nodes={self.launch.nodes}"
            raise ValueError(f"{what}; valid node counts are {list_divisors(self.processes)}")
        for name, folder in (("runs", self.runs), ("data.cache", self.data.cache)):
            if not folder:
                raise ValueError(f"{name}= is empty; name a folder, or leave it out")
        self.launch.check()
        if self.launch.mixed and not self.joins_devices:
            raise ValueError("launch.mixed=true is for ddp_multinode and amp_accum; leave it out")
        self.wandb.check()
        if self.trains:
            self.check_data()

    def check_data(self) -> None:
        """Raise ValueError, with the remedy, where data, model and batch do not fit together."""
        self.data.check()
        self.optim.check()
        if self.data.name == "vectors":
            self.check_shape((10,))
        if self.data.name == "vectors" and self.data.augment != "none":
            what = f"data.augment={self.data.augment} changes images, and data.name=vectors has none"
            raise ValueError(f"{what}; leave data.augment out")
        held = self.data.train_samples
        if 0 < self.data.train_limit < self.batch:
            what = f"data.train_limit={self.data.train_limit} holds no full batch of {self.batch}"
            raise ValueError(f"{what}; lower batch or raise data.train_limit")
        if held is not None and self.batch > held:
            raise ValueError(f"batch={self.batch} exceeds the {held} training samples; lower batch")
