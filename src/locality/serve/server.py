"""The uvicorn server: host checks and shutdown.

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
from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import FrameType
from typing import NoReturn

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from locality.checkpoints.api import Classifier
from locality.data.config import DEFAULT_DECODING, Decoding
from locality.errors import UserError
from locality.serve.application import application

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
