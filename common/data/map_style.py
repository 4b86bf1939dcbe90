"""Map-style custom data sets, whose samples are read on demand because they do not fit into memory.

The user's function returns two objects, for training and test, with `__len__` and either `__getitem__(index)` or
`get(index, generator)`. The generator is a torch.Generator for the random choices of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config.custom_function import convert_errors_of_user_file, load_function
from common.data import own_data, sources
from common.data.prepare import PreparedDataset
from common.data.samples import Images
from common.runs.folder import read_json
from common.system.errors import UserError
from common.system.seeds import derive_seed

CHECKED_SAMPLES = 3  # number of samples of each part that are read before a run starts


def read_sample(dataset: Any, index: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the input and the target of a sample. `seed` determines the random choices of `get(index, generator)`.

    Raises TypeError or ValueError if the sample is not a pair of a float input and a target.
    """
    has_get = hasattr(dataset, "get")
    sample = dataset.get(index, torch.Generator().manual_seed(seed)) if has_get else dataset[index]
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        described = own_data.describe_type(sample)
        raise TypeError(f"sample {index} is {described}; return a tuple (input, target)")
    x, y = torch.as_tensor(sample[0]), torch.as_tensor(sample[1])
    if not x.is_floating_point():
        raise ValueError(f"the input of sample {index} has dtype {x.dtype}; return float32 values")
    return x.float(), y.float() if y.is_floating_point() else y.long()


def describe_datasets(datasets: Sequence[Any], function: str) -> dict[str, Any]:
    """Check the first samples of two map-style data sets, and return a description as values for JSON.

    `function` is the name of the function that returned the data sets. Raises TypeError or ValueError if the data sets
    are unsuitable for training.
    """
    examples = {}
    for part, dataset in zip(("train", "test"), datasets, strict=True):
        examples[part] = check_dataset(part, dataset)
    (x, y), (test_x, test_y) = examples["train"], examples["test"]
    if x.shape != test_x.shape or y.shape != test_y.shape or y.dtype != test_y.dtype:
        train_shapes = f"{list(x.shape)} and {list(y.shape)} ({y.dtype})"
        test_shapes = f"{list(test_x.shape)} and {list(test_y.shape)} ({test_y.dtype})"
        problem = f"the train input and target have shape {train_shapes}, but those of the test set {test_shapes}"
        raise ValueError(f"{problem}; the shapes and types must be equal")
    names = None
    kind = "floats"
    if not y.is_floating_point():
        kind = "integers" if y.dim() else "labels"
        names = getattr(datasets[0], "classes", None)
        if not isinstance(names, Sequence) or not names:
            raise ValueError("the targets are integers: set `classes` of the train data set to the list of class names")
    return {
        "function": function,
        "train": len(datasets[0]),
        "test": len(datasets[1]),
        "shape": list(x.shape),
        "outputs": len(names) if names else y.numel(),
        "class_names": [str(name) for name in names] if names else None,
        "target_kind": kind,
    }


def check_dataset(part: str, dataset: Any) -> tuple[Tensor, Tensor]:
    """Check the first samples of the part `train` or `test`, and return the input and the target of the first sample.

    Raises TypeError or ValueError if the data set is unsuitable for training.
    """
    name = f"the {part} data set"
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{name} has no __len__; return a map-style torch.utils.data.Dataset with __len__")
    if not (hasattr(dataset, "get") or hasattr(dataset, "__getitem__")):
        raise TypeError(f"{name} has neither __getitem__(index) nor get(index, generator); define one of them")
    if len(dataset) < 1:
        raise ValueError(f"{name} is empty")
    first = read_sample(dataset, 0, 0)
    for index in range(min(CHECKED_SAMPLES, len(dataset))):
        x, y = read_sample(dataset, index, index)
        again = read_sample(dataset, index, index)
        if x.shape != first[0].shape or y.shape != first[1].shape or y.dtype != first[1].dtype:
            raise ValueError(f"{name}: the samples 0 and {index} have different shapes or types; return equal shapes")
        if not (x.isfinite().all() and y.isfinite().all()):
            raise ValueError(f"{name}: sample {index} contains NaN or infinity; remove such samples")
        if not (torch.equal(x, again[0]) and torch.equal(y, again[1])):
            remedy = "define get(index, generator), and draw all random numbers from the generator"
            raise ValueError(f"{name} returned two different values for sample {index}; {remedy}")
    return first


