"""Reading and writing of a run's trained model: model.safetensors and model.json.

Other programs can read both files without this project. model.safetensors contains parameters and buffers under the
names of the unsplit model, regardless of the stages, shards and replicas that were used for training. model.json
contains the model's class and constructor arguments, the preprocessing of the inputs, the class names in the order of
the outputs, and the test scores.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.config.lookup import import_object
from common.data.prepare import hash_file
from common.models import networks
from common.models.networks import Recipe
from common.models.sample_dropout import add_dropout, get_dropout
from common.runs.folder import MODEL_FACTS_FILE, MODEL_FILE, RunFolder, read_json, write_json
from common.system.errors import UserError
from configs.shared import InitialWeights

FORMAT = 1
REQUIRED_FACTS = {"class", "arguments", "step", "shape", "dtype", "precision", "channels_last", "shares"}


def write_model(folder: RunFolder, state: Mapping[str, Tensor], recipe: Recipe, facts: Mapping[str, Any]) -> None:
    """Write a run's model to model.safetensors and model.json, each atomically.

    Boolean tensors that a model built from the recipe does not have are omitted, because they are masks that only
    training needs. The recipe is omitted from model.json if such a model has other tensors than `state`, for example
    because the experiment has added a layer. Raises OSError if a file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    rebuilt: dict[str, torch.Size] | None = None
    is_known = "file" in recipe or networks.find_kind(recipe["class"]) is not None
    if recipe["arguments"] is not None and is_known:
        model = build_model(recipe, torch.device("meta"), folder.path / "code")
        rebuilt = get_tensor_shapes(networks.list_saved_tensors(model))
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.dtype != torch.bool or name in (rebuilt or {}):
            tensors[name] = tensor.detach().cpu().contiguous()
    if rebuilt not in (None, get_tensor_shapes(tensors)):
        recipe = {"class": None, "arguments": None}

    # Write a new file first, and rename it when it is complete.
    draft = folder.path / f".{MODEL_FILE}.new"
    try:
        try:
            save_file(tensors, draft, metadata={"format": "pt"})
        except SafetensorError as error:  # for example, because the disk is full
            raise OSError(str(error)) from None
        draft.chmod(folder.path.stat().st_mode & 0o666)  # safetensors grants access to the owner only
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        content = {"format": FORMAT, "sha256": hash_file(draft)} | recipe | dict(facts)
        draft.replace(folder.path / MODEL_FILE)
        write_json(folder.path / MODEL_FACTS_FILE, content)
    finally:
        if draft.exists():  # on a read-only disk, the deletion of a missing file would hide the first error
            draft.unlink()


def get_tensor_shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of the tensors in a state dict, by name."""
    return {name: tensor.shape for name, tensor in state.items()}


def read_model(folder: RunFolder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content of model.json and the tensors of model.safetensors.

    Raises UserError if the files are missing or damaged.
    """
    file = folder.path / MODEL_FILE
    facts_file = folder.path / MODEL_FACTS_FILE
    facts = read_json(facts_file)
    if not file.is_file() and not facts:
        raise UserError(f"{folder.path} has no {MODEL_FILE}{explain_missing_model(folder)}")
    is_complete = isinstance(facts.get("scores"), dict) and facts.keys() >= REQUIRED_FACTS
    if facts.get("format") != FORMAT or not is_complete:
        raise UserError(f"{facts_file} is missing, damaged or from another version of this project; restore the file")
    try:
        if hash_file(file) != facts.get("sha256"):
            raise UserError(
                f"{file} is damaged: its checksum differs from the checksum in {MODEL_FACTS_FILE}; restore the file"
            )
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    return facts, read_safetensors(file)


def explain_missing_model(folder: RunFolder) -> str:
    """Return the reason why a run has no model, and a remedy.

    The text is the end of an error message that starts with the path of the run.
    """
    state = folder.result.get("state")
    run = shlex.quote(folder.reference)
    if state == "failed":
        return f": the run failed; find the cause with make doctor RUN={run}, then resume with make exp RESUME={run}"
    if state != "finished":
        return (
            f" yet: the run has not finished; check the state of the run with make status RUN={run}; "
            f"if the run has stopped, resume with make exp RESUME={run}"
        )
    if not folder.result.get("scores"):
        return f": {folder.experiment} does not train a model; use another run"
    problem = "its model was deleted or could not be written"
    return f": {problem}; start a new run, whose initial weights can be a checkpoint: weights=CHECKPOINT_FOLDER"


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises UserError if the file cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as a safetensors file ({error})") from None


def build_model(recipe: Mapping[str, Any], device: torch.device | None = None, code: Path | None = None) -> nn.Module:
    """Build the untrained model that a recipe describes.

    `code` is the source folder of the run, which contains the file of a custom network. A custom network is built on
    the CPU instead of `device`. Raises UserError if the recipe is invalid.
    """
    name = recipe.get("class")
    arguments = recipe.get("arguments")
    if "file" in recipe and code is not None:
        return import_object("common.models.custom_network:rebuild_custom_network")(recipe, code)
    kind = networks.find_kind(str(name))
    if kind is None:
        raise UserError(
            f"the network {name or 'of this run'} is not in common/models/networks.py; "
            "to evaluate or export it, add its class to this file and to KINDS"
        )
    if not isinstance(arguments, dict):
        raise UserError(
            f"{MODEL_FACTS_FILE} lacks the constructor arguments of {name}; "
            'add them, for example "arguments": {"width": 128}'
        )
    try:
        with device or torch.device("cpu"):
            return kind(**arguments)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{MODEL_FACTS_FILE}: {kind.__name__} cannot be built from {arguments} ({error})") from None


def load_model(folder: RunFolder) -> tuple[dict[str, Any], nn.Module]:
    """Return the content of model.json and the trained model of a run.

    The model is in eval mode and has the same dtype as during training. Raises UserError if the model cannot be loaded.
    """
    facts, state = read_model(folder)
    model = build_model(facts, torch.device("meta"), folder.path / "code")
    try:
        if "file" in facts:
            model.to(getattr(torch, facts["dtype"]))
            import_object("common.models.weights:load_weights")(model, state, MODEL_FILE)
        else:
            model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{folder.path / MODEL_FILE} does not match {MODEL_FACTS_FILE}: {reason}") from None
    return facts, model.eval().requires_grad_(False)


# ---- initial weights


def load_initial_weights(model: nn.Module, weights: str, runs: str) -> None:
    """Load the weights that the setting `weights` refers to into a model.

    If the setting is none, the model is unchanged. The model may be on any device and have any dtype. Raises UserError
    if the weights are invalid or do not match.
    """
    if weights != "none":
        import_object("common.models.weights:load_weights_of_setting")(model, weights, Path(runs))


class ModelSettings(Protocol):
    """Settings of a network and its initial weights."""

    @property
    def model(self) -> str: ...
    @property
    def initial(self) -> InitialWeights: ...
    @property
    def runs(self) -> str:
        """Folder that contains all run folders."""
        ...

    @property
    def seed(self) -> int: ...


def init_network(cfg: ModelSettings, shape: Sequence[int], classes: int) -> Any:
    """Build the network cfg.model and load the initial weights that cfg.initial.weights refers to.

    `shape` is the shape of one image: [H, W] or [C, H, W]. If `dropout` is not 0, a SampleDropout layer is inserted
    before the last layer. Raises UserError if the weights do not match the network.
    """
    model = networks.build_network(cfg.model, shape, classes)
    load_initial_weights(model, cfg.initial.weights, cfg.runs)
    return add_dropout(model, get_dropout(cfg), cfg.seed)
