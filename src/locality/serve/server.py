"""The uvicorn server: host checks, timeouts and shutdown.

Any web page that the user visits can send requests to this machine and, through DNS rebinding, read
the responses. So a request must name a known host, and a POST must come from the page itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
from asyncio import TimerHandle, Transport
from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import FrameType
from typing import NoReturn

import h11
import psutil
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from locality.checkpoints.api import Classifier
from locality.data.config import Decoding
from locality.errors import UserError
from locality.serve.application import application, content_policy

# Seconds until a connection is closed whose request's header has not arrived, or whose client has
# not read a response that fills the buffer.
_HEADER_TIMEOUT = 10
_WRITE_TIMEOUT = 60
# Seconds to finish open requests after Ctrl-C.
_SHUTDOWN_SECONDS = 2
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s\[\]:/?#@]+))(?::\d*)?")


class HostCheck:
    """Middleware that rejects requests to unknown hosts and POSTs from other pages.

    Args:
        answered: the application.
        hosts: known names and addresses; `*` matches any characters.
    """

    def __init__(self, answered: ASGIApp, hosts: Sequence[str]) -> None:
        self._answered = answered
        self._hosts = [host.lower() for host in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or respond with an error."""
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
        # The address of the connection itself cannot be rebound.
        known = [*self._hosts, scope["server"][0]]
        if not named or not any(fnmatchcase(name, pattern) for pattern in known):
            return 400, f"unknown host '{host}'; start the server with --hosts to allow it"
        origin = headers.get("origin")
        if origin is None or scope["method"] in ("GET", "HEAD"):
            return None
        if origin.lower().partition("://")[2] != host:
            return 403, f"a page of {origin} may not POST to {host}; a proxy must forward the host"
        return None


class _Connection(H11Protocol):
    """uvicorn's protocol with timeouts for request headers and for reading responses.

    uvicorn's keep-alive timeout runs between requests and ends with the first byte of the next one.
    Here it starts with the connection and ends with the last byte of the header.
    """

    _reading: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        self.conn.receive_data(data)
        self.handle_events()  # stops the timeout when a header is complete

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # discards the application's response
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # in the middle of another response
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(_WRITE_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._reading is not None:
            self._reading.cancel()


class _Server(uvicorn.Server):
    """uvicorn's server with a time limit on shutdown."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        seconds = 0 if self.should_exit else _SHUTDOWN_SECONDS
        super().handle_exit(sig, frame)
        ending = threading.Timer(seconds, _end, [128 + sig])
        ending.daemon = True
        ending.start()


def _end(code: int) -> NoReturn:
    """End this process and its children, even if a thread is still running the model.

    Nothing is left to write, and unloading torch regularly would take seconds.
    """
    for decoder in psutil.Process().children():
        decoder.kill()
    os._exit(code)


def serve(
    classifier: Classifier,
    host: str,
    port: int,
    hosts: Sequence[str] = (),
    title: str = "",
    decoding: Decoding | None = None,
) -> NoReturn:
    """Serve until interrupted, finish open requests for up to two seconds, then end the process.

    Prints the page's URL when ready.

    Args:
        classifier: the model.
        host: address to listen on; 127.0.0.1 accepts connections from this machine only.
        port: the port; 0 for any free one.
        hosts: further host names of the server; "*" allows all, and lets other pages show this one
            in a frame.
        title: the page's title; by default a question with the class names.
        decoding: how images are decoded, by default as the model's; EXIF orientation is always
            applied.

    Raises:
        UserError: cannot listen on the address, or a host name is invalid.
    """
    for name in hosts:
        if not _HOST.fullmatch(name.lower()):
            raise UserError(f"invalid host name '{name}' in hosts; give a name such as me.example")
    framed = "*" in hosts
    headers = [
        ("content-security-policy", content_policy(classifier, framed)),
        ("x-content-type-options", "nosniff"),
        *([] if framed else [("x-frame-options", "DENY")]),
    ]
    known = ["localhost", socket.gethostname(), host, *hosts]
    config = uvicorn.Config(
        HostCheck(application(classifier, title, decoding), known),
        http=_Connection,
        ws="none",
        log_level="error",
        server_header=False,
        headers=headers,
        timeout_keep_alive=_HEADER_TIMEOUT,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}, port {port} ({error.strerror}); give another --port"
        ) from error
    shown = f"[{host}]" if ":" in host else host
    print(f"http://{shown}:{listening.getsockname()[1]}", flush=True)
    # At shutdown asyncio may warn about an unknown child process, a decoder that was killed.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with contextlib.suppress(KeyboardInterrupt):
        _Server(config).run(sockets=[listening])
    _end(128 + signal.SIGINT)
