"""Built-in data sets, and rules for the settings of the group `data`."""

from __future__ import annotations

DATA_SETS = ("mnist", "digits", "cifar10", "imagefolder", "generated", "vectors", "text")
TRAIN_SAMPLES = {"mnist": 60_000, "digits": 60_000, "cifar10": 50_000}  # data sets of fixed size
DATA_SETS_WITHOUT_IMAGES = ("vectors", "text")


def check_data(name: str, cache: str, augment: str, tokenizer: str) -> None:
    """Raise ValueError for an unknown data set, or for settings that do not apply to the data set."""
    if not cache:
        raise ValueError("data.cache= must not be empty; name a folder or omit data.cache")
    if name not in DATA_SETS and ":" not in name:
        raise ValueError(f"data.name={name} is unknown; use {', '.join(DATA_SETS)} or FILE.py:function")
    if name in DATA_SETS_WITHOUT_IMAGES and augment != "none":
        problem = f"data.augment={augment} needs images, but data.name={name} has none"
        raise ValueError(f"{problem}; omit data.augment")
    if name != "text" and tokenizer != "none":
        problem = f"data.tokenizer={tokenizer} needs text, but data.name={name} has none"
        raise ValueError(f"{problem}; omit data.tokenizer, or use data.name=text")
