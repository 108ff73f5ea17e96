"""Request bodies: an image, or a form with one file, within limits.

Nothing of it is written to a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from email.message import Message

import anyio
from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect

MEGABYTES = 20
"""Largest file that is taken."""
# A form's own lines come on top of the file.
_LARGEST = MEGABYTES * 1_000_000 + 10_000
# More is not even read on, and who is slower is not waited for.
_MAX_READ_BYTES = 400_000_000
_SECONDS = 60
_MAX_FORM_PARTS = 100
# Of all requests together. Counting requests instead would let some that send slowly shut out all.
_MAX_HELD_BYTES = 500_000_000


class RequestBodies:
    """The bodies of all open requests, and the memory that they take."""

    def __init__(self) -> None:
        self._held = 0

    @contextlib.asynccontextmanager
    async def image(self, request: Request) -> AsyncIterator[bytes]:
        """The bytes of the image that was sent, which count as held until the block ends.

        Raises:
            HTTPException: if it is too much, takes too long, or a form has no or several files.
        """
        kept = bytearray()
        try:
            await self._read(request, kept)
            data = bytes(kept)
            if request.headers.get("content-type", "").startswith("multipart/"):
                data = _file_of_form(data, request.headers["content-type"])
            if len(data) > MEGABYTES * 1_000_000:
                raise _too_large()
            yield data
        finally:
            self._held -= len(kept)

    async def drop(self, request: Request) -> None:
        """Read what is sent to its end, for who still writes does not hear the answer."""
        with contextlib.suppress(HTTPException):
            await self._read(request, None)

    async def _read(self, request: Request, kept: bytearray | None) -> None:
        """Append the body to `kept`. What is too much is dropped, and read to its end."""
        length = 0
        try:
            with anyio.fail_after(_SECONDS):
                async for piece in request.stream():
                    length += len(piece)
                    if length > _MAX_READ_BYTES:
                        break
                    if kept is None:
                        continue
                    if length > _LARGEST:
                        self._held -= len(kept)
                        kept.clear()
                        continue
                    if self._held + len(piece) > _MAX_HELD_BYTES:
                        raise HTTPException(503, "too many images at once; try again later")
                    self._held += len(piece)
                    kept += piece
        except TimeoutError:
            sentence = f"the image did not arrive within {_SECONDS} seconds"
            raise HTTPException(408, sentence) from None
        except ClientDisconnect:
            sentence = "the connection was closed before the image was there"
            raise HTTPException(400, sentence) from None
        if kept is not None and length > _LARGEST:
            raise _too_large()


def _too_large() -> HTTPException:
    return HTTPException(413, f"the file has more than {MEGABYTES} MB; give a smaller image")


def _file_of_form(data: bytes, content_type: str) -> bytes:
    """The one file in a form (RFC 7578), as `curl -F image=@photo.png` sends it.

    Raises:
        HTTPException: if it has none, or several.
    """
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary("").encode()
    # Between two boundaries, which no part contains: its headers, an empty line, its content.
    _, *parts = (b"\r\n" + data).split(b"\r\n--" + boundary, _MAX_FORM_PARTS)
    divided = [part.partition(b"\r\n\r\n") for part in parts] if boundary else []
    files = [content for lines, _, content in divided if b"filename" in lines]
    if len(files) != 1:
        raise HTTPException(
            422, f"the form has {len(files)} files; give one, as in curl -F image=@photo.jpg"
        )
    return files[0]
