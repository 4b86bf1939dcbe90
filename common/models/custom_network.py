"""Custom networks: construction of the class that a user's file defines.

This module imports torch only to build a network, so that commands can import the module quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config.custom_function import convert_errors_of_user_file, load_function
from common.system.errors import UserError

if TYPE_CHECKING:
    from torch import nn

ALTERNATIVES = "the built-in networks"
USAGE = "Class(shape, outputs) must return an nn.Module; shape is the shape of one input, outputs the number of outputs"


def build_custom_network(value: str, shape: Sequence[int], outputs: int) -> nn.Module:
    """Build the network `FILE.py:Class` for inputs [N, *shape].

    `outputs` is the number of classes or, if the targets are no class labels, the number of values in a target. Raises
    UserError, with file and line, if the class cannot be constructed.
    """
    from torch import nn

    kind = load_function("model", value, ALTERNATIVES, "Class")
    with convert_errors_of_user_file("model", value, vars(kind).get("__init__"), USAGE):
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError("the class is not a subclass of torch.nn.Module")
        network: nn.Module = kind(tuple(shape), outputs)
        arguments = {"shape": list(shape), "outputs": outputs}
        file = Path(value.rpartition(":")[0]).name
        setattr(network, "recipe", {"class": kind.__name__, "arguments": arguments, "file": file})  # noqa: B010
    return network


def rebuild_custom_network(recipe: Mapping[str, Any], code: Path) -> nn.Module:
    """Build the network that a recipe of `build_custom_network` describes, from the copy in a run's source folder.

    Raises UserError if the copy does not exist or the class cannot be constructed.
    """
    file = code / "own" / Path(str(recipe["file"])).name
    if not file.is_file():
        raise UserError(f"{file} is missing; restore this file, which defines the network {recipe['class']}")
    arguments = recipe["arguments"]
    return build_custom_network(f"{file}:{recipe['class']}", arguments["shape"], arguments["outputs"])
