"""Settings that experiments share, with one dataclass per topic. This module imports neither torch nor wandb.

`Experiment` contains the settings of every run, and `TrainingExperiment` adds those of runs that train a model. The
string below a field is its documentation, which `--help` prints. The `check` methods contain rules for several fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

from configs import networks
from configs.batch_plan import BatchPlan, check_sample_count
from configs.data_rules import TRAIN_SAMPLES, check_data
from configs.fields import MAX_NOTES_LENGTH, at_least, between, custom_code, file_path, short_text
from configs.launch_rules import check_launch
from configs.strategies import Tables

OPTIMIZER_CHECKER = "common.training.custom_optimizer:check_optimizer_of_config"
OPTIMIZERS = ("sgd", "adam", "adamw", "lars", "lamb")
DECAYS = ("linear", "cosine", "constant", "step")


@dataclass(frozen=True)
class Launch:
    """Settings for the ranks of a run: hosts, devices and communication."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. auto uses one GPU per rank if there are enough GPUs, otherwise the CPU."""
    backend: Literal["auto", "builtin"] = "auto"
    """Communication backend. auto selects nccl on GPUs and gloo on CPUs. builtin is the torch.distributed backend for
    CPUs that this project implements (common/backend)."""
    algorithm: str = custom_code(
        "ring", "algorithm", "common.backend.algorithms:check_algorithm_of_config", rank_0_only=True
    )
    """All-reduce algorithm of the built-in backend: ring, halving_doubling, tree, star, sharded_star, or two_level
    (which sends the fewest bytes between hosts). Algorithms can be combined by message size: tree<65536<ring uses tree
    for small messages and ring for messages of at least 65,536 bytes. auto measures the links once, chooses such a
    combination and stores it in resolved.yaml. With more than 256 ranks, auto excludes ring and sharded_star, because
    these algorithms have too many transfers to simulate. FILE.py:function is a custom algorithm:
    function(ranks) returns one list per rank, which contains tuples (action, chunk, peer). The action is 'send',
    'receive' or 'add'.
    The command `python -m common.backend.algorithms` prints the transfers of an algorithm."""
    transport: Literal["auto", "network"] = "auto"
    """Transport of the built-in backend between ranks of a host. auto uses shared memory; network uses sockets."""
    tls: bool = False
    """Encrypt the sockets of the built-in backend with TLS 1.3. Every rank must present the certificate of the current
    attempt, which is created with the openssl program. All hosts must share the run folder, because the ranks use it
    for the rendezvous."""
    mixed: bool = False
    """Train with ranks on GPUs and ranks on CPUs together. On each host, the first ranks get one GPU each, and the
    remaining ranks use the CPU. gloo communicates through host memory, so GPUs of different vendors can be combined."""
    nodes: int = at_least(1, 1)
    """Number of hosts. A run on a single machine simulates this number of hosts and divides the ranks among the
    simulated hosts."""
    threads: int = between(0, 1024, 0)
    """Number of CPU threads per rank. 0 uses the number of CPUs that SLURM assigned to the rank or, without SLURM, the
    number of allowed cores divided by the number of ranks on the host."""
    interface: str = ""
    """Network interface for communication between hosts. If no interface is set, hosts use the interface with the route
    to rank 0."""
    setup_timeout: float = between(1, 3600, 60)
    """Maximum seconds that a rank may take to connect. The limit also applies to ranks that an elastic run restarts."""
    step_timeout: float = between(1, 3600, 120)
    """Maximum duration of one message or collective during training, in seconds. A data worker may use half of
    launch.step_timeout to prepare a block of batches."""

    @property
    def excludes_gpus(self) -> bool:
        """Whether these settings exclude the use of GPUs."""
        return self.device == "cpu" or self.backend == "builtin"


