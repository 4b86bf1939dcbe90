"""The parts of a prepared data set, for tests."""

from __future__ import annotations

from common.data.loader import Images
from common.data.prepare import PreparedDataset
from configs.shared import Data


def load_train_test(prepared: PreparedDataset, settings: Data) -> tuple[Images, Images]:
    """The training and the test part, as a run cuts them."""
    return Images(prepared, "train", settings.train_limit), Images(prepared, "test", settings.test_limit)
