"""The trained model of a run, in two files that do not need this project: model.safetensors and model.json.

model.safetensors contains parameters and buffers under the names of the unsplit model, regardless of the stages, shards
and replicas of training. model.json contains the model's constructor, the normalisation of its inputs, and its scores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.checkpoint import checkpointer
from common.checkpoint.storage import CheckpointPath, InvalidCheckpoint
from common.core.errors import UserError
from common.data.prepare import hash_file
from common.models import networks, pruning_masks
from common.models.initial_weights import find_weights
from common.models.networks import Recipe
from common.models.sample_dropout import add_dropout
from common.runs.folder import MODEL_FACTS_FILE, MODEL_FILE, RunFolder, read_json, write_json

FORMAT = 1
REQUIRED_FACTS = {"class", "arguments", "step", "shape", "dtype", "precision", "channels_last", "shares"}


def write_model(folder: RunFolder, state: Mapping[str, Tensor], recipe: Recipe, facts: Mapping[str, Any]) -> None:
    """Write both files, each atomically, without pruning masks. Raises OSError.

    A recipe that builds other tensors than the model has, for example because a layer was added, is not written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.rpartition(".")[2] != pruning_masks.MASK:
            tensors[name] = tensor.detach().cpu().contiguous()
    if recipe["arguments"] is not None and recipe["class"] in networks.KINDS:
        rebuilt = build_model(recipe, torch.device("meta")).state_dict()
        if list_shapes(rebuilt) != list_shapes(tensors):
            recipe = {"class": None, "arguments": None}
    draft = folder.path / f".{MODEL_FILE}.new"
    try:
        try:
            save_file(tensors, draft, metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk
            raise OSError(str(error)) from None
        draft.chmod(folder.path.stat().st_mode & 0o666)  # the library grants access to the owner only
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        content = {"format": FORMAT, "sha256": hash_file(draft)} | recipe | dict(facts)
        draft.replace(folder.path / MODEL_FILE)
        write_json(folder.path / MODEL_FACTS_FILE, content)
    finally:
        draft.unlink(missing_ok=True)


def list_shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of the tensors of a state dict."""
    return {name: tensor.shape for name, tensor in state.items()}


def read_model(folder: RunFolder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return model.json and the tensors of a run's model.

    Raises UserError if they are missing or damaged.
    """
    file = folder.path / MODEL_FILE
    facts_file = folder.path / MODEL_FACTS_FILE
    facts = read_json(facts_file)
    if not file.is_file() and not facts:
        raise UserError(f"{folder.path} has no {MODEL_FILE}{explain_missing_model(folder)}")
    is_complete = isinstance(facts.get("scores"), dict) and facts.keys() >= REQUIRED_FACTS
    if facts.get("format") != FORMAT or not is_complete:
        raise UserError(f"{facts_file} is missing, damaged or from another version; restore it")
    try:
        if hash_file(file) != facts.get("sha256"):
            raise UserError(f"{file} is damaged: its checksum differs from the one in {MODEL_FACTS_FILE}; restore it")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    return facts, read_safetensors(file)


def explain_missing_model(folder: RunFolder) -> str:
    """Return why a run has no model, with the remedy."""
    state = folder.result.get("state")
    run = folder.reference
    if state == "failed":
        return f": it failed; make doctor RUN={run} finds the cause, then resume with make exp RESUME={run}"
    if state != "finished":
        return f" yet: it has not finished; check make status RUN={run}; if it has stopped, make exp RESUME={run}"
    if not folder.result.get("scores"):
        return f": {folder.experiment} trains no model; use another run"
    return f": it was made by an older version; resume it with make exp RESUME={folder.path.name}"


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises UserError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a safetensors file ({error})") from None


def build_model(recipe: Mapping[str, Any], device: torch.device | None = None) -> nn.Module:
    """Build the untrained model that a recipe describes. Raises UserError for an unknown model."""
    name = recipe.get("class")
    arguments = recipe.get("arguments")
    kind = networks.KINDS.get(str(name))
    if kind is None:
        raise UserError(
            f"the network {name or 'of this run'} is not in common/models/networks.py; "
            "add it there and to KINDS to evaluate or export it"
        )
    if not isinstance(arguments, dict):
        raise UserError(
            f"{MODEL_FACTS_FILE} lacks the constructor arguments of {name}; "
            'add them, such as "arguments": {"width": 128}'
        )
    try:
        with device or torch.device("cpu"):
            return kind(**arguments)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{MODEL_FACTS_FILE}: {kind.__name__} cannot be built from {arguments} ({error})") from None


def load_model(folder: RunFolder) -> tuple[dict[str, Any], nn.Module]:
    """Return model.json and the trained model of a run, in eval mode and in its dtype.

    Raises UserError.
    """
    facts, state = read_model(folder)
    model = build_model(facts, torch.device("meta"))
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"{folder.path / MODEL_FILE} does not match {MODEL_FACTS_FILE}: {reason}") from None
    return facts, model.eval().requires_grad_(False)


# ---- initial weights


def load_initial_weights(model: nn.Sequential, weights: str, runs: str) -> None:
    """Load the weights named by `weights=` into a model of any device and dtype, unless none.

    Raises UserError.
    """
    if weights != "none":
        networks.load_weights(model, read_weights(weights, Path(runs)), weights)


class ModelSettings(Protocol):
    """Settings that name a network and its initial weights, such as configs.optional.InitialWeights."""

    @property
    def model(self) -> str: ...
    @property
    def weights(self) -> str: ...
    @property
    def runs(self) -> str: ...
    @property
    def seed(self) -> int: ...


def init_network(cfg: ModelSettings, shape: Sequence[int], classes: int) -> nn.Sequential:
    """Build cfg.model for images of one shape ([H, W] or [C, H, W]), with the weights that cfg.weights names.

    If cfg has `dropout`, inputs of the last layer are dropped by masks that depend on the samples.
    Raises UserError if the weights do not match.
    """
    model = networks.build_network(cfg.model, shape, classes)
    load_initial_weights(model, cfg.weights, cfg.runs)
    return add_dropout(model, getattr(cfg, "dropout", 0.0), cfg.seed)


def read_weights(text: str, runs: Path) -> Mapping[str, Any]:
    """Return the state dict that `weights=` names: a run, a checkpoint folder, or a file of safetensors or torch.save.

    Raises UserError if it does not exist or cannot be read.
    """
    path = find_weights(text, runs)
    if (path / "config.yaml").is_file():
        _, tensors = read_model(RunFolder(path.absolute()))
        return tensors
    if path.is_dir():
        return read_model_of_checkpoint(path, text)
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    problem = f"weights={text}: not a state dict"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 (torch raises many types, and recommends an unsafe load)
        raise UserError(f"{problem}: expected a file written by torch.save that contains only tensors") from None
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise UserError(f"{problem}: expected a tensor for each name")
    return state


def read_model_of_checkpoint(path: Path, text: str) -> dict[str, Tensor]:
    """Return the model in a checkpoint folder, such as runs/<id>/attempts/0001/checkpoints/step-00000100.

    Raises UserError.
    """
    try:
        path = path.absolute()
        attempt_number = int(path.parents[1].name)
        step = int(path.name.removeprefix("step-"))
        attempt = RunFolder(path.parents[3], attempt_number)
        return checkpointer.read_full_model(CheckpointPath(attempt, step))
    except (ValueError, IndexError):
        raise UserError(f"weights={text}: neither a run folder nor a checkpoint folder of a run") from None
    except InvalidCheckpoint as reason:
        raise UserError(f"weights={text}: invalid checkpoint: {reason}") from None
