"""Decode image files in processes with time and memory limits.

A file of a few kB can keep a decoder busy for minutes, and only killing its process stops it.
Processes are reused, import neither torch nor the server, and return only the pixels that the model
and the page need.
"""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, NamedTuple

import anyio
import anyio.to_process
import psutil
from PIL import Image

from locality.data import decoding
from locality.data.config import Decoding, Preprocessing
from locality.data.decoding import convert
from locality.data.resizing import high_resolution_crop, resize_and_crop
from locality.data.sources import BadImage, TooManyPixels

SECONDS = 10
"""Time limit of decoding an image."""
_WAIT_SECONDS = 60


class Busy(Exception):
    """Too many images are waiting to be decoded."""


class Lane(NamedTuple):
    """A queue for images of up to `pixels` pixels, with `bytes` of memory and `at_once` at a time.

    Small images do not wait for large ones.
    """

    pixels: int
    bytes: int
    at_once: int


# Rotating an image holds its pixels twice, 8 bytes per pixel in all. The second lane fits phone
# photographs.
LANES = (Lane(2_000_000, 50_000_000, 2), Lane(50_000_000, 420_000_000, 1))


class Crops(NamedTuple):
    """The model's crop of an image before normalisation, and a high-resolution one to show."""

    image: Image.Image
    shown: Image.Image


class Decoder:
    """Decodes images for a model in separate processes.

    Args:
        preprocessing: the model's preprocessing.
        mode: Pillow mode of the model's input.
        settings: how images are decoded; EXIF orientation is always applied.
    """

    def __init__(self, preprocessing: Preprocessing, mode: str, settings: Decoding) -> None:
        self._made = preprocessing, mode
        self._settings = replace(settings, exif=True)
        self._places = [anyio.Semaphore(lane.at_once) for lane in LANES]
        self._processes = anyio.CapacityLimiter(sum(lane.at_once for lane in LANES))

    async def __call__(self, data: bytes | bytearray) -> Crops:
        """Decode `data`, the bytes of an image file.

        Raises:
            BadImage: not a readable image, or decoding takes too long or too much memory.
            Busy: all processes were busy for a minute.
            BrokenWorkerProcess: the process was killed from outside.
        """
        for lane, places in zip(LANES, self._places, strict=True):
            most = min(lane.pixels, self._settings.max_pixels)
            settings = replace(self._settings, max_pixels=most)
            try:
                async with _place(places):
                    return await in_process(
                        _decode, data, settings, lane.bytes, *self._made, limiter=self._processes
                    )
            except BadImage as error:
                # WebP allocates memory before it reports the number of pixels.
                larger = isinstance(error, TooManyPixels) or data[8:12] == b"WEBP"
                if lane is LANES[-1] or not larger:
                    raise
            except MemoryError:
                raise BadImage(
                    f"decoding the image takes more than {lane.bytes // 1_000_000} MB; send fewer "
                    f"pixels, or a plain JPEG or PNG"
                ) from None
        raise AssertionError("the last lane returns or raises")


@contextlib.asynccontextmanager
async def _place(places: anyio.Semaphore) -> AsyncIterator[None]:
    with anyio.move_on_after(_WAIT_SECONDS) as waiting:
        await places.acquire()
    if waiting.cancelled_caught:
        raise Busy("too many images at once; try again later")
    try:
        yield
    finally:
        places.release()


async def in_process(
    function: Callable[..., Any], *arguments: Any, limiter: anyio.CapacityLimiter
) -> Any:
    """Call a function in a process, which is killed after `SECONDS`.

    Raises:
        BadImage: it took longer.
        BrokenWorkerProcess: the process was killed from outside.
    """
    with anyio.move_on_after(SECONDS):
        return await anyio.to_process.run_sync(
            function, *arguments, cancellable=True, limiter=limiter
        )
    raise BadImage(
        f"decoding the image takes more than {SECONDS} seconds; send fewer pixels, or a plain JPEG "
        f"or PNG"
    )


def _decode(
    data: bytes, settings: Decoding, memory: int, preprocessing: Preprocessing, mode: str
) -> Crops:
    # Ctrl-C reaches all processes of a terminal; the server ends this one itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    most, (_, hard) = psutil.Process().memory_info().data, resource.getrlimit(resource.RLIMIT_DATA)
    most += memory
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        image = decoding.decode(data, settings)
    except BadImage as error:
        if isinstance(error, TooManyPixels) or memory < LANES[-1].bytes:
            raise
        # Some decoders report a damaged file when out of memory.
        megabytes = memory // 1_000_000
        raise BadImage(f"{error}, or decoding takes more than {megabytes} MB") from None
    cut = resize_and_crop(convert(image, mode), preprocessing)
    return Crops(cut, high_resolution_crop(image, preprocessing))
