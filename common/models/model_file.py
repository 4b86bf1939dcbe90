"""The trained model of a run, in two files that need nothing of this project: model.safetensors and model.json.

model.safetensors holds parameters and buffers under the names of the unsplit model, whatever stages, shards and
replicas it was trained in. model.json holds what builds that model, the normalisation of its inputs, and its scores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.checkpoint import checkpointer, storage
from common.checkpoint.storage import CheckpointPath, InvalidCheckpoint
from common.core.errors import UserError
from common.data.prepare import hash_file
from common.models import networks, pruning_masks
from common.models.initial_weights import find_weights
from common.models.networks import Recipe
from common.models.sample_dropout import add_dropout
from common.runs.folder import MODEL, MODEL_FACTS, Folder, read_json, write_json

FORMAT = 1
NEEDED = {"class", "arguments", "step", "shape", "dtype", "precision", "channels_last", "shares"}  # in model.json


def write_model(folder: Folder, state: Mapping[str, Tensor], recipe: Recipe, facts: Mapping[str, Any]) -> None:
    """Write both files, each atomically, without the masks of pruning. Raises OSError.

    A recipe of KINDS that builds other tensors than the model has, as where a layer was added to it, is not written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    kept = {name: value for name, value in state.items() if name.rpartition(".")[2] != pruning_masks.MASK}
    if recipe["arguments"] is not None and recipe["class"] in networks.KINDS:
        built = build_model(recipe, torch.device("meta")).state_dict()
        if {name: value.shape for name, value in built.items()} != {name: value.shape for name, value in kept.items()}:
            recipe = {"class": None, "arguments": None}
    tensors = {name: value.detach().cpu().contiguous() for name, value in kept.items()}
    draft = folder.path / f".{MODEL}.new"
    try:
        try:
            save_file(tensors, draft, metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk
            raise OSError(str(error)) from None
        draft.chmod(folder.path.stat().st_mode & 0o666)  # the library gives access to the owner only
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        own = {"format": FORMAT, "sha256": hash_file(draft)} | recipe
        draft.replace(folder.path / MODEL)
        write_json(folder.path / MODEL_FACTS, own | dict(facts))
    finally:
        draft.unlink(missing_ok=True)


def read_model(folder: Folder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return model.json and the tensors of a run's model. Raises UserError if they are missing or damaged."""
    file, facts = folder.path / MODEL, read_json(folder.path / MODEL_FACTS)
    if not file.is_file() and not facts:
        state, run = folder.result.get("state"), folder.reference
        if state == "failed":
            told = f"make doctor RUN={run} finds why, and make exp RESUME={run} goes on with it"
            raise UserError(f"{folder.path} has no {MODEL}: it failed; {told}")
        if state != "finished":
            told = (
                f"make status RUN={run} tells how it is doing, and make exp RESUME={run} goes on with one that is over"
            )
            raise UserError(f"{folder.path} has no {MODEL} yet: it has not finished; {told}")
        if not folder.result.get("scores"):
            raise UserError(f"{folder.path} has no {MODEL}: {folder.experiment} trains no model; name another run")
        told = f"{folder.path} has no {MODEL}: it is of an older version"
        raise UserError(f"{told}; train it on with make exp RESUME={folder.path.name}")
    if facts.get("format") != FORMAT or not isinstance(facts.get("scores"), dict) or not facts.keys() >= NEEDED:
        raise UserError(f"{folder.path / MODEL_FACTS} is missing, damaged or of another version; bring it back")
    try:
        if hash_file(file) != facts.get("sha256"):
            raise UserError(f"{file} is damaged: it has another checksum than {MODEL_FACTS} says; bring it back")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    return facts, read_safetensors(file)


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises UserError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a safetensors file ({error})") from None


def build_model(recipe: Mapping[str, Any], device: torch.device | None = None) -> nn.Module:
    """Build the model that a recipe describes, untrained. Raises UserError for an unknown model."""
    name, arguments = recipe.get("class"), recipe.get("arguments")
    kind = networks.KINDS.get(str(name))
    if kind is None:
        told = "add it there and to KINDS to evaluate or export it"
        raise UserError(f"the network {name or 'of this run'} is not in common/models/networks.py; {told}")
    if not isinstance(arguments, dict):
        told = 'write the constructor\'s there, such as "arguments": {"width": 128}'
        raise UserError(f"{MODEL_FACTS} does not say with which arguments {name} was built; {told}")
    try:
        with device or torch.device("cpu"):
            return kind(**arguments)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{MODEL_FACTS}: {kind.__name__} cannot be built from {arguments} ({error})") from None


def load_model(folder: Folder) -> tuple[dict[str, Any], nn.Module]:
    """Return model.json and the trained model of a run, in eval mode and in its dtype. Raises UserError."""
    facts, state = read_model(folder)
    model = build_model(facts, torch.device("meta"))
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise UserError(
            f"{folder.path / MODEL} does not fit {MODEL_FACTS}: {str(error).splitlines()[-1].strip()}"
        ) from None
    return facts, model.eval().requires_grad_(False)


# ---- initial weights


def load_initial_weights(model: nn.Sequential, weights: str, runs: str) -> None:
    """Load what `weights=` names into a model of any device and dtype; none leaves it as it is. Raises UserError."""
    if weights != "none":
        networks.load_weights(model, read_weights(weights, Path(runs)), weights)


class ModelSettings(Protocol):
    """Settings that name a network and the weights it begins with, as those of configs.optional.InitialWeights."""

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

    Where cfg has `dropout`, inputs of the last layer are dropped by masks that follow from the samples.
    Raises UserError where they do not fit.
    """
    model = networks.build_network(cfg.model, shape, classes)
    load_initial_weights(model, cfg.weights, cfg.runs)
    return add_dropout(model, getattr(cfg, "dropout", 0.0), cfg.seed)


def read_weights(text: str, runs: Path) -> Mapping[str, Any]:
    """Return the state dict that `weights=` names: a run, a checkpoint folder, or a file of safetensors or torch.save.

    Raises UserError if there is none or it cannot be read.
    """
    path = find_weights(text, runs)
    if (path / "config.yaml").is_file():
        return read_model(Folder(path.absolute()))[1]
    if path.is_dir():
        return read_model_of_checkpoint(path, text)
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 (torch raises many kinds, and advises an unsafe load)
        raise UserError(
            f"weights={text}: not a file that torch.save wrote of tensors alone; name a state dict"
        ) from None
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"weights={text}: holds no state dict, which has a tensor for each name")
    return found


def read_model_of_checkpoint(path: Path, text: str) -> dict[str, Tensor]:
    """Return the model in a checkpoint folder, such as runs/<id>/attempts/0001/checkpoints/step-00000100.

    Raises UserError.
    """
    try:
        path = path.absolute()
        checkpoint = CheckpointPath(
            Folder(path.parents[3], int(path.parents[1].name)), int(path.name.removeprefix("step-"))
        )
        return checkpointer.read_full_model(checkpoint)
    except (ValueError, IndexError):
        raise UserError(f"weights={text}: neither a run folder nor a checkpoint folder of one") from None
    except InvalidCheckpoint as reason:
        raise UserError(f"weights={text}: {storage.MANIFEST} and its files are not sound: {reason}") from None
