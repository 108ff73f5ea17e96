"""The uvicorn server: host checks, timeouts and shutdown.

A page that somebody visits can send requests to this machine, and through DNS rebinding it could
read the responses. Hence a request has to name a known host, and a POST has to come from the page
itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import threading
from asyncio import TimerHandle, Transport
from collections.abc import Sequence
from fnmatch import fnmatchcase
from http import HTTPStatus
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
from locality.data.config import DEFAULT_DECODING, Decoding
from locality.errors import UserError
from locality.serve.application import application, content_policy

# For a request's header to come, and for an answer to be read, once it is more than is buffered.
_HEADER_TIMEOUT = 10
_WRITE_TIMEOUT = 60
# For requests to be answered after Ctrl-C.
_SHUTDOWN_SECONDS = 2
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


class _Connection(H11Protocol):
    """uvicorn's, where a request's header has to be whole in time, and an answer is read in time.

    uvicorn has a time between requests, which ends with the first byte of the next; here it ends
    with the last byte of its header, and begins with the connection.
    """

    _reading: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        self.conn.receive_data(data)
        self.handle_events()  # ends the time where a header is whole

    def timeout_keep_alive_handler(self) -> None:
        if self.conn.trailing_data[0] and not self.transport.is_closing():
            sentence = f"the request's header did not arrive within {_HEADER_TIMEOUT} seconds"
            self._refuse(408, sentence)
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no request of HTTP/1.1")

    def _refuse(self, status: int, sentence: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # what the application answers now goes nowhere
        body = json.dumps({"detail": sentence}).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reason = HTTPStatus(status).phrase.encode()
            answer = h11.Response(status_code=status, headers=headers, reason=reason)
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
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
    """uvicorn's server, which stops in time whatever it is doing."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        seconds = 0 if self.should_exit else _SHUTDOWN_SECONDS
        super().handle_exit(sig, frame)
        ending = threading.Timer(seconds, _end, [128 + sig])
        ending.daemon = True
        ending.start()


def _end(code: int) -> NoReturn:
    """End this process and all below it, although a thread of it may be looking at an image.

    Nothing is left to write, and Python takes seconds to take torch apart.
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

    Raises:
        UserError: if the address cannot be listened at, or a host is no name.
    """
    for name in hosts:
        if not _HOST.fullmatch(name.lower()):
            raise UserError(f"hosts has '{name}'; give a name alone, such as me.example")
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
            f"{host}, port {port}, cannot be listened at ({error.strerror}); give another --port"
        ) from error
    shown = f"[{host}]" if ":" in host else host
    print(f"http://{shown}:{listening.getsockname()[1]}", flush=True)
    # At the end it may say that it did not know a decoder's process, which is then gone as well.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with contextlib.suppress(KeyboardInterrupt):
        _Server(config).run(sockets=[listening])
    _end(128 + signal.SIGINT)
