"""From the bytes of an image to its pixels, in a process that is ended where that takes too long.

A file of a few kB can keep a decoder busy for minutes, and nothing but the end of its process stops
it. Processes are kept for the next image, and import neither torch nor the server. They return no
more pixels than the model takes and the page shows, and get no more memory than they are lent.
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
from locality.data.config import DEFAULT_DECODING, Decoding, Preprocessing
from locality.data.decoding import convert
from locality.data.resizing import high_resolution_crop, resize_and_crop
from locality.data.sources import BadImage, TooManyPixels

SECONDS = 10
"""The longest that decoding an image may take."""
_WAIT_SECONDS = 60


class Busy(Exception):
    """Too many images wait to be decoded; the message says so."""


class Lane(NamedTuple):
    """Images up to a number of pixels, of which so many are decoded at once."""

    pixels: int
    bytes: int
    at_once: int


# Of one image, the pixels before and after a turn are in memory together, 8 bytes of each. The
# second lane takes what a telephone takes, and small images do not wait for that.
LANES = (Lane(2_000_000, 50_000_000, 2), Lane(50_000_000, 420_000_000, 1))


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
        self._made = preprocessing, mode
        self._settings = replace(settings, exif=True)
        self._places = [anyio.Semaphore(lane.at_once) for lane in LANES]
        self._processes = anyio.CapacityLimiter(sum(lane.at_once for lane in LANES))

    async def __call__(self, data: bytes) -> Crops:
        """The image in `data`, the bytes of a file.

        Raises:
            BadImage: if there is none that can be taken, or it takes too long or too much memory.
            Busy: if others have taken all processes for a minute.
            BrokenWorkerProcess: if the process was killed from outside.
        """
        for lane, places in zip(LANES, self._places, strict=True):
            most = min(lane.pixels, self._settings.max_pixels)
            settings = replace(self._settings, max_pixels=most)
            try:
                async with _place(places):
                    return await in_process(
                        _decode, data, settings, lane.bytes, *self._made, limiter=self._processes
                    )
            except TooManyPixels:
                if lane is LANES[-1]:
                    raise
            except BadImage:
                # WebP needs its memory before it says how many pixels it has.
                if lane is LANES[-1] or data[8:12] != b"WEBP":
                    raise
            except MemoryError:
                raise BadImage(
                    f"decoding the image takes more than {lane.bytes // 1_000_000} MB; give it "
                    f"with fewer pixels, or as a plain JPEG or PNG"
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
    """What a function returns in a process, which is ended if that takes too long.

    Raises:
        BadImage: if it does.
        BrokenWorkerProcess: if the process was killed from outside.
    """
    with anyio.move_on_after(SECONDS):
        return await anyio.to_process.run_sync(
            function, *arguments, cancellable=True, limiter=limiter
        )
    raise BadImage(
        f"decoding the image takes more than {SECONDS} seconds; give it with fewer pixels, or as a "
        f"plain JPEG or PNG"
    )


def _decode(
    data: bytes, settings: Decoding, memory: int, preprocessing: Preprocessing, mode: str
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
        if isinstance(error, TooManyPixels) or memory < LANES[-1].bytes:
            raise
        # Some decoders call a file damaged where they get no memory.
        megabytes = memory // 1_000_000
        raise BadImage(f"{error}; or decoding it takes more than {megabytes} MB") from None
    cut = resize_and_crop(convert(image, mode), preprocessing)
    return Crops(cut, high_resolution_crop(image, preprocessing))
