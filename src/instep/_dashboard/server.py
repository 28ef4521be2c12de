"""A web server for one page and its state, on the loopback interface.

Other users of the machine do not know the secret in the address; pages of other sites
neither, and they cannot read answers that name another host (DNS rebinding). A step
only appends to a ring; all else is done here when the page asks.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import webbrowser
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from time import perf_counter
from typing import Any

from instep._closing import Closing
from instep._dashboard.state import Digest
from instep._errors import ArgumentError
from instep._events import Events, Happening
from instep._statistics import Statistics

_HOST = "127.0.0.1"
# Happenings that wait to be digested; the oldest are forgotten beyond that.
_RING = 20_000
# Seconds between looks at the ring, and until a silent connection is closed.
_POLL_S, _SILENCE_S = 0.1, 5.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Dashboard(Closing):
    """A live page; made by `pool.dashboard`.

    Ends with `close`, at the end of its `with` block, or with the pool.

    Attributes:
        url: its address, with a secret in it; whoever knows it sees the page.
    """

    def __init__(
        self,
        events: Events,
        statistics: Callable[[], Callable[[], Statistics] | None],
        port: int | None = None,
    ) -> None:
        self._events, self._statistics = events, statistics
        self._lock = threading.Lock()
        self._ring: deque[Happening] = deque(maxlen=_RING)
        self.note = self._ring.append
        token = secrets.token_urlsafe(16)
        self._server = _open(port, f"/{token}/", self)
        self.url = f"http://{_HOST}:{self._server.server_port}/{token}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_S,),
            name="instep dashboard",
            daemon=True,
        )
        self._digest = Digest(perf_counter())
        events.watch(self)
        self._thread.start()

    def show(self) -> None:
        """Opens the page in the user's browser, if there is one."""
        webbrowser.open(self.url)

    def close(self) -> None:
        """Ends the page: no thread and no port is left. Calling it twice is fine."""
        self._events.unwatch(self)
        if self._thread.is_alive():  # not so in a fork
            self._server.shutdown()
            self._thread.join()
        self._server.end()

    def digest(self) -> None:
        """Takes in what waits in the ring."""
        with self._lock, contextlib.suppress(IndexError):
            while True:
                self._digest.note(self._ring.popleft())

    def state(self) -> dict[str, Any] | None:
        """What the page shows; None once the pool is gone."""
        if (statistics := self._statistics()) is None:
            return None
        self.digest()
        snapshot = statistics()
        with self._lock:
            under_way = self._events.under_way()
            return self._digest.view(perf_counter(), snapshot, under_way)


def _open(port: int | None, root: str, dashboard: Dashboard) -> _Server:
    """A server that listens, or an error that says why it does not."""
    if port is not None and not (type(port) is int and 0 <= port < 2**16):
        raise ArgumentError(
            f"port={port!r}; expected a whole number from 0 to 65535, or None"
        )
    try:
        return _Server((_HOST, port or 0), root, dashboard)
    except OSError as error:
        raise ArgumentError(
            f"port={port} of {_HOST} cannot be used: {error.strerror}. Expected a port "
            "that no other program has; try another one, or port=0 for any that is free"
        ) from error


class _Server(ThreadingHTTPServer):
    """Answers each request in a thread; knows them all, to end them."""

    def __init__(
        self, address: tuple[str, int], root: str, dashboard: Dashboard
    ) -> None:
        super().__init__(address, _Handler)
        self.dashboard, self.root = dashboard, root
        self.hosts = [f"{name}:{self.server_port}" for name in (_HOST, "localhost")]
        self._open: dict[threading.Thread, socket.socket] = {}

    def service_actions(self) -> None:
        """Called between requests: the ring shall not run over."""
        self.dashboard.digest()

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="instep dashboard",
            daemon=True,
        )
        self._open[thread] = request
        thread.start()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.pop(threading.current_thread(), None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is no reason to print anything."""

    def end(self) -> None:
        """Closes every connection and the port."""
        self.server_close()
        for thread, request in list(self._open.items()):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                request.shutdown(socket.SHUT_RDWR)
            # It may be one of ours that has dropped the last reference to the pool.
            if thread is not threading.current_thread():
                thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SILENCE_S  # browsers open connections ahead of time, and keep silent
    server_version, sys_version = "instep", ""

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self._answer(403, "text/plain", b"another host is meant\n")
        elif self._asks_for(""):
            page = files("instep._dashboard").joinpath("page.html").read_bytes()
            self._answer(200, "text/html; charset=utf-8", page)
        elif self._asks_for("state"):
            state = self.server.dashboard.state()
            content = json.dumps(state, allow_nan=False).encode()
            self._answer(200, "application/json", content)
        else:
            self._answer(404, "text/plain", b"there is nothing here\n")

    def _asks_for(self, name: str) -> bool:
        return secrets.compare_digest(
            self.path.encode(), (self.server.root + name).encode()
        )

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing; the script's output is the script's."""
