"""Decode image files to RGB: one policy for every source.

- Grey, palette, CMYK and other colour modes are converted as Pillow does, without ICC profiles:
  the published accuracies were measured that way.
- Transparent pixels are composited on white, as in most viewers. Their stored colour, which a plain
  conversion would show, is arbitrary.
- 16-bit grey keeps the upper byte, as in scikit-image, OpenCV and Pillow's 16-bit colour; Pillow's
  own conversion of 16-bit grey clips nearly everything to white. `grey_bits` is for cameras that
  use fewer bits. Negative values of signed TIFF become black.
- 32-bit grey has no defined white and is refused.
- Of several frames or pages the first is used. EXIF orientation is ignored by default; the
  orientation of a TIFF always applies.
"""

import contextlib
import errno
import importlib
import io
import os
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from functools import cache, partial
from importlib.util import find_spec
from typing import IO, Any

import numpy as np
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin

from locality import files
from locality.data.config import DEFAULT_DECODING, Decoding
from locality.errors import UserError

# Formats, recognised by content, not by file name. Of the others that Pillow reads, some run
# programs (EPS), or are not photographs.
_FORMATS = ("JPEG", "MPO", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF", "HEIF")
# Larger than the largest accepted image, uncompressed.
MAX_FILE_BYTES = 400_000_000
# Small files can take hours: libjpeg decodes any number of scans and leaves a limit to its callers.
# Encoders write about 10; 50 of the largest image take 7 s.
_MAX_SCANS = 50
# Suppresses Pillow's warnings about large images and odd metadata; both are handled here.
_quiet = partial(warnings.catch_warnings, action="ignore")
_DECODED = "locality: decoded"  # in `info` of images in RGB
_NAMES = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90"
# By EXIF orientation, from 2 on.
_TURNS = {number: Image.Transpose[name] for number, name in enumerate(_NAMES.split(), 2)}
# Errors of the machine, not of the file: skipping images for them would make runs differ.
_MACHINE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)
MOST_CROPPED = 0.1
"""Images that lose a larger share of their pixels in the mean are squashed by default."""