class MapSamples(Images):
    """The training or test part of a map-style data set, with the interface of `Images`."""

    reads_on_demand = True
    has_pixels = False

    def __init__(self, prepared: PreparedDataset, part: str, limit: int = 0) -> None:
        """Call the user's function, and use the first `limit` samples; 0 uses all samples.

        Raises UserError if the data set has changed since it was prepared.
        """
        facts = prepared.description
        assert facts is not None
        self.value = f"{prepared.path / sources.SOURCE_FILE}:{facts['function']}"
        function = load_function("data.name", self.value, own_data.SET_NAMES)
        self.displayed_file = Path(prepared.name.rpartition(":")[0])
        with convert_errors_of_user_file("data.name", self.value, function, own_data.USAGE, self.displayed_file):
            root = read_json(prepared.path / sources.ROOT_FILE).get("root") or facts["root"]  # as in older descriptions
            self.dataset = function(Path(root))[part == "test"]
            count = len(self.dataset)
        if count != facts[part]:
            problem = f"the {part} data set has {count} samples, but had {facts[part]} when it was prepared"
            raise UserError(f"data.name={prepared.name}: {problem}; delete {prepared.path} to prepare it again")
        self.count = min(count, limit or count)
        self.sample_shape = torch.Size(facts["shape"])
        self.outputs = facts["outputs"]
        self.has_labels = facts["target_kind"] == "labels"
        self.read_slice = lru_cache(maxsize=1)(self._read_slice)  # an evaluation loads the inputs and then the targets

    def __len__(self) -> int:
        return self.count

    @property
    def shape(self) -> torch.Size:
        """Shape of one input."""
        return self.sample_shape

    def read_samples(
        self, rows: Sequence[int], seeds: Sequence[int], device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs and the targets of samples [n, ...] on a device. Targets are int64 or `dtype`.

        `seeds` determine the random choices of the samples. Raises UserError if a sample cannot be read.
        """
        inputs, targets = self._read_samples(rows, seeds)
        return inputs.to(device, dtype), targets.to(device, dtype if targets.is_floating_point() else torch.int64)

    def _read_samples(self, rows: Sequence[int], seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
        inputs: list[Tensor] = []
        targets: list[Tensor] = []
        method = getattr(type(self.dataset), "get", None) or getattr(type(self.dataset), "__getitem__", None)
        with convert_errors_of_user_file("data.name", self.value, method, displayed_file=self.displayed_file):
            for row, seed in zip(rows, seeds, strict=True):
                x, y = read_sample(self.dataset, row, seed)
                if x.shape != self.sample_shape:
                    problem = f"the input of sample {row} has shape {list(x.shape)}"
                    raise ValueError(f"{problem}; expected {list(self.sample_shape)}, as in the first sample")
                if self.has_labels and not 0 <= y < self.outputs:
                    raise ValueError(f"the label of sample {row} is {int(y)}; expected 0 to {self.outputs - 1}")
                if not (x.isfinite().all() and y.isfinite().all()):
                    raise ValueError(f"sample {row} contains NaN or infinity; remove such samples")
                inputs.append(x)
                targets.append(y)
            if not inputs:  # the shard of a rank may be empty
                target = read_sample(self.dataset, 0, 0)[1]
                return torch.empty(0, *self.sample_shape), target.new_empty(0, *target.shape)
            return torch.stack(inputs), torch.stack(targets)

    def _read_slice(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        rows = range(start, stop)
        return self._read_samples(rows, [derive_seed(0, "sample", row) for row in rows])

    def _read(self, index: Tensor | slice) -> tuple[Tensor, Tensor]:
        if isinstance(index, slice):
            start, stop, _ = index.indices(self.count)
            return self.read_slice(start, stop)
        rows = index.tolist()
        return self._read_samples(rows, [derive_seed(0, "sample", row) for row in rows])

    def load_inputs(self, index: Tensor | slice, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the inputs at `index` on the device, as [n, ...]."""
        return self._read(index)[0].to(device, dtype, copy=True)

    def load_targets(self, index: Tensor | slice, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the targets at `index` on the device, as int64 or, for float targets, as `dtype`."""
        targets = self._read(index)[1]
        return targets.to(device, dtype if targets.is_floating_point() else torch.int64)
