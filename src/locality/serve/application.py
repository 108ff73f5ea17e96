"""The FastAPI application: a page, and the endpoints /predict and /attention.

An image is the body of a request, alone or as the one file of a form, within limits; a request has
nothing else: no file is named, none is written. A few images at a time are decoded, and one is
looked at; only what the model takes of it comes to this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from email.message import Message
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from anyio import BrokenWorkerProcess
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect

from locality import __version__
from locality.analysis.explorer import explorer_page
from locality.checkpoints.api import MODES, Classifier
from locality.data.config import DEFAULT_DECODING, Decoding
from locality.data.sources import BadImage
from locality.errors import NonFiniteLogits, UserError, printable
from locality.serve.decoding import Busy, Crops, Decoder
from locality.templates import render

MEGABYTES = 20
"""Largest file that is taken."""
# A form's own lines come on top of the file.
_LARGEST = MEGABYTES * 1_000_000 + 10_000
# More is not even read on, and who is slower is not waited for.
_MAX_READ_BYTES = 400_000_000
_SECONDS = 60
_MAX_FORM_PARTS = 100
_MAX_NAMED = 6  # classes in the title
# Of all requests together. Counting requests instead would let some that send slowly shut out all.
_MAX_HELD_BYTES = 100_000_000


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
        kept, size = bytearray(), 0
        try:
            await self._read(request, kept)
            data, size = bytes(kept), len(kept)
            kept.clear()
            if request.headers.get("content-type", "").startswith("multipart/"):
                data = _file_of_form(data, request.headers["content-type"])
            if len(data) > MEGABYTES * 1_000_000:
                raise _too_large()
            yield data
        finally:
            self._held -= len(kept) + size

    async def drop(self, request: Request) -> None:
        """Read what is sent to its end: a client that still sends does not read the response."""
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


_FILE = {"type": "string", "format": "binary"}
_IMAGE = {
    "requestBody": {
        "required": True,
        "content": {
            "image/*": {"schema": _FILE},
            "multipart/form-data": {"schema": {"type": "object", "properties": {"image": _FILE}}},
        },
    }
}

T = TypeVar("T")


class ClassProbability(BaseModel):
    """A class and its probability."""

    name: str
    probability: float


class Prediction(BaseModel):
    """The most likely classes of an image, best first."""

    model: str
    classes: list[ClassProbability]


class ErrorResponse(BaseModel):
    """Why a request was not answered, in a sentence."""

    detail: str


def application(
    classifier: Classifier, title: str = "", decoding: Decoding = DEFAULT_DECODING
) -> FastAPI:
    """The page at /, the endpoints /predict and /attention, and their description, /openapi.json.

    Args:
        classifier: which answers; a graph has no attention to show.
        title: of the page; a question about its classes unless given.
        decoding: as of the model's images; they are turned as they were held in any case.
    """
    refused: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse} for status in (408, 413, 422, 500, 503)
    }
    service = FastAPI(
        title=title or f"locality: {classifier.name}",
        version=__version__,
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        responses=refused,
    )
    page = _page(classifier, title)
    bodies = RequestBodies()
    preprocessing = classifier.preprocessing
    mode = MODES.get(len(preprocessing.mean), "RGB")
    decode = Decoder(preprocessing, mode, decoding)
    # Of images that are cut already.
    looking = replace(classifier, preprocessing=replace(preprocessing, crop_pct=1.0))
    # torch takes all processors for one image as it is.
    one = anyio.CapacityLimiter(1)

    async def answered(request: Request, answer: Callable[[Crops], T]) -> T:
        async with bodies.image(request) as data:
            try:
                crops = await decode(data)
                return await anyio.to_thread.run_sync(partial(answer, crops), limiter=one)
            except Busy as error:
                raise HTTPException(503, str(error)) from None
            except NonFiniteLogits as error:
                raise HTTPException(500, str(error)) from None
            except (BadImage, UserError) as error:
                raise HTTPException(422, str(error)) from None
            except BrokenWorkerProcess:
                sentence = "the process that decoded the image was killed, most often for memory"
                raise HTTPException(503, sentence) from None

    @service.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show() -> str:
        return page

    @service.post("/predict", openapi_extra=_IMAGE)
    async def predict(request: Request) -> Prediction:
        """The five most likely classes of the image in the body."""

        def look(crops: Crops) -> dict[str, float]:
            return looking.top_classes(looking([crops.image])[0])

        found = await answered(request, look)
        # A name may hold what is no text in UTF-8.
        named = [ClassProbability(name=printable(name), probability=p) for name, p in found.items()]
        return Prediction(model=classifier.name, classes=named)

    @service.post("/attention", openapi_extra=_IMAGE, response_class=HTMLResponse)
    async def attention(request: Request) -> str:
        """A page of the image in the body: attention of every layer and head, and gates."""

        def look(crops: Crops) -> str:
            return explorer_page([looking], [crops.image], ["your image"], [crops.shown])

        return await answered(request, look)

    @service.exception_handler(AnyHTTPException)
    async def refuse(request: Request, error: AnyHTTPException) -> JSONResponse:
        if error.status_code in (404, 405):
            await bodies.drop(request)
        sentence = {
            404: "there is nothing here: / is a page, /predict and /attention take an image",
            405: f"{request.method} is not answered here; POST an image to /predict or /attention",
        }.get(error.status_code, error.detail)
        return JSONResponse({"detail": sentence}, error.status_code, error.headers)

    @service.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "an error of the server, which its log shows"}, 500)

    return service


def _page(classifier: Classifier, title: str = "") -> str:
    return render(
        "locality.report",
        "serve.html",
        title=title or _question(classifier),
        name=classifier.name,
        size=classifier.preprocessing.size,
        megabytes=MEGABYTES,
        version=__version__,
    )


def _question(classifier: Classifier) -> str:
    """What the model answers: "coat, shirt or t-shirt?"; its name where classes have none."""
    *names, last = map(printable, classifier.classes or [classifier.name])
    if len(names) >= _MAX_NAMED:
        return f"Which of {len(names) + 1:,} classes?"
    return f"{', '.join(names)} or {last}?" if names else last


def content_policy(classifier: Classifier, framed: bool) -> str:
    """The Content-Security-Policy of the page: nothing from elsewhere, no script but its own.

    The explorer's page is in a frame of it, and what is in a frame without an address has the
    policy of the page around.

    Args:
        classifier: which the page is of.
        framed: whether other pages may show it in a frame.
    """
    explorer: dict[str, Any] = {"data": "", "blobs": [], "models": [], "version": ""}
    both = _page(classifier) + render("locality.analysis", "explorer.html", **explorer)
    scripts = [
        b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in re.findall("<script>(.*?)</script>", both, re.DOTALL)
    ]
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(f"'sha256-{script}'" for script in scripts),
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "connect-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "*" if framed else "'none'",
    }
    return "; ".join(f"{what} {sources}" for what, sources in rules.items())
