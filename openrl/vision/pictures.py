"""Encoded pictures, which are checked, converted to RGB and scaled once."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from typing import Any

from PIL import ExifTags, ImageOps, UnidentifiedImageError
from PIL import Image as Picture

from openrl.types import Image

MOST_PIXELS = 80_000_000
"""Larger pictures are not decoded: a file of a few kilobytes can unpack to gigabytes."""


class BadImage(Exception):
    """A picture that cannot be used; the message says why."""


def make_image(data: bytes, min_pixels: int | None = None, max_pixels: int | None = None) -> Image:
    """Return the record of an encoded picture. The bytes of an upright, opaque RGB picture within
    the limits stay as they are; any other picture becomes a PNG, scaled in proportion. Raises
    BadImage."""
    try:
        with Picture.open(io.BytesIO(data)) as opened:
            width, height = opened.size
            if width * height > MOST_PIXELS:
                raise BadImage(
                    f"an image of {width} x {height} pixels; at most {MOST_PIXELS} are decoded"
                )
            picture = ImageOps.exif_transpose(opened)
            fitting = _fitting(picture.size, min_pixels, max_pixels)
            # the size does not tell: a picture stored upside down has that of an upright one
            upright = opened.getexif().get(ExifTags.Base.Orientation, 1) == 1
            opaque = opened.mode == "RGB" and "transparency" not in opened.info
            if upright and opaque and opened.size == fitting:
                picture.load()  # a truncated file fails here
                return _image(data)
            picture = _on_white(_in_8_bits(picture))
    except Picture.DecompressionBombError as error:
        raise BadImage(f"an image that is too large: {error}") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise BadImage(f"an image that cannot be read: {error}") from error
    if picture.size != fitting:
        picture = picture.resize(fitting, Picture.Resampling.BICUBIC)
    return png_image(picture)


def png_image(picture: Picture.Image) -> Image:
    """Return the record of a picture in memory, whose mode is RGB."""
    return _image(png(picture))


def _in_8_bits(picture: Picture.Image) -> Picture.Image:
    """Return a grey picture of more than 8 bits with 8: values of 16 bits divided by 257, floats
    from 0 to 1 times 255. Pillow itself would cut them off at 255. Raises BadImage for other
    values, whose white nobody knows."""
    if picture.mode != "F" and not picture.mode.startswith("I"):
        return picture
    import numpy as np  # most processes never meet such a picture

    values = np.asarray(picture).astype(np.float64)
    key = picture.info.get("transparency")
    if key is not None:  # what is transparent becomes white
        values = np.where(values == key, 65535.0, values)
    white = 1.0 if picture.mode == "F" else 65535.0
    if not (values.min() >= 0 and values.max() <= white):  # also NaN
        raise BadImage(
            f"a grey image with values from {values.min():g} to {values.max():g}, and 0 to"
            f" {white:g} are read: store it with 8 bits"
        )
    return Picture.fromarray(np.rint(values * (255 / white)).astype(np.uint8))


def is_picture(value: Any) -> bool:
    """Whether the value is a PIL image or a uint8 array (height, width, 3)."""
    if isinstance(value, Picture.Image):
        return True
    shape: tuple[int, ...] = getattr(value, "shape", ())
    return len(shape) == 3 and shape[2] == 3 and str(value.dtype) == "uint8"


def png(picture: Any) -> bytes:
    """Encode a picture in memory (a PIL image or an array) as PNG."""
    out = io.BytesIO()
    held = picture if isinstance(picture, Picture.Image) else Picture.fromarray(picture)
    _in_8_bits(held).save(out, "PNG")
    return out.getvalue()


def open_image(image: Image) -> Picture.Image:
    """Decode the image; its mode is RGB."""
    with Picture.open(io.BytesIO(image.data)) as opened:
        opened.load()
        return opened


def data_url(file: bytes) -> str:
    """Return an encoded picture as a data: URL."""
    with Picture.open(io.BytesIO(file)) as opened:
        kind = opened.get_format_mimetype()
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def image_size(image: Image) -> tuple[int, int]:
    """Return width and height in pixels, from the header of the file."""
    with Picture.open(io.BytesIO(image.data)) as opened:
        return opened.size


def _image(data: bytes) -> Image:
    return Image(data, hashlib.sha256(data).hexdigest())


def _on_white(picture: Picture.Image) -> Picture.Image:
    """Convert to RGB. What is transparent becomes white, as in a viewer."""
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        ground = Picture.new("RGBA", layer.size, (255, 255, 255, 255))
        return Picture.alpha_composite(ground, layer).convert("RGB")
    return picture.convert("RGB")


def _fitting(size: tuple[int, int], least: int | None, most: int | None) -> tuple[int, int]:
    """Scale width and height in proportion, so that there are ``least`` to ``most`` pixels."""
    width, height = size
    pixels = width * height
    if most is not None and pixels > most:
        factor = math.sqrt(most / pixels)
        return max(1, int(width * factor)), max(1, int(height * factor))
    if least is not None and pixels < least:
        factor = math.sqrt(least / pixels)
        return math.ceil(width * factor), math.ceil(height * factor)
    return size
