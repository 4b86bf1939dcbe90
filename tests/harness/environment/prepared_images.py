"""Load the training and the test part of a prepared data set, for tests."""

from __future__ import annotations

from common.data.prepare import PreparedDataset
from common.data.samples import Images
from configs.shared import Data


def load_train_test(prepared: PreparedDataset, settings: Data) -> tuple[Images, Images]:
    """Return the training and the test part, limited as in a run."""
    return Images(prepared, "train", settings.train_limit), Images(prepared, "test", settings.test_limit)
