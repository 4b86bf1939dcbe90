"""Images and histograms of a run: files in its folder, listed in media.jsonl for the tracker.

attempts/0001/
  media.jsonl               a line for each: step, name, kind, file
  media/NAME-00000100.png   an image
  media/NAME-00000200.json  a histogram: counts, and the edges of their bins
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.runs.folder import Folder, disk_errors, write_atomic

LIST, FILES = "media.jsonl", "media"
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


def make_media_path(folder: Folder, step: int, name: str, kind: str) -> Path:
    """Return the file for a step and make its folder. Raises ValueError for an invalid name, UserError."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of media: letters, digits, _ . - (at most 64, a letter or digit first)")
    media = folder.attempt / FILES
    with disk_errors(media):
        media.mkdir(exist_ok=True)
    return media / f"{name}-{step:08d}.{kind}"


def write_image(folder: Folder, step: int, name: str, pixels: Tensor) -> None:
    """Write an image [H, W] or [3, H, W], uint8 or floats from 0 to 1, as PNG. Raises ValueError for another shape."""
    from PIL import Image

    if pixels.dim() not in (2, 3) or (pixels.dim() == 3 and len(pixels) != 3):
        raise ValueError(f"an image has shape [H, W] or [3, H, W], {name} has {list(pixels.shape)}")
    values = pixels.detach().cpu()
    if values.is_floating_point():
        values = values.mul(255).round().clamp(0, 255)
    array = values.to(torch.uint8).numpy()
    file = make_media_path(folder, step, name, "png")
    with disk_errors(file):
        Image.fromarray(array if array.ndim == 2 else array.transpose(1, 2, 0).copy()).save(file)
    append_media_entry(folder, step, name, "image", file)


def write_histogram(folder: Folder, step: int, name: str, values: Tensor, bins: int = 64) -> None:
    """Write a histogram of the finite values (any shape): `bins` equal bins between the least and the largest."""
    flat = values.detach().double().flatten().cpu()
    counts, edges = np.histogram(flat[flat.isfinite()].numpy(), bins)
    file = make_media_path(folder, step, name, "json")
    write_atomic(file, json.dumps({"counts": counts.tolist(), "edges": edges.tolist()}) + "\n")
    append_media_entry(folder, step, name, "histogram", file)


def append_media_entry(folder: Folder, step: int, name: str, kind: str, file: Path) -> None:
    """Append the line of a file to media.jsonl."""
    line: dict[str, Any] = {"global_step": step, "name": name, "kind": kind, "file": f"{FILES}/{file.name}"}
    with disk_errors(folder.attempt / LIST), open(folder.attempt / LIST, "a") as listed:
        listed.write(json.dumps(line) + "\n")
