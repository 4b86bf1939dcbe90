"""An image folder as uint8 arrays: train/<class>/* and val/<class>/*, as torchvision's ImageFolder lays them out."""

from __future__ import annotations

import collections
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from common.core import seeds
from common.core.errors import UserError
from common.data.sources import files_below, shown
from common.runs.folder import disk_errors

CLASSES = "classes.json"  # their names, in the order of the labels
LEFT_OUT = "left_out.txt"
SHOWN = 5  # files that a message names
Sample = tuple[str, int]  # a file by its path in train or val, and the number of its class


def write_folder(root: Path, beside: Path, side: int, unreadable: str, seed: int) -> str:
    """Write root/train/<class>/* and root/val/<class>/* as arrays into the folder `beside`.

    uint8 [N, 3, side, side] and labels int32 [N]: the shorter edge is resized to `side`, then the middle cut out.
    The samples come in an order drawn from the seed, so that the first of them are of all classes.
    Returns what was left out: files that are no images by their names and, with `unreadable` = skip, those that cannot
    be read. Else these are refused with a UserError that names them. Where they are many, LEFT_OUT lists them all.
    """
    parts = [listed(root / name) for name in ("train", "val")]
    classes = parts[0][0]
    if classes != parts[1][0]:
        differing = sorted(set(classes) ^ set(parts[1][0]))
        raise UserError(shown(f"{root}/train and val have different classes: {', '.join(differing[:SHOWN])}"))
    check_room(root, beside.parent, sum(len(samples) for _, samples, _ in parts), side)
    with disk_errors(beside.parent):
        (beside / CLASSES).write_text(json.dumps(classes) + "\n")
    broken: list[str] = []
    for part, to, (_, samples, _) in zip(("train", "val"), ("train", "test"), parts, strict=True):
        drawn = [samples[n] for n in seeds.generator(seed, "imagefolder", part).permutation(len(samples))]
        labels: list[int] = []
        with disk_errors(beside.parent), open(beside / f"{to}_images.npy", "wb") as file:
            write_header(file, (len(drawn), 3, side, side))
            for (name, label), (pixels, problem) in zip(drawn, decoded(root / part, drawn, side), strict=True):
                if pixels is None:
                    broken.append(f"{part}/{name} ({problem})")
                else:
                    file.write(pixels.data)
                    labels.append(label)
            file.seek(0)
            write_header(file, (len(labels), 3, side, side))  # as long as before, whatever the number
            np.save(beside / f"{to}_labels.npy", np.asarray(labels, np.int32))
        left = sorted(set(range(len(classes))) - set(labels))
        if left and unreadable == "skip":
            raise UserError(shown(f"no image of {root / part / classes[left[0]]} can be read: {named(broken)}"))
    if broken and unreadable == "refuse":
        raise UserError(f"{named(broken)} cannot be read; mend or remove them, or set data.unreadable=skip")
    others = [f"{part}/{name}" for part, (_, _, names) in zip(("train", "val"), parts, strict=True) for name in names]
    told = [(files, why) for files, why in ((broken, "cannot be read"), (others, "no images by their names")) if files]
    if any(len(files) > SHOWN for files, _ in told):
        lines = [f"{file}: {why}\n" for files, why in told for file in sorted(files)]
        with disk_errors(beside.parent):
            (beside / LEFT_OUT).write_bytes(os.fsencode("".join(lines)))
    return "; ".join(f"left out, {why}: {named(files)}" for files, why in told)


def listed(folder: Path) -> tuple[list[str], list[Sample], list[str]]:
    """The classes, which are the folders here, in order; the images by their names; and all other files.

    Raises UserError where there is no class, or one without an image.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS

    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not classes:
        raise UserError(f"{folder} holds no folders, one for each class, with images in them")
    numbers = {name: number for number, name in enumerate(classes)}
    samples, others = [], []
    for name in files_below(folder):
        label, within, _ = name.partition("/")
        if within and name.lower().endswith(IMG_EXTENSIONS):
            samples.append((name, numbers[label]))
        else:
            others.append(name)
    empty = sorted(set(range(len(classes))) - {number for _, number in samples})
    if empty:
        raise UserError(shown(f"{folder / classes[empty[0]]} holds no image ({', '.join(IMG_EXTENSIONS)}); remove it"))
    return classes, samples, others


def check_room(root: Path, cache: Path, count: int, side: int) -> None:
    """Raise UserError unless the disk takes so many images."""
    needed, free = count * 3 * side * side, shutil.disk_usage(cache).free
    if needed > free:
        raise UserError(
            f"the {count} images of {root} take {needed / 1e6:,.0f} MB in {cache} with data.image_size={side}, and "
            f"{free / 1e6:,.0f} MB are free; lower data.image_size, free space, or set data.cache to a larger disk"
        )


def write_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    """The beginning of a .npy file of uint8; numpy leaves room in it for another first number."""
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})


def decoded(folder: Path, samples: list[Sample], side: int) -> Iterator[tuple[np.ndarray | None, str]]:
    """Each sample's pixels uint8 [3, side, side], or None and the reason, in order; decoded on all cores, few ahead."""
    import torch
    from PIL import Image
    from torchvision.datasets.folder import default_loader
    from torchvision.transforms import v2

    Image.init()  # all formats: several threads that look for one at the same time may miss it
    torch.set_num_threads(1)  # the cores are shared out by image
    decode = v2.Compose([v2.PILToTensor(), v2.Resize(side, antialias=True), v2.CenterCrop(side)])

    def pixels(path: Path) -> tuple[np.ndarray | None, str]:
        try:
            if not path.is_file():  # a link to nowhere, or a pipe that would be waited for
                raise OSError("no file")
            return decode(default_loader(path)).contiguous().numpy(), ""
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 (Pillow raises many kinds for what it cannot read)
            return None, first_line(error, path)

    cores = len(os.sched_getaffinity(0))
    waiting: collections.deque[Future[tuple[np.ndarray | None, str]]] = collections.deque()
    with ThreadPoolExecutor(cores) as pool:
        for name, _ in samples:
            waiting.append(pool.submit(pixels, folder / name))
            if len(waiting) > 4 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def named(files: list[str]) -> str:
    """How many, and the first of them by name."""
    more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
    return shown(f"{len(files)} file{'s' * (len(files) > 1)}: {', '.join(sorted(files)[:SHOWN])}{more}")


def first_line(error: Exception, path: Path) -> str:
    """An error in few words, without the path that is told anyway."""
    words = str(error).replace(repr(str(path)), "it").replace("<_io.BufferedReader name=it>", "it")
    return (words.strip().splitlines() or [type(error).__name__])[0]