class BadImage(Exception):
    """An image that cannot be decoded; the message gives the reason, not the image's name."""


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of an image file.

    Raises:
        BadImage: the file cannot be read, is not a regular file, or is too large.
    """
    try:
        with files.open_file(path, MAX_FILE_BYTES) as file:
            return file.read()
    except UserError as error:
        raise BadImage(str(error)) from error
    except OSError as error:
        if error.errno in _MACHINE_ERRORS:
            raise
        raise BadImage(f"the file cannot be read ({error.strerror})") from error


def decode(data: bytes, decoding: Decoding = DEFAULT_DECODING) -> Image.Image:
    """Decode `data` to an RGB image.

    Raises:
        BadImage: `data` is empty, truncated, not an image, too large, or in a colour mode
            without a meaning in 8 bits.
    """
    with _quiet():
        image: Image.Image = _open_image(io.BytesIO(data), decoding)
        # Not those of a video that follows the image, as in motion photos.
        segments = _segments(data) if image.format in ("JPEG", "MPO") else ()
        scans = sum(marker == 0xDA for marker, *_ in segments)
        if scans > _MAX_SCANS:
            raise BadImage(f"the image has {scans:,} scans; up to {_MAX_SCANS} are decoded")
        with _as_bad_image():
            if decoding.least is not None:
                image.draft(None, (decoding.least, decoding.least))
            image.load()
        if image.format == "PNG":
            _check_png(data, image)
        elif image.format in ("JPEG", "MPO"):
            _check_jpeg(data, image, decoding)
        image = to_rgb(image, decoding)
    image.info[_DECODED] = True
    return image


def image_size(data: bytes, decoding: Decoding = DEFAULT_DECODING) -> tuple[int, int]:
    """(width, height) of the image that `decode` gives, from its header.

    Raises:
        BadImage: as `decode`, where the header shows it.
    """
    with _quiet():
        image = _open_image(io.BytesIO(data), decoding)
        # Pillow turns TIFF files itself.
        turned = decoding.exif and image.format != "TIFF" and (orientation(image) or 1) > 4
        return (image.height, image.width) if turned else image.size


def _open_image(file: IO[bytes], decoding: Decoding) -> ImageFile.ImageFile:
    """Open the image in `file`, reading only its header."""
    if not file.read(1):
        raise BadImage("the file is empty")
    file.seek(0)
    with _as_bad_image():
        try:
            image = Image.open(file, formats=_formats())
        except Image.DecompressionBombError as error:
            raise BadImage(f"the image has more than {decoding.max_pixels:,} pixels") from error
        except Image.UnidentifiedImageError as error:
            reason = f"the file is not an image of a known format ({', '.join(_formats())})"
            file.seek(4)
            if file.read(4) == b"ftyp" and not find_spec("pillow_heif"):
                reason += "; pip install 'locality[heif]' reads HEIF"
            raise BadImage(reason) from error
    # For each row, Pillow stores a pointer of the size of two pixels.
    if max(image.width, 3) * image.height > decoding.max_pixels:
        size = f"{image.width} × {image.height}"
        raise BadImage(f"the image has {size} pixels, more than {decoding.max_pixels:,}")
    return image


def _check_png(data: bytes, image: Image.Image) -> None:
    """Refuse wrong checksums and a missing end or rows, which Pillow accepts."""
    offset, chunk, pixels, count = 8, b"", zlib.decompressobj(), 0
    # Pillow fills missing rows with zeros. An interlaced image ends with its last odd row.
    bottom = range(max(0, image.height - 2), image.height)
    rows = [image.crop((0, row, image.width, row + 1)) for row in bottom]
    filled = any(row.getbbox(alpha_only=False) is None for row in rows)
    while chunk != b"IEND":
        size = int.from_bytes(data[offset : offset + 4], "big")
        chunk, end = data[offset + 4 : offset + 8], offset + 8 + size
        if zlib.crc32(data[offset + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise BadImage("the image is damaged (a checksum in it is wrong)")
        if end >= len(data):
            raise BadImage("the image is damaged (its end is missing)")
        if filled and chunk == b"IDAT":
            count += len(pixels.decompress(data[offset + 8 : end]))
        offset = end + 4
    if filled and count < _png_bytes(data):
        raise _rows_missing()


def _png_bytes(data: bytes) -> int:
    """The bytes of all rows of a PNG, each with that of its filter."""
    width, height, depth, colour, *_, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    bits = depth * {2: 3, 4: 2, 6: 4}.get(colour, 1)
    # Adam7: the first column and row of each pass, and the steps.
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4)]
    passes = [*passes, (1, 0, 2, 2), (0, 1, 1, 2)] if interlaced else [(0, 0, 1, 1)]
    sides = [(-((x - width) // dx), -((y - height) // dy)) for x, y, dx, dy in passes]
    return sum(rows * (1 - (-columns * bits // 8)) for columns, rows in sides if columns > 0)


# Those below C0 have no length.
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")


def _segments(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The marker, offset and content of each segment of a JPEG, to its end."""
    place, found = 2, 0
    while found != 0xD9 and (marker := _MARKER.search(data, place)):
        found, start = marker[0][1], marker.end()
        place = start + int.from_bytes(data[start : start + 2])
        yield found, marker.start(), data[start + 2 : place]


