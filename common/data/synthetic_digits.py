"""Built-in data set of synthetic digits, with the same image size and number of samples as MNIST.

The data set is used on machines that have neither MNIST nor a network connection. The grayscale images of 28x28 pixels
are drawn with Pillow's scalable font. Each digit has a random stroke width, rotation, scale, shear and shift, and noise
is added. The same seed always produces the same images.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from common.system import seeds

SIDE = 28  # height and width of an image in pixels
CANVAS = 40  # height and width of a glyph in pixels; scaling it down to SIDE smooths its edges
STROKES = (0, 1, 2)  # stroke widths in pixels


@functools.cache
def draw_glyph(digit: int, stroke: int) -> Image.Image:
    """Draw one digit, white on black, centered on a square canvas of CANVAS x CANVAS pixels."""
    font = ImageFont.load_default(size=30)
    image = Image.new("L", (CANVAS, CANVAS))
    draw = ImageDraw.Draw(image)
    draw.text((CANVAS / 2, CANVAS / 2), str(digit), fill=255, font=font, anchor="mm", stroke_width=stroke)
    return image


def compute_affine_coefficients(angle: float, scale: float, shear: float, dx: float, dy: float) -> tuple[float, ...]:
    """Return the six coefficients of Pillow's affine transform from output pixels to canvas pixels.

    Rotation, scale and shear are relative to the image center. `angle` is in radians, `dx` and `dy` are in pixels.
    """
    cos = math.cos(angle) / scale
    sin = math.sin(angle) / scale
    xx = cos
    xy = sin + shear * cos
    yx = -sin
    yy = cos - shear * sin

    # The output point (center_x, center_y) is mapped to the center of the canvas.
    center_x = SIDE / 2 + dx
    center_y = SIDE / 2 + dy
    offset_x = CANVAS / 2 - xx * center_x - xy * center_y
    offset_y = CANVAS / 2 - yx * center_x - yy * center_y
    return xx, xy, offset_x, yx, yy, offset_y


def generate_digits(count: int, seed: int, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Generate uint8 images [count, 28, 28] and uint8 labels [count].

    The labels are in random order, and the numbers of samples of any two classes differ by at most one. `part` ("train"
    or "test") selects the random stream, so the two parts contain different images.
    """
    rng = seeds.make_generator(seed, "digits", part)
    labels = rng.permutation(np.arange(count) % 10).astype(np.uint8)

    # Draw the parameters of each image.
    stroke = rng.integers(0, len(STROKES), count)
    angle = rng.normal(0, 0.20, count).clip(-0.6, 0.6)
    scale = rng.uniform(0.55, 0.90, count)
    shear = rng.normal(0, 0.15, count).clip(-0.4, 0.4)
    shift = rng.uniform(-3.5, 3.5, (2, count))

    images = np.empty((count, SIDE, SIDE), np.uint8)
    for i in range(count):
        coefficients = compute_affine_coefficients(angle[i], scale[i], shear[i], shift[0, i], shift[1, i])
        glyph = draw_glyph(int(labels[i]), STROKES[stroke[i]])
        image = glyph.transform((SIDE, SIDE), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
        images[i] = np.asarray(image)

    # Add noise in blocks, which need less memory than all images at once.
    for start in range(0, count, 10_000):
        block = images[start : start + 10_000]
        noise = rng.integers(-40, 41, block.shape, dtype=np.int16)
        block[:] = (block + noise).clip(0, 255)
    return images, labels
