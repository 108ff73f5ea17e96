"""A web page and HTTP endpoints that classify images and show the attention of all heads.

Any web page that the user visits can send requests to this machine and, through DNS rebinding, read
the responses. So a request must name a known host, and a POST must come from the page itself.
Images are limited in bytes and pixels; one at a time is decoded and classified, in a thread.
Requests cannot name files, and none are written.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import anyio
import anyio.to_thread
import h11
import psutil
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from PIL import Image
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from locality import __version__
from locality.analysis.explorer import explorer_page
from locality.checkpoints.api import Classifier
from locality.data.decoding import BadImage, decode
from locality.errors import NonFiniteLogits, UserError, printable, some, wrap_errors
from locality.templates import render

MEGABYTES = 20
"""Largest accepted file."""
_MAX_PIXELS = 50_000_000  # phone photographs
# With the largest files in all of them, a gigabyte.
_MAX_CONNECTIONS = 50
_BODY_SECONDS = 60
_SHUTDOWN_SECONDS = 2
_MAX_NAMED = 20  # classes on the page
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
_IMAGE = {"requestBody": {"required": True, "content": {"image/*": {}}}}

T = TypeVar("T")


def application(classifier: Classifier, title: str = "") -> FastAPI:
    """The application: page at /, endpoints /predict and /attention, reference /openapi.json.

    Images are decoded as the model's, but their EXIF orientation is always applied.

    Args:
        classifier: the model; /attention does not support ONNX graphs.
        title: the page's title; by default the model's name.

    Raises:
        UserError: the model cannot classify images.
    """
    with contextlib.suppress(NonFiniteLogits):  # may be this image's
        classifier([Image.new("RGB", (8, 8))])
    # The docs pages of FastAPI load external scripts.
    app = FastAPI(title=classifier.name, version=__version__, docs_url=None, redoc_url=None)
    page = render(
        "locality.report",
        "serve.html",
        title=title or printable(classifier.name),
        classes=some(map(printable, classifier.classes or ()), _MAX_NAMED, quote=""),
        name=classifier.name,
        size=classifier.preprocessing.size,
        megabytes=MEGABYTES,
    )
    settings = classifier.preprocessing.decoding
    settings = replace(settings, exif=True, max_pixels=min(settings.max_pixels, _MAX_PIXELS))
    one = anyio.CapacityLimiter(1)  # torch already uses all cores for one image

    async def with_image(request: Request, function: Callable[[Image.Image], T]) -> T:
        data = await _body(request)
        try:
            # Abandoned if the server shuts down.
            return await anyio.to_thread.run_sync(
                lambda: function(decode(data, settings)), limiter=one, abandon_on_cancel=True
            )
        except (BadImage, UserError) as error:
            status = 500 if isinstance(error, NonFiniteLogits) else 422
            raise HTTPException(status, str(error)) from None

    @app.api_route(
        "/", methods=["GET", "HEAD"], response_class=HTMLResponse, include_in_schema=False
    )
    async def show() -> str:
        return page

    @app.post("/predict", openapi_extra=_IMAGE)
    async def predict(request: Request) -> dict[str, Any]:
        """The five most probable classes of the image in the body, best first."""
        best = await with_image(
            request, lambda image: classifier.top_classes(classifier([image])[0])
        )
        # Names may contain characters that are invalid in UTF-8.
        named = [{"name": printable(name), "probability": p} for name, p in best.items()]
        return {"model": classifier.name, "classes": named}

    @app.post("/attention", openapi_extra=_IMAGE, response_class=HTMLResponse)
    async def attention(request: Request) -> str:
        """An HTML page with the attention of all layers and heads for the image in the body."""
        names = ["your image"]
        return await with_image(request, lambda image: explorer_page([classifier], [image], names))

    @app.middleware("http")
    async def own_page_only(
        request: Request, respond: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if request.method == "POST" and origin and origin.partition("://")[2] != host:
            sentence = f"a page of {origin} may not POST to {host}; a proxy must forward the host"
            return JSONResponse({"detail": sentence}, 403)
        response = await respond(request)
        response.headers.update(_HEADERS)
        return response

    return app


async def _body(request: Request) -> bytes:
    """The image in a request.

    Raises:
        HTTPException: too large, too slow, or a form.
    """
    if request.headers.get("content-type", "").lower().startswith("multipart/"):
        raise HTTPException(415, "send the image itself, as in curl --data-binary @photo.jpg")
    data, most = bytearray(), MEGABYTES * 1_000_000
    try:
        with anyio.fail_after(_BODY_SECONDS):
            # Read to the end even if too large: clients that are sending do not read responses.
            async for piece in request.stream():
                data += piece[: most + 1 - len(data)]
    except TimeoutError:
        raise HTTPException(408, f"no complete image within {_BODY_SECONDS} seconds") from None
    except ClientDisconnect:
        raise HTTPException(400, "the connection was closed") from None
    if len(data) > most:
        raise HTTPException(413, f"the file is larger than {MEGABYTES} MB; send a smaller image")
    return bytes(data)


def serve(
    classifier: Classifier, host: str, port: int, hosts: Sequence[str] = (), title: str = ""
) -> NoReturn:
    """Print the page's URL and serve until interrupted; then end the process.

    Args:
        classifier: the model.
        host: address to listen on; 127.0.0.1 accepts connections from this machine only.
        port: the port; 0 for any free one.
        hosts: further host names of the server, also `*.example`; "*" allows all.
        title: see `application`.

    Raises:
        UserError: see `application`; cannot listen on the address, or a host name is invalid.
    """
    addresses = [own.address for listed in psutil.net_if_addrs().values() for own in listed]
    # Older versions of starlette cut a name at its first colon, which leaves "[" of any IPv6
    # address; rebinding takes a DNS name.
    names = ["localhost", socket.gethostname(), host, *addresses, *hosts]
    known = ["[", *(f"[{name}]" if ":" in name else name for name in names)]
    app: ASGIApp = application(classifier, title)
    with wrap_errors("invalid name in hosts", AssertionError):
        app = TrustedHostMiddleware(app, known, www_redirect=False)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with wrap_errors(f"cannot listen on {host}, port {port}; give another --port", OSError):
        listening = socket.create_server((host, port), family=family)
    name = f"[{host}]" if ":" in host else host
    print(f"http://{name}:{listening.getsockname()[1]}", flush=True)
    config = uvicorn.Config(
        app,
        log_level="error",
        server_header=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    for logger in ("asyncio", "uvicorn.error"):
        logging.getLogger(logger).addFilter(_is_ours)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
    # The model may still be running in a thread.
    os._exit(130)  # as after Ctrl-C in a shell


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether an error is the server's: uvicorn logs a traceback for requests that are no HTTP."""
    return not (record.exc_info and isinstance(record.exc_info[1], h11.LocalProtocolError))