@dataclass(frozen=True)
class Log:
    """Settings for terminal output and metrics.jsonl."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of messages that the terminal shows. The log files in attempts/*/logs contain all messages."""
    seconds: float = between(0.05, 60, 0.5)
    """Seconds between two writes to metrics.jsonl, which contains a row for every step."""
    gradient_norm: Literal["auto", "true", "false"] = field(default="auto", metadata={"needs_model": True})
    """Whether to log the Euclidean norm of the gradients of each step, before clipping. auto logs the norm if clipping
    computes it. true always computes the norm. In pipelines, the norm includes the gradients of all stages. With local
    SGD and a parameter server, the value is the mean of the workers' norms, unless the servers clip gradients."""
    memory: int = field(default=0, metadata={"low": 0, "needs_model": True})
    """Step of each attempt in which each rank measures the bytes of its training state, activations and messages. If
    the attempt has fewer steps, the last one is measured. With 0, only scripts that report memory measure step 1."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """Display of progress. auto draws a progress bar on a terminal and prints lines elsewhere."""


@dataclass(frozen=True)
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
    """Maximum seconds to wait for W&B after training. Data not uploaded by then stays on disk for `make sync`."""

    def check(self) -> None:
        """Raise ValueError for names that W&B rejects."""
        if not set("/\\#?%:").isdisjoint(self.project) or len(self.project) > 128:
            raise ValueError(f"wandb.project={self.project} must have at most 128 characters and none of / \\ # ? % :")
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise ValueError(f"wandb.tags: {tag!r} has {len(tag)} characters; a tag must have 1 to 64")


@dataclass(frozen=True)
class Description:
    """Settings that describe a run to people. They have no effect on training."""

    name: str = short_text(64)
    """Name of the run in `make status`, in `make compare` and in W&B. The name need not be unique, and commands do not
    accept it in place of the id."""
    notes: str = short_text(MAX_NOTES_LENGTH)
    """Notes about the run, such as its purpose. `make note` changes the notes later."""


@dataclass(frozen=True)
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
    best: Literal["none", "test_loss", "test_accuracy"] = field(default="none", metadata={"needs_model": True})
    """Also keep the checkpoint with the best value of this score. The checkpoint is saved after each evaluation that
    improves the score."""
    retries: int = between(0, 10, 1)
    """Number of retries after a disk error. If all retries fail, training continues without the checkpoint."""
    grace: float = between(1, 3600, 60)
    """Maximum seconds between the first stop signal and the exit of a process. A process that does not exit within
    `checkpoint.grace` seconds terminates itself. The value must exceed the time of a step or an evaluation batch plus
    the time of a checkpoint."""
    max_restarts: int = at_least(0, 3)
    """On a cluster, the maximum number of consecutive failed attempts without a new checkpoint. If more attempts fail,
    the job ends."""


@dataclass(frozen=True)
class Experiment(Tables):
    """Settings of every run. A pure measurement has only these settings and its own."""

    can_mix_devices: ClassVar[bool] = False
    """Whether ranks on GPUs and ranks on CPUs can take part in the same run."""

    smallest_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that make a run small, for `make tour`."""

    rank_settings: ClassVar[str] = "processes_per_node"
    """Settings that determine the number of ranks, as messages name them."""

    seed: int = at_least(0, 0)
    """Seed of all random choices of a run: initialization and data order. Generated data does not depend on it."""
    steps: int = at_least(0, 0)
    """Stop after this number of steps; 0 runs all steps."""
    profile: int = at_least(0, 0)
    """Number of steps to profile; 0 disables profiling. Each rank writes a Chrome trace and lists the ten most
    expensive operations."""
    runs: str = file_path("runs")
    """Folder that contains all run folders."""
    launch: Launch = field(default_factory=Launch)
    log: Log = field(default_factory=Log)
    wandb: Wandb = field(default_factory=Wandb)
    run: Description = field(default_factory=Description)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    @property
    def processes(self) -> int:
        """Number of ranks over all hosts."""
        raise NotImplementedError

    def compute_total_steps(self, epoch_steps: int) -> int:
        """Return the number of steps of the run, from the number of steps per epoch."""
        raise NotImplementedError

    def adapt_to_gpus(self, gpus: int) -> Self:
        """Return the config of a local run on a machine with this number of GPUs."""
        return self

    def check(self) -> None:
        """Raise ValueError if settings are incompatible. The error message includes a remedy."""
        if not self.runs:
            raise ValueError("runs= must not be empty; name a folder or omit runs")
        check_launch(vars(self.launch), self.processes, can_mix_devices=self.can_mix_devices)
        self.wandb.check()


@dataclass(frozen=True)
class Data:
    """Settings for the data set and its loader."""

    name: str = "mnist"
    """Data set: mnist, digits, cifar10, imagefolder, generated, vectors, text, or a custom data set. imagefolder reads
    root/train/<class>/* and root/val/<class>/*. generated contains random pixels and labels, for measuring throughput
    only. vectors contains samples of 10 numbers in 5 classes, and text samples of `data.context` tokens.
    FILE.py:function is a custom data set: function(root) returns four NumPy arrays (train inputs, train targets, test
    inputs, test targets) or two map-style data sets. After a fallback, resolved.yaml names the data set that was
    used."""
    root: str = file_path("data")
    """Folder with the raw files, in the layout of torchvision. DATA_ROOT sets the default if the YAML file sets none.
    With data.name=mnist, a folder other than the default must already exist, and it must contain MNIST unless MNIST can
    be downloaded. For text, a UTF-8 file or folder; none selects the source of Python's standard library."""
    cache: str = file_path("data/prepared")
    """Folder for prepared data sets (uint8 arrays). The folder must be writable and visible to all hosts."""
    fallback: Literal["digits", "none"] = "digits"
    """Data set that a local run uses if MNIST is neither in `root` nor downloadable. none: the run fails."""
    image_size: int = between(8, 1024, 32)
    """Height and width, in pixels, of the images of imagefolder (resized and cropped once) and of generated."""
    context: int = between(2, 65_536, 128)
    """Number of tokens in a sample of text."""
    tokenizer: str = file_path("none")
    """File tokenizer.json of the library tokenizers, for text. none uses the bytes of the text as tokens."""
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
    """How to handle unreadable files of imagefolder: refuse lists these files and fails; skip skips these files."""
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
        """Raise ValueError for an unknown data set, or for settings that do not apply to the data set."""
        check_data(self.name, self.cache, self.augment, self.tokenizer)


