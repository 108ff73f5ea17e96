"""The FastAPI application: a page, and the endpoints /predict and /attention; its uvicorn server.

An image is the body of a request, alone or as the one file of a form, within limits; a request has
nothing else: no file is named, none is written. Two images at a time are decoded, and one is
looked at.

A page that somebody visits can send requests to this machine, and through DNS rebinding it could
read the responses. Hence a request has to name a known host, and a POST has to come from the page
itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from email.message import Message
from fnmatch import fnmatchcase
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

import anyio
import anyio.to_thread
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse
from PIL import Image
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from locality import __version__
from locality.analysis.explorer import explorer_page
from locality.checkpoints.api import MODES, Classifier
from locality.data import decode
from locality.data.config import DEFAULT_DECODING, Decoding
from locality.data.decoding import convert
from locality.data.preprocessing import high_resolution_crop, resize_and_crop
from locality.data.sources import BadImage
from locality.errors import NonFiniteLogits, UserError, printable
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
# Of one image, the pixels before and after a turn are in memory together, 8 bytes of each.
_MAX_PIXELS, _DECODED_AT_ONCE = 50_000_000, 2
# Connections at a time; others get 503.
_MAX_CONNECTIONS = 50


async def read_image(request: Request) -> bytes:
    """The bytes of the image that was sent.

    What is too much is dropped, and read to its end: a client that still sends does not read the
    response.
    """
    kept, length = bytearray(), 0
    try:
        with anyio.fail_after(_SECONDS):
            async for piece in request.stream():
                length += len(piece)
                if length <= _LARGEST:
                    kept += piece
                elif length > _MAX_READ_BYTES:
                    break
    except TimeoutError:
        sentence = f"the image did not arrive within {_SECONDS} seconds"
        raise HTTPException(408, sentence) from None
    except ClientDisconnect:
        sentence = "the connection was closed before the image was there"
        raise HTTPException(400, sentence) from None
    data, content_type = bytes(kept), request.headers.get("content-type", "")
    if length <= _LARGEST and content_type.startswith("multipart/"):
        data = _file_of_form(data, content_type)
    if length > _LARGEST or len(data) > MEGABYTES * 1_000_000:
        sentence = f"the file has more than {MEGABYTES} MB; give a smaller image"
        raise HTTPException(413, sentence)
    return data


def _file_of_form(data: bytes, content_type: str) -> bytes:
    """The one file in a form (RFC 7578), as `curl -F image=@photo.png` sends it."""
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


class Crops(NamedTuple):
    """An image as the model takes it, but for the normalisation, and with more pixels to show."""

    image: Image.Image
    shown: Image.Image


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
    preprocessing = classifier.preprocessing
    mode = MODES.get(len(preprocessing.mean), "RGB")
    limit = min(_MAX_PIXELS, decoding.max_pixels)
    settings = replace(decoding, exif=True, max_pixels=limit)
    # Of images that are cut already.
    looking = replace(classifier, preprocessing=replace(preprocessing, crop_pct=1.0))
    # torch takes all processors for one image as it is.
    one, few = anyio.CapacityLimiter(1), anyio.CapacityLimiter(_DECODED_AT_ONCE)

    def crop(data: bytes) -> Crops:
        image = decode(data, settings)
        cut = resize_and_crop(convert(image, mode), preprocessing)
        return Crops(cut, high_resolution_crop(image, preprocessing))

    async def answered(request: Request, answer: Callable[[Crops], T]) -> T:
        data = await read_image(request)
        try:
            crops = await anyio.to_thread.run_sync(crop, data, limiter=few)
            return await anyio.to_thread.run_sync(partial(answer, crops), limiter=one)
        except NonFiniteLogits as error:
            raise HTTPException(500, str(error)) from None
        except (BadImage, UserError) as error:
            raise HTTPException(422, str(error)) from None

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
        sentence = {
            404: "there is nothing here: / is a page, /predict and /attention take an image",
            405: f"{request.method} is not answered here; POST an image to /predict or /attention",
        }.get(error.status_code, error.detail)
        return JSONResponse({"detail": sentence}, error.status_code, error.headers)

    @service.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "an error of the server, which its log shows"}, 500)

    return service


def _page(classifier: Classifier, title: str) -> str:
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


# For requests to be answered after Ctrl-C.
_SHUTDOWN_SECONDS = 2
_NONE = "'none'"
# Nothing from elsewhere, in the page and in the explorer's, which is in a frame of it.
_POLICY = (
    f"default-src {_NONE}; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    f"img-src data: blob:; connect-src 'self' data:; base-uri {_NONE}; form-action {_NONE};"
)
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s\[\]:/?#@]+))(?::\d*)?")


class HostCheck:
    """Answers requests to hosts that are known, and posts from no other page.

    Args:
        answered: the application.
        hosts: names and addresses; `*` stands for any letters.
    """

    def __init__(self, answered: ASGIApp, hosts: Sequence[str]) -> None:
        self._answered = answered
        self._hosts = [host.lower() for host in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or say why it is not answered."""
        if refusal := scope["type"] == "http" and self._refusal(scope):
            status, sentence = refusal
            await JSONResponse({"detail": sentence}, status)(scope, receive, send)
        else:
            await self._answered(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        named = _HOST.fullmatch(host)
        name = (named[1] or named[2]) if named else ""
        # The address that was connected to is no name that leads here.
        known = [*self._hosts, scope["server"][0]]
        if not named or not any(fnmatchcase(name, pattern) for pattern in known):
            return 400, f"the host '{host}' is not known here; start with --hosts to add names"
        origin = headers.get("origin")
        if origin is None or scope["method"] in ("GET", "HEAD"):
            return None
        if origin.lower().partition("://")[2] != host:
            return 403, f"a page of {origin} may not ask {host}; a proxy has to pass the host on"
        return None


class _Server(uvicorn.Server):
    """uvicorn's server, which stops in time whatever it is doing."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        seconds = 0 if self.should_exit else _SHUTDOWN_SECONDS
        super().handle_exit(sig, frame)
        # A thread may be looking at an image, and Python takes seconds to take torch apart.
        ending = threading.Timer(seconds, os._exit, [128 + sig])
        ending.daemon = True
        ending.start()


def serve_model(
    classifier: Classifier,
    host: str,
    port: int,
    hosts: Sequence[str] = (),
    title: str = "",
    decoding: Decoding = DEFAULT_DECODING,
) -> NoReturn:
    """Answer until interrupted, and for two seconds more; then end the process.

    Prints the page's address once it answers.

    Args:
        classifier: which answers.
        host: the address to listen at; 127.0.0.1 is reached from this machine alone.
        port: 0 takes a free one.
        hosts: names that the page is reached by, beside the machine's own; with "*" all are, and
            other pages may show this one in a frame.
        title: of the page; a question about its classes unless given.
        decoding: as of the model's images; they are turned as they were held in any case.
    """
    for name in hosts:
        if not _HOST.fullmatch(name.lower()):
            raise UserError(f"hosts has '{name}'; give a name alone, such as me.example")
    framed = "*" in hosts
    headers = [
        ("content-security-policy", f"{_POLICY} frame-ancestors {'*' if framed else _NONE}"),
        ("x-content-type-options", "nosniff"),
        *([] if framed else [("x-frame-options", "DENY")]),
    ]
    known = ["localhost", socket.gethostname(), host, *hosts]
    config = uvicorn.Config(
        HostCheck(application(classifier, title, decoding), known),
        http="h11",
        ws="none",
        log_level="error",
        limit_concurrency=_MAX_CONNECTIONS,
        server_header=False,
        headers=headers,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(
            f"{host}, port {port}, cannot be listened at ({error.strerror}); give another --port"
        ) from error
    shown = f"[{host}]" if ":" in host else host
    print(f"http://{shown}:{listening.getsockname()[1]}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        _Server(config).run(sockets=[listening])
    os._exit(128 + signal.SIGINT)
