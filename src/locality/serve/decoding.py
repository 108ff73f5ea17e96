"""From the bytes of an image to its pixels, in a process that is ended where that takes too long.

A file of a few kB can keep a decoder busy for minutes, and nothing but the end of its process stops
it. Processes are kept for the next image, and import neither torch nor the server.
"""

from __future__ import annotations

import signal

import anyio
import anyio.to_process
from PIL import Image

from locality.data import decoding
from locality.data.config import Decoding
from locality.data.sources import BadImage

SECONDS = 10
"""The longest that decoding an image may take."""
# What a telephone takes; turned as it was held.
_DECODING = Decoding(exif=True, max_pixels=50_000_000)


async def decode(data: bytes, processes: anyio.CapacityLimiter) -> Image.Image:
    """The image in `data`.

    Args:
        data: of the file.
        processes: how many may decode at once.

    Raises:
        BadImage: if there is none that can be taken, or it takes too long.
        BrokenWorkerProcess: if the process was killed from outside.
    """
    with anyio.move_on_after(SECONDS):
        return await anyio.to_process.run_sync(_decode, data, cancellable=True, limiter=processes)
    raise BadImage(
        f"decoding the image takes more than {SECONDS} seconds; give it with fewer pixels, or as a "
        f"plain JPEG or PNG"
    )


def _decode(data: bytes) -> Image.Image:
    # Ctrl-C reaches every process of a terminal; the server ends this one itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return decoding.decode(data, _DECODING)
