"""Decoding images (PNG, JPEG, WebP, BMP, GIF, TIFF) into arrays."""

import io
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import numpy as np

from feddpms.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

Blob = tuple[str, bytes | None]
"""An image file: the name that an error gives it, and its bytes (None: it has none)."""

Mode = Literal["L", "RGB"]
"""Grayscale or colour, 8 bits a channel."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
MAGIC = ((b"\x89PNG", "PNG"), (b"\xff\xd8", "JPEG"), (b"RIFF", "WEBP"))
GRAY = ("1", "L", "LA")
EIGHT_BITS = (*GRAY, "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")


@contextmanager
def _bombs_refused() -> Iterator[None]:
    """Pillow only warns of an image that is suspiciously large; here that is an error."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _open(name: str, blob: bytes | None) -> "Image":
    """The opened image, pixels not decoded yet; one format is tried if its magic bytes are seen.

    Naming the format halves the time that small images take.
    """
    from PIL import Image

    if blob is None:
        raise DataError(f"{name}: expected the bytes of an image, got none; write the set again")
    formats = next(((kind,) for magic, kind in MAGIC if blob.startswith(magic)), FORMATS)
    try:
        image = Image.open(io.BytesIO(blob), formats=formats)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise DataError(
            f"{name}: expected an image of at most {Image.MAX_IMAGE_PIXELS} pixels, got a larger "
            "one; scale it down"
        ) from None
    except Exception as error:
        raise _unreadable(name, len(blob), error) from None
    if image.mode not in EIGHT_BITS:
        raise DataError(
            f"{name}: expected 8 bits a channel, got Pillow's mode {image.mode}; "
            "convert it to 8-bit grayscale or RGB"
        )
    return image


def _unreadable(name: str, size: int, error: Exception) -> DataError:
    """The line for bytes that do not decode; Pillow raises many kinds of error for them."""
    return DataError(
        f"{name}: expected a PNG, JPEG, WebP, BMP, GIF or TIFF image, got {size} bytes that do "
        f"not decode ({type(error).__name__}); remove the image or get it again"
    )


def _converted(image: "Image", mode: Mode) -> "Image":
    """The image in this mode; transparency is dropped."""
    if image.mode == mode:
        return image
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA")
    return image.convert(mode)


def decoded(blobs: Iterable[Blob], side: int) -> np.ndarray:
    """Colour images that must all have one size.

    Args:
        blobs: the image files.
        side: width and height in pixels that every image must have.

    Returns:
        uint8 [n, side, side, 3].

    Raises:
        DataError: an image does not decode, or has another size.
    """
    pixels: list[np.ndarray] = []
    with _bombs_refused():
        for name, blob in blobs:
            image = _open(name, blob)
            if image.size != (side, side):
                raise DataError(
                    f"{name}: expected {side}x{side} pixels like every image of this set, got "
                    f"{image.width}x{image.height}; get the set again, or use the data sets "
                    '"folder" or "hf:NAME", which resize'
                )
            pixels.append(_array(name, blob, image, "RGB", side))
    return np.stack(pixels) if pixels else np.empty((0, side, side, 3), np.uint8)


def resized(blobs: Iterable[Blob], side: int, mode: Mode) -> np.ndarray:
    """Images of any size, resized to squares (Lanczos; the aspect ratio is not kept).

    Args:
        blobs: the image files.
        side: width and height in pixels of the result.
        mode: grayscale or colour.

    Returns:
        uint8 [n, side, side] for grayscale, [n, side, side, 3] for colour.

    Raises:
        DataError: an image does not decode.
    """
    with _bombs_refused():
        pixels = [_array(name, blob, _open(name, blob), mode, side) for name, blob in blobs]
    return np.stack(pixels)


def _array(name: str, blob: bytes | None, image: "Image", mode: Mode, side: int) -> np.ndarray:
    """The pixels of an opened image, resized if it has another size."""
    from PIL import Image

    try:
        image = _converted(image, mode)
        if image.size != (side, side):
            image = image.resize((side, side), Image.Resampling.LANCZOS)
        return np.asarray(image)
    except Exception as error:
        raise _unreadable(name, len(blob or b""), error) from None


def common_mode(blobs: Iterable[Blob]) -> Mode:
    """Grayscale if every image is, else colour; only the headers are read.

    Raises:
        DataError: a header does not decode.
    """
    with _bombs_refused():
        return "L" if all(_open(name, blob).mode in GRAY for name, blob in blobs) else "RGB"
