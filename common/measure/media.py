"""Images and histograms that a run logs.

Each image or histogram is stored as a file in the run folder. media.jsonl lists the files for the W&B tracker.

attempts/0001/
  media.jsonl               one line per file: step, name, kind, file
  media/NAME-00000100.png   an image
  media/NAME-00000200.json  a histogram: the counts and the edges of the bins
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.runs.folder import RunFolder, convert_disk_errors, write_atomic

LIST = "media.jsonl"
FOLDER = "media"
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


def make_media_path(folder: RunFolder, step: int, name: str, kind: str) -> Path:
    """Return the path of a new image or histogram, and create its folder.

    Raises ValueError if the name is invalid, and UserError if the folder cannot be created.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"invalid name {name!r}: use at most 64 letters, digits, underscores, dots and hyphens, and start with "
            "a letter or digit"
        )
    media = folder.attempt_folder / FOLDER
    with convert_disk_errors(media):
        media.mkdir(exist_ok=True)
    return media / f"{name}-{step:08d}.{kind}"


def write_image(folder: RunFolder, step: int, name: str, pixels: Tensor) -> None:
    """Write an image to a PNG file, and add the file to media.jsonl.

    `pixels` is a tensor [H, W] or [3, H, W], with uint8 values or with floating-point values from 0 to 1. Raises
    ValueError for any other shape.
    """
    from PIL import Image

    if pixels.dim() not in (2, 3) or (pixels.dim() == 3 and len(pixels) != 3):
        raise ValueError(f"{name}: an image must have shape [H, W] or [3, H, W], got {list(pixels.shape)}")
    values = pixels.detach().cpu()
    if values.is_floating_point():
        values = values.mul(255).round().clamp(0, 255)
    values = values.to(torch.uint8)
    if values.dim() == 3:  # Pillow expects [H, W, 3]
        values = values.permute(1, 2, 0).contiguous()
    file = make_media_path(folder, step, name, "png")
    with convert_disk_errors(file):
        Image.fromarray(values.numpy()).save(file)
    append_media_entry(folder, step, name, "image", file)


def write_histogram(folder: RunFolder, step: int, name: str, values: Tensor, bins: int = 64) -> None:
    """Write a histogram of the finite values in a tensor to a JSON file.

    The file is added to media.jsonl. The tensor may have any shape. The histogram has `bins` bins of equal width from
    the minimum to the maximum.
    """
    flat = values.detach().double().flatten().cpu()
    counts, edges = np.histogram(flat[flat.isfinite()].numpy(), bins)
    file = make_media_path(folder, step, name, "json")
    write_atomic(file, json.dumps({"counts": counts.tolist(), "edges": edges.tolist()}) + "\n")
    append_media_entry(folder, step, name, "histogram", file)


def append_media_entry(folder: RunFolder, step: int, name: str, kind: str, file: Path) -> None:
    """Append one line to media.jsonl: the step, name, kind and path of a file."""
    entry: dict[str, Any] = {"global_step": step, "name": name, "kind": kind, "file": f"{FOLDER}/{file.name}"}
    path = folder.attempt_folder / LIST
    with convert_disk_errors(path), open(path, "a") as stream:
        stream.write(json.dumps(entry) + "\n")