def _check_jpeg(data: bytes, image: Image.Image, decoding: Decoding) -> None:
    """Refuse a JPEG without its last scans, or that ends before its last row: libjpeg repeats one
    colour.

    A file whose last pixels are of one colour is decoded again with more bytes before its end,
    which change nothing if the pixels are complete.
    """
    progressive = bool(image.info.get("progressive"))
    if progressive and not _has_all_scans(data, len(image.getbands())):
        raise BadImage("the image is damaged (its last scans are missing)")
    width, height = image.size
    last = image.crop((width - max(2, width // 50), height - 1, width, height))
    if len(last.getcolors() or "many") > 1:
        return
    *_, (marker, offset, _) = _segments(data)
    end = offset if marker == 0xD9 else len(data)
    longer = data[:end] + bytes(range(64, 192)) + b"\xff\xd9"
    # The last scans of a progressive image are details, which a small scale does not show.
    least = None if progressive else decoding.least
    with contextlib.suppress(OSError):
        if _jpeg_pixels(data, least) == _jpeg_pixels(longer, least):
            return
    raise _rows_missing()


def _has_all_scans(data: bytes, components: int) -> bool:
    """Whether the scans of a progressive JPEG give the last bit of every coefficient (its standard,
    section G.1). It may legally end earlier, but no usual encoder does that."""
    missing: dict[tuple[int, int], int] = {}
    for marker, _, scan in _segments(data):
        if marker == 0xDA and len(scan) > 5:
            *_, first, last, bits = scan
            for number in scan[1:-3:2]:
                missing |= {(number, place): bits & 15 for place in range(first, last + 1)}
    return len(missing) >= 64 * components and not any(missing.values())


def _jpeg_pixels(data: bytes, least: int | None) -> bytes:
    image = Image.open(io.BytesIO(data))
    if least is not None:
        image.draft(None, (least, least))
    return image.tobytes()


def _rows_missing() -> BadImage:
    return BadImage("the image is damaged (its last rows are missing)")


def shrink(image: Image.Image, least: int | None) -> Image.Image:
    """Resize an image whose shorter side is longer than `least` pixels to that; None does not."""
    shorter = min(image.size)
    if least is None or shorter <= least:
        return image
    size = (round(image.width * least / shorter), round(image.height * least / shorter))
    return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)


def cropped_share(width: int, height: int, shape: tuple[int, int] = (1, 1)) -> float:
    """The share of an image's pixels outside the largest centre crop of a (height, width) shape."""
    sides = width * shape[0], height * shape[1]
    return 1 - min(sides) / max(sides)


def convert(image: Image.Image, mode: str) -> Image.Image:
    """The image in a Pillow mode; not copied if it has that mode."""
    return image if image.mode == mode else image.convert(mode)


def to_rgb(image: Image.Image, decoding: Decoding = DEFAULT_DECODING) -> Image.Image:
    """Convert a decoded image to RGB and, if enabled, apply its EXIF orientation.

    For 16-bit grey, `info["bits"]` of the result is (bits used, bits available). A new image is
    marked in `info`, so that it is not turned again.

    Raises:
        BadImage: the image is 32-bit grey or signed 8-bit grey, or has a damaged palette.
    """
    if image.info.get(_DECODED) and image.mode in ("L", "RGB"):
        return convert(image, "RGB")
    original = image
    with _as_bad_image():
        turn = _TURNS.get(orientation(image)) if decoding.exif else None
        # Only TIFF has these tags.
        tags = getattr(image, "tag_v2", {})
        signed = image.mode in ("L", "I") and tags.get(TiffImagePlugin.SAMPLEFORMAT) == (2,)
        depth = tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0]
        if image.mode.startswith("I;16") or (
            image.mode == "I" and (image.format in ("PNG", "PPM") or (signed and depth == 16))
        ):
            image = _from_16_bits(image, decoding, min(depth, 15) if signed else depth)
        elif image.mode in ("I", "F") or signed:
            kind = f"{'signed ' if signed else ''}grey in {depth if tags else 32} bits"
            raise BadImage(f"{kind} has no defined white; convert it to unsigned 8 or 16 bits")
        elif image.has_transparency_data:
            image = convert(image, "RGBA")
            white = Image.new("RGB", image.size, "white")
            white.paste(image, mask=image)
            image = white
        image = convert(image, "RGB")
        image = image if turn is None else image.transpose(turn)
        if image is not original:
            image.info[_DECODED] = True
        return image


def orientation(image: Image.Image) -> Any:
    """The EXIF orientation; None without one.

    Pillow's `exif_transpose` fails where a record has other fields that it cannot write back.
    """
    with contextlib.suppress(Exception):
        return image.getexif().get(ExifTags.Base.Orientation)
    return None


@contextlib.contextmanager
def _as_bad_image() -> Iterator[None]:
    """Raise a `BadImage` for any exception in the block except a lack of memory.

    Decoders of damaged files raise nearly anything: OSError, SyntaxError, struct.error…
    """
    try:
        yield
    except (BadImage, MemoryError):
        raise
    except Exception as error:
        text = str(error) or type(error).__name__
        raise BadImage(f"the image is damaged ({text})") from error


def _from_16_bits(image: Image.Image, decoding: Decoding, depth: int) -> Image.Image:
    """Grey in up to 16 bits → RGB; negative values are black, as in scikit-image."""
    values = np.maximum(np.asarray(image), 0)
    # Pillow has already scaled PPM's white to 16 bits.
    bits = depth if image.format == "PPM" else min(depth, decoding.grey_bits)
    white = 2**bits - 1
    used = min(bits, int(values.max()).bit_length())
    grey = (np.minimum(values, white) >> (bits - 8)).astype(np.uint8)
    tags = getattr(image, "tag_v2", None)
    if tags and not tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION, 0):
        grey = 255 - grey
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    rgb = Image.fromarray(grey).convert("RGB")
    rgb.info["bits"] = used, bits
    return rgb


@cache
def _formats() -> tuple[str, ...]:
    # JPEG 2000 and AVIF depend on how Pillow was built, HEIF on an optional package.
    Image.init()
    if find_spec("pillow_heif"):
        importlib.import_module("pillow_heif").register_heif_opener()
    return tuple(name for name in _FORMATS if name in Image.OPEN)
