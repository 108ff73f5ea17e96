"""From the bytes of an image to its pixels, in a process that is ended where that takes too long.

A file of a few kB can keep a decoder busy for minutes, and nothing but the end of its process stops
it. Processes are kept for the next image, and import neither torch nor the server. They return no
more pixels than the model takes and the page shows, and get no more memory than they are lent.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import anyio
import anyio.to_process
import psutil
from PIL import Image

from locality.data import decoding
from locality.data.config import DEFAULT_DECODING, Decoding, Preprocessing
from locality.data.resizing import convert, high_resolution_crop, resize_and_crop
from locality.data.sources import BadImage, TooManyPixels

SECONDS = 10
"""The longest that decoding an image may take."""
_WAIT_SECONDS = 60
_SMALLER = "give it with fewer pixels, or as a plain JPEG or PNG"


class Busy(Exception):
    """Too many images wait to be decoded; the message says so."""


# Of one image, the pixels before and after a turn are in memory together, 8 bytes of each.
_MAX_PIXELS, MEGABYTES, _AT_ONCE = 50_000_000, 420, 2


class Crops(NamedTuple):
    """An image as the model takes it, but for the normalisation, and with more pixels to show."""

    image: Image.Image
    shown: Image.Image


class Decoder:
    """Decodes images for a model, in processes of its own.

    Args:
        preprocessing: of the model.
        mode: Pillow's, of the images that the model takes.
        settings: of decoding; images are turned as they were held in any case.
    """

    def __init__(
        self, preprocessing: Preprocessing, mode: str, settings: Decoding = DEFAULT_DECODING
    ) -> None:
        most = min(_MAX_PIXELS, settings.max_pixels)
        self._how = replace(settings, exif=True, max_pixels=most), preprocessing, mode
        self._places = anyio.Semaphore(_AT_ONCE)
        self._processes = anyio.CapacityLimiter(_AT_ONCE)

    async def __call__(self, data: bytes) -> Crops:
        """The image in `data`, the bytes of a file.

        Raises:
            BadImage: if there is none that can be taken, or it takes too long or too much memory.
            Busy: if others have taken all processes for a minute.
            BrokenWorkerProcess: if the process was killed from outside.
        """
        with anyio.move_on_after(_WAIT_SECONDS) as waiting:
            await self._places.acquire()
        if waiting.cancelled_caught:
            raise Busy("too many images at once; try again later")
        try:
            lent = MEGABYTES * 1_000_000
            return await in_process(_decode, data, lent, *self._how, limiter=self._processes)
        except MemoryError:
            raise BadImage(
                f"decoding the image takes more than {MEGABYTES} MB; {_SMALLER}"
            ) from None
        finally:
            self._places.release()


async def in_process(
    function: Callable[..., Any], *arguments: Any, limiter: anyio.CapacityLimiter
) -> Any:
    """What a function returns in a process, which is ended if that takes too long.

    Raises:
        BadImage: if it does.
        BrokenWorkerProcess: if the process was killed from outside.
    """
    with anyio.move_on_after(SECONDS):
        return await anyio.to_process.run_sync(
            function, *arguments, cancellable=True, limiter=limiter
        )
    raise BadImage(f"decoding the image takes more than {SECONDS} seconds; {_SMALLER}")


def _decode(
    data: bytes, memory: int, settings: Decoding, preprocessing: Preprocessing, mode: str
) -> Crops:
    # Ctrl-C reaches every process of a terminal; the server ends this one itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    most, (_, hard) = psutil.Process().memory_info().data, resource.getrlimit(resource.RLIMIT_DATA)
    most += memory
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        image = decoding.decode(data, settings)
    except BadImage as error:
        if isinstance(error, TooManyPixels) or data[8:12] != b"WEBP":
            raise
        # WebP calls a file damaged where it gets no memory.
        raise BadImage(
            f"{error}; or decoding it takes more than {memory // 1_000_000} MB"
        ) from None
    cut = resize_and_crop(convert(image, mode), preprocessing)
    return Crops(cut, high_resolution_crop(image, preprocessing))
