"""The FastAPI application: a page, and the endpoints /predict and /attention.

A request's body is an image, or a form with one file, of limited size. Requests cannot name files,
and none are written. A few images are decoded at a time, in other processes that return only the
model's crop; the model runs on one image at a time.
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
from locality.data.config import Decoding
from locality.data.sources import BadImage
from locality.errors import NonFiniteLogits, UserError, printable
from locality.serve.decoding import Busy, Crops, Decoder
from locality.templates import render

MEGABYTES = 20
"""Largest accepted file."""
# Allows for a form's headers.
_LARGEST = MEGABYTES * 1_000_000 + 10_000
# Stop reading a body beyond this size or time.
_MAX_READ_BYTES = 400_000_000
_SECONDS = 60
_MAX_FORM_PARTS = 100
_MAX_NAMED = 6  # classes in the title
# For all requests together. A limit on their number would let slow clients block all others.
_MAX_HELD_BYTES = 100_000_000


class RequestBodies:
    """Reads request bodies and limits their total memory."""

    def __init__(self) -> None:
        self._held = 0

    @contextlib.asynccontextmanager
    async def image(self, request: Request) -> AsyncIterator[bytearray]:
        """Context manager: the bytes of the sent image, counted as held inside the block.

        Raises:
            HTTPException: too large, too slow, too many images at once, or a form without exactly
                one file.
        """
        kept = bytearray()
        try:
            await self._read(request, kept)
            if request.headers.get("content-type", "").startswith("multipart/"):
                size = len(kept)
                kept[:] = _file_of_form(kept, request.headers["content-type"])
                self._held -= size - len(kept)
            if len(kept) > MEGABYTES * 1_000_000:
                raise _too_large()
            yield kept
        finally:
            self._held -= len(kept)

    async def drop(self, request: Request) -> None:
        """Read the body to its end: clients that are still sending do not read the response."""
        with contextlib.suppress(HTTPException):
            await self._read(request, None)

    async def _read(self, request: Request, kept: bytearray | None) -> None:
        """Append the body to `kept`, if given. If it is too large, read it to its end."""
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
            sentence = "the connection was closed before the image had arrived"
            raise HTTPException(400, sentence) from None
        if length > _LARGEST:
            raise _too_large()


def _too_large() -> HTTPException:
    return HTTPException(413, f"the file is larger than {MEGABYTES} MB; send a smaller image")


def _file_of_form(data: bytearray, content_type: str) -> bytes:
    """The file in a form (RFC 7578), as sent by `curl -F image=@photo.png`.

    Raises:
        HTTPException: the form does not have exactly one file.
    """
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary("").encode()
    # Each part between boundaries: headers, an empty line, content.
    _, *parts = (b"\r\n" + data).split(b"\r\n--" + boundary, _MAX_FORM_PARTS)
    divided = [part.partition(b"\r\n\r\n") for part in parts] if boundary else []
    files = [content for lines, _, content in divided if b"filename" in lines]
    if len(files) != 1:
        raise HTTPException(
            422, f"the form has {len(files)} files; send one, as in curl -F image=@photo.jpg"
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
    """The most probable classes of an image, best first."""

    model: str
    classes: list[ClassProbability]


class ErrorResponse(BaseModel):
    """An error message."""

    detail: str


def application(
    classifier: Classifier, title: str = "", decoding: Decoding | None = None
) -> FastAPI:
    """The application: page at /, endpoints /predict and /attention, reference /openapi.json.

    Args:
        classifier: the model; /attention does not support ONNX graphs.
        title: the page's title; by default a question with the class names.
        decoding: how images are decoded, by default as the model's; EXIF orientation is always
            applied.
    """
    refused: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse} for status in (408, 413, 422, 500, 503)
    }
    service = FastAPI(
        title=title or f"locality: {classifier.name}",
        version=__version__,
        docs_url=None,  # the docs pages load external scripts
        redoc_url=None,
        responses=refused,
    )
    page = _page(classifier, title)
    bodies = RequestBodies()
    preprocessing = classifier.preprocessing
    mode = MODES.get(len(preprocessing.mean), "RGB")
    decode = Decoder(preprocessing, mode, decoding or preprocessing.decoding)
    # The decoder has already cropped the images.
    looking = replace(classifier, preprocessing=replace(preprocessing, crop_pct=1.0))
    # torch already uses all cores for one image.
    one = anyio.CapacityLimiter(1)

    async def answered(request: Request, answer: Callable[[Crops], T]) -> T:
        async with bodies.image(request) as data:
            try:
                crops = await decode(data)
                return await anyio.to_thread.run_sync(partial(answer, crops), limiter=one)
            except (Busy, BadImage, UserError) as error:
                status = {Busy: 503, NonFiniteLogits: 500}.get(type(error), 422)
                raise HTTPException(status, str(error)) from None
            except BrokenWorkerProcess:
                sentence = "the process that decoded the image was killed; probably out of memory"
                raise HTTPException(503, sentence) from None

    @service.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show() -> str:
        return page

    @service.post("/predict", openapi_extra=_IMAGE)
    async def predict(request: Request) -> Prediction:
        """The five most probable classes of the image in the body."""

        def look(crops: Crops) -> dict[str, float]:
            return looking.top_classes(looking([crops.image])[0])

        found = await answered(request, look)
        # Names may contain characters that are invalid in UTF-8.
        named = [ClassProbability(name=printable(name), probability=p) for name, p in found.items()]
        return Prediction(model=classifier.name, classes=named)

    @service.post("/attention", openapi_extra=_IMAGE, response_class=HTMLResponse)
    async def attention(request: Request) -> str:
        """An HTML page with the attention of all layers and heads for the image in the body."""

        def look(crops: Crops) -> str:
            return explorer_page([looking], [crops.image], ["your image"], [crops.shown])

        return await answered(request, look)

    @service.exception_handler(AnyHTTPException)
    async def refuse(request: Request, error: AnyHTTPException) -> JSONResponse:
        if error.status_code in (404, 405):
            await bodies.drop(request)
        sentence = {
            404: "not found; open / for the page, or POST an image to /predict or /attention",
            405: f"{request.method} is not supported; POST an image to /predict or /attention",
        }.get(error.status_code, error.detail)
        return JSONResponse({"detail": sentence}, error.status_code, error.headers)

    @service.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "internal server error; see the server's log"}, 500)

    return service


def _page(classifier: Classifier, title: str = "") -> str:
    return render(
        "locality.report",
        "serve.html",
        title=title or _question(classifier),
        name=classifier.name,
        size=classifier.preprocessing.size,
        megabytes=MEGABYTES,
    )


def _question(classifier: Classifier) -> str:
    """A title such as "coat, shirt or t-shirt?"; the model's name without class names."""
    *names, last = map(printable, classifier.classes or [classifier.name])
    if len(names) >= _MAX_NAMED:
        return f"Which of {len(names) + 1:,} classes?"
    return f"{', '.join(names)} or {last}?" if names else last


def content_policy(classifier: Classifier, framed: bool) -> str:
    """The page's Content-Security-Policy: no external resources, only its own scripts.

    It also applies to the explorer's page, a frame without a URL, which inherits the policy.

    Args:
        classifier: the page's model.
        framed: allow other pages to show it in a frame.
    """
    explorer = render("locality.analysis", "explorer.html", data="", blobs=[], models=[])
    scripts = [
        b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in re.findall("<script>(.*?)</script>", _page(classifier) + explorer, re.DOTALL)
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
