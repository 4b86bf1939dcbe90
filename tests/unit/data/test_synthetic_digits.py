"""The built-in digits: byte-identical for a seed, and balanced."""

from __future__ import annotations

import hashlib

import numpy as np

from common.data.synthetic_digits import generate_digits

CHECKSUM = "4521573852bd00512be622ea9cfc150bab4a1061363f32ba2f19302adadfeec8"


def test_digits_are_the_same_bytes_for_a_seed() -> None:
    images, labels = generate_digits(503, seed=5, part="train")
    repeated_images, _ = generate_digits(503, seed=5, part="train")
    other_images, _ = generate_digits(503, seed=6, part="train")
    test_images, _ = generate_digits(503, seed=5, part="test")
    assert images.shape == (503, 28, 28)
    assert images.dtype == np.uint8
    assert labels.dtype == np.uint8
    assert images.tobytes() == repeated_images.tobytes()
    assert len({images.tobytes(), other_images.tobytes(), test_images.tobytes()}) == 3
    checksum = hashlib.sha256(images.tobytes()).hexdigest()
    assert checksum == CHECKSUM, "the set changed: raise prepare.DIGITS_VERSION"


def test_classes_are_balanced_and_images_differ() -> None:
    images, labels = generate_digits(503, seed=5, part="train")
    counts = np.bincount(labels, minlength=10)
    assert np.ptp(counts) <= 1
    assert len({image.tobytes() for image in images}) == 503