@dataclass(frozen=True)
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
    """Learning rate schedule after the warm-up. constant keeps the peak rate. linear and cosine decay to zero at the
    end of the run. step multiplies the peak rate by 0.1 after half of the steps and by 0.01 after three quarters.
    FILE.py:function is a custom schedule: function(step, total) returns the factor that multiplies the peak rate at a
    step from 0 to total - 1, counted after the warm-up."""

    def check(self) -> None:
        """Raise ValueError if a name is neither built in nor of the form FILE.py:NAME."""
        if self.name not in OPTIMIZERS and ":" not in self.name:
            raise ValueError(f"optim.name={self.name} is unknown; use {', '.join(OPTIMIZERS)} or FILE.py:Class")
        if self.decay not in DECAYS and ":" not in self.decay:
            raise ValueError(f"optim.decay={self.decay} is unknown; use {', '.join(DECAYS)} or FILE.py:function")


@dataclass(frozen=True)
class Regularization:
    """Settings of every experiment that trains, for clipping gradients and for dropout."""

    clip: float = between(0, 1e6, 0)
    """Maximum gradient norm; 0 disables clipping. The norm is the Euclidean norm over the gradients of all parameters,
    for the whole batch."""
    dropout: float = between(0, 0.95, 0)
    """Dropout probability for the inputs of the last layer. The dropout mask of a sample depends only on the sample's
    position in the epoch, so the division into shards and microbatches does not change the result."""


@dataclass(frozen=True)
class InitialWeights:
    """Settings for models that can start from trained weights."""

    weights: str = file_path("none")
    """Initial weights of the model: a file, a checkpoint folder, or the id of a run. The parameter names in a file are
    those of this project or of torchvision. none initializes the weights randomly."""


@dataclass(frozen=True)
class Sweep:
    """Settings for experiments that have a sweep grid in configs/sweeps."""

    sweep: bool = False
    """Run a grid of settings with one run per point, then write a table, a CSV file and a plot."""
    repeats: int = between(1, 100, 3)
    """Number of runs per point of a sweep. Each round of a sweep runs every point once, so that disturbances affect all
    points equally."""


@dataclass(frozen=True)
class TrainingExperiment(Experiment):
    """Settings of every run that trains a model."""

    smallest_settings: ClassVar[tuple[str, ...]] = ("batch=16",)

    ranks_have_separate_models: ClassVar[bool] = False
    """Whether a checkpoint contains a model per rank, so that only the same number of ranks can resume from it."""

    splits_network: ClassVar[bool] = False
    """Whether the network is split into stages, so that a custom network must be an nn.Sequential."""

    loss: str = networks.loss_field()
    """Loss for training and evaluation. cross_entropy needs class labels; mse, the mean squared error, needs float
    targets. FILE.py:function is a custom loss: function(outputs, targets) returns a tensor [N], one loss per sample."""
    epochs: int = at_least(1, 1)
    """Number of passes over the training set. `steps` can end the run earlier."""
    batch: int = at_least(1, 64)
    """Number of samples per optimizer step, over all ranks. A last partial batch is dropped by default."""
    eval_batch: int = at_least(1, 1000)
    """Number of samples per evaluation batch. The last batch may be smaller, because every test sample is evaluated
    once."""
    evaluate_every: int = at_least(0, 0)
    """Also evaluate the model after every multiple of this number of steps; 0 evaluates after each epoch only."""
    dtype: Literal["float32", "float64"] = "float32"
    """Data type of parameters and computation. float64 is intended for tests that compare results."""
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)

    @property
    def batch_plan(self) -> BatchPlan:
        """Division of a batch into shards and microbatches. By default, each rank gets an equal shard."""
        return BatchPlan(self.batch, self.processes)

    @property
    def estimated_parameters(self) -> float:
        """Approximate number of parameters of a ResNet, or 0 for models that are small or custom."""
        return networks.RESNETS.get(getattr(self, "model", ""), 0)

    @property
    def replicas_per_host(self) -> float:
        """Number of model replicas that the ranks of one host hold together. By default, each rank holds one."""
        return self.processes / self.launch.nodes

    def check_vocabulary(self, size: int) -> None:
        """Raise ValueError if the model cannot have a vocabulary of this size."""

    def compute_total_steps(self, epoch_steps: int) -> int:
        total = self.epochs * epoch_steps
        return min(self.steps or total, total)

    def check(self) -> None:
        super().check()
        data = self.data
        data.check()
        self.optim.check()
        networks.check_samples(getattr(self, "model", ""), data.name)
        check_sample_count(self.batch, data.train_limit, data.train_samples)
