"""A page and an endpoint to try a model: an image in; classes, and what every head looks at, out.

An image is the body of a request, and a request has nothing else: no file is named, none is
written. One image at a time is decoded and looked at, so that memory does not grow with requests.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse
from PIL import Image
from pydantic import BaseModel
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect

from locality import __version__
from locality.analysis.explorer import explorer_page
from locality.checkpoints.open import Classifier
from locality.data.config import Decoding
from locality.data.decoding import decode
from locality.data.sources import BadImage
from locality.errors import UserError
from locality.templates import render

MEGABYTES = 20
"""Largest file that is taken."""
# What a telephone takes; turned as it was held.
_DECODING = Decoding(exif=True, max_pixels=50_000_000)
# More is not even read on, and who is slower is not waited for.
_MOST_READ = 400_000_000
_SECONDS = 60
_AT_ONCE = 64

_IMAGE = {
    "requestBody": {
        "required": True,
        "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}},
    }
}

T = TypeVar("T")


class Named(BaseModel):
    """A class and its probability."""

    name: str
    probability: float


class Prediction(BaseModel):
    """The most likely classes of an image, best first."""

    model: str
    classes: list[Named]


class Refusal(BaseModel):
    """Why a request was not answered, in a sentence."""

    detail: str


def application(classifier: Classifier) -> FastAPI:
    """The page at /, the endpoints /predict and /attention, and their description, /openapi.json.

    Args:
        classifier: which answers; a graph has no attention to show.
    """
    refused: dict[int | str, dict[str, Any]] = {
        status: {"model": Refusal} for status in (408, 413, 422)
    }
    service = FastAPI(
        title=f"locality: {classifier.name}",
        version=__version__,
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        responses=refused,
    )
    page = render(
        "locality.report",
        "serve.html",
        title=classifier.name,
        size=classifier.preprocessing.size,
        megabytes=MEGABYTES,
        version=__version__,
    )
    # torch takes all processors for one image as it is.
    one = anyio.CapacityLimiter(1)

    async def answered(request: Request, answer: Callable[[Image.Image], T]) -> T:
        data = await _body(request)
        return await anyio.to_thread.run_sync(partial(_answered, data, answer), limiter=one)

    @service.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show() -> str:
        return page

    @service.post("/predict", openapi_extra=_IMAGE)
    async def predict(request: Request) -> Prediction:
        """The five most likely classes of the image in the body."""

        def look(image: Image.Image) -> dict[str, float]:
            return classifier.most_likely(classifier([image])[0])

        found = await answered(request, look)
        named = [Named(name=name, probability=share) for name, share in found.items()]
        return Prediction(model=classifier.name, classes=named)

    @service.post("/attention", openapi_extra=_IMAGE, response_class=HTMLResponse)
    async def attention(request: Request) -> str:
        """A page of the image in the body: attention of every layer and head, and gates."""
        return await answered(
            request, lambda image: explorer_page([classifier], [image], ["your image"])
        )

    @service.exception_handler(AnyHTTPException)
    async def refuse(request: Request, error: AnyHTTPException) -> JSONResponse:
        if error.status_code in (404, 405):
            # Nothing of the body is read yet: who still writes does not hear the answer.
            with contextlib.suppress(HTTPException):
                await _body(request)
        sentence = {
            404: "there is nothing here: / is a page, /predict and /attention take an image",
            405: f"{request.method} is not answered here; POST an image to /predict or /attention",
        }.get(error.status_code, error.detail)
        return JSONResponse({"detail": sentence}, error.status_code, error.headers)

    return service


async def _body(request: Request) -> bytes:
    """What was sent. What is too much is dropped as it comes, and read to its end all the same.

    Raises:
        HTTPException: if it is too much, or takes too long.
    """
    kept, length = bytearray(), 0
    try:
        with anyio.fail_after(_SECONDS):
            async for piece in request.stream():
                length += len(piece)
                if length > _MOST_READ:
                    break
                if length <= MEGABYTES * 1_000_000:
                    kept += piece
                else:
                    kept.clear()
    except TimeoutError:
        raise HTTPException(408, f"the image did not arrive within {_SECONDS} seconds") from None
    except ClientDisconnect:
        raise HTTPException(400, "the connection was closed before the image was there") from None
    if length > MEGABYTES * 1_000_000:
        raise HTTPException(413, f"the file has more than {MEGABYTES} MB; give a smaller image")
    return bytes(kept)


def _answered(data: bytes, answer: Callable[[Image.Image], T]) -> T:
    """What `answer` says of an image.

    Raises:
        HTTPException: if it is none that can be taken.
    """
    try:
        return answer(decode(data, _DECODING))
    except (BadImage, UserError) as error:
        raise HTTPException(422, str(error)) from None


def serve(classifier: Classifier, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Answer until interrupted.

    Args:
        classifier: which answers.
        host: the address to listen at; 127.0.0.1 is reached from this machine alone.
        port: 0 takes a free one.
        ready: is called with the page's address once it answers.

    Raises:
        UserError: if the address cannot be listened at.
    """
    config = uvicorn.Config(
        application(classifier),
        log_level="warning",
        limit_concurrency=_AT_ONCE,
        timeout_graceful_shutdown=5,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(
            f"{host}, port {port}, cannot be listened at ({error.strerror}); give another --port"
        ) from error
    shown = f"[{host}]" if ":" in host else host
    ready(f"http://{shown}:{listening.getsockname()[1]}")
    uvicorn.Server(config).run(sockets=[listening])
