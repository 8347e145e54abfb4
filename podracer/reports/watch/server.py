"""A small server of the live page: one page, its changes as they happen, and films.

Everything is answered from what a `Watcher` gives; no path of a request reaches the disk.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import html
import http.server
import json
import math
import os
import re
import socket
import sys
import time
from collections import Counter
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any

from podracer.io.address import LOOPBACK, family_of, host_in, is_of_another_site, url_of
from podracer.io.edits import open_file
from podracer.reports.page import STYLE, charts_script, hash_of, plotly_script
from podracer.reports.watch.watcher import Parts, Watcher

_FILM = re.compile(r"/film/([0-9]{1,4})")
_PLOTLY = f"/plotly-{version('plotly')}.js"  # a browser keeps it
_SECONDS = 0.5  # between two looks for changes
_SIGN_OF_LIFE = 10.0  # seconds after which a silent connection is tried
_PATIENCE = 30.0  # seconds in which a browser takes or sends something
_PIECE = 1 << 20  # bytes of a film that are read at a time
_VIEWERS, VIEWERS_OF_CLIENT = 32, 16  # connections that wait for changes
CONNECTIONS = 32  # others that are open at a time
SLOWEST_REQUEST = 10.0  # seconds in which it arrives, from the first byte to the last


class LiveServer(http.server.ThreadingHTTPServer):
    """Server of the live page at `address`, which listens from the start.

    Raises `OSError` if it cannot. It answers no page of another site in a browser, and on the
    loopback only requests by the name of this machine. Of too many connections the oldest ends.
    """

    daemon_threads = True

    def __init__(self, watcher: Watcher, host: str, port: int) -> None:
        self.watcher = watcher
        self.viewers: Counter[str] = Counter()  # by address
        # Connections but those of viewers, oldest first, and when the wait for a request began.
        self.begun: dict[Any, float] = {}
        self.names = LOOPBACK if host in LOOPBACK else None  # None: any
        self.address_family = family_of(host)
        super().__init__((host, port), _Handler)

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"{url_of(str(host), port)}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread; where there are many, the oldest makes room."""
        self.begun[request] = time.monotonic()
        for connection in list(self.begun)[:-CONNECTIONS]:
            self._end(connection)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that was answered, or that left."""
        self.begun.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End the connections whose requests take too long to arrive."""
        for connection, begin in list(self.begun.items()):
            if time.monotonic() - begin > SLOWEST_REQUEST:
                self._end(connection)

    def _end(self, connection: Any) -> None:
        self.begun.pop(connection, None)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, unless a browser went away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LiveServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _PATIENCE
    server_version, sys_version = "podracer", ""

    def do_POST(self) -> None:
        match = _FILM.fullmatch(self.path)
        if self._is_refused():
            return
        if match and self.server.watcher.start_film(int(match[1])):
            self._send("text/plain", b"")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self._is_refused():
            return
        if path == "/":
            page = live_page(self.server.watcher).encode(errors="replace")
            self._send("text/html; charset=utf-8", page)
        elif path == _PLOTLY:
            self._send("text/javascript", _compressed_plotly(), Content_Encoding="gzip")
        elif path == "/events":
            self._stream()
        elif match := _FILM.fullmatch(path):
            self._send_film(self.server.watcher.film(int(match[1])))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing for each request."""

    def end_headers(self) -> None:
        """Forbid other sites to show or embed any answer."""
        is_constant = self.path == _PLOTLY
        cache = {"Cache-Control": "max-age=31536000" if is_constant else "no-store"}
        for name, value in {**_HEADERS, **cache}.items():
            self.send_header(name, value)
        super().end_headers()

    def _is_refused(self) -> bool:
        """Return whether the request, which has arrived, was refused as another site's."""
        self.server.begun[self.connection] = math.inf
        if not self._is_meant():
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return True
        if self._is_of_another_site():
            self.send_error(HTTPStatus.FORBIDDEN)
            return True
        return False

    def _is_meant(self) -> bool:
        return self.server.names is None or host_in(self._host) in self.server.names

    def _is_of_another_site(self) -> bool:
        origin = self.headers.get("Origin", f"//{self._host}")
        return origin.rpartition("//")[2] != self._host or is_of_another_site(self.headers.get)

    @property
    def _host(self) -> str:
        return self.headers.get("Host", "")

    def _head(self, kind: str, status: HTTPStatus = HTTPStatus.OK, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _send(self, kind: str, body: bytes, **headers: str) -> None:
        self._head(kind, HTTPStatus.OK, Content_Length=str(len(body)), **headers)
        self.wfile.write(body)

    def _send_film(self, path: Path | None) -> None:
        try:
            file = None if path is None else open_file(path)
        except OSError:
            file = None
        if path is None or file is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            begin, end = 0, size
            asked = re.fullmatch(
                r"bytes=([0-9]{1,15})-([0-9]{1,15})?", self.headers.get("Range", "")
            )
            if asked and int(asked[1]) < size:
                begin = int(asked[1])
                end = min(size, max(begin, int(asked[2] or size)) + 1)
            headers = {"Accept_Ranges": "bytes", "Content_Length": str(end - begin)}
            status = HTTPStatus.OK
            if end - begin < size:
                status = HTTPStatus.PARTIAL_CONTENT
                headers["Content_Range"] = f"bytes {begin}-{end - 1}/{size}"
            self._head("video/mp4" if path.suffix == ".mp4" else "image/gif", status, **headers)
            file.seek(begin)
            for place in range(begin, end, _PIECE):
                self.wfile.write(file.read(min(_PIECE, end - place)))

    def _stream(self) -> None:
        """Send what changes, until the browser is gone."""
        client, viewers = self.client_address[0], self.server.viewers
        if viewers.total() >= _VIEWERS or viewers[client] >= VIEWERS_OF_CLIENT:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        viewers[client] += 1
        self.server.begun.pop(self.connection, None)
        try:
            self._head("text/event-stream")
            shown: Parts = {}
            silent_since = time.monotonic()
            while True:
                parts = self.server.watcher.parts()
                if parts is not shown or time.monotonic() - silent_since > _SIGN_OF_LIFE:
                    changed = {name: x for name, x in parts.items() if shown.get(name) != x}
                    event = {"order": list(parts), "parts": changed}
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                    shown, silent_since = parts, time.monotonic()
                time.sleep(_SECONDS)
        except OSError:
            pass  # the browser has left
        finally:
            viewers.subtract([client])


@functools.cache
def _compressed_plotly() -> bytes:
    return gzip.compress(plotly_script().encode())


def live_page(watcher: Watcher) -> str:
    """Return the page as it is now; its script then replaces the parts that change."""
    parts = "".join(f'<div id="{name}">{x}</div>' for name, x in watcher.parts().items())
    title = html.escape(watcher.title)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><style>{STYLE}{_STYLE}</style></head>
<body><small>podracer watch, <span id="connection">not connected</span></small><h1>{title}</h1>
<main>{parts}</main><script src="{_PLOTLY}"></script><script>{_SCRIPT}</script></body></html>
"""


_LIVE_SCRIPT = """
const main = document.querySelector("main"), connection = document.getElementById("connection");
const source = new EventSource("events");
source.onopen = () => { connection.textContent = "live"; };
source.onerror = () => { connection.textContent = "not connected: trying again"; };
main.addEventListener("click", (event) => {
  const { film } = event.target.dataset;
  if (film) { event.target.disabled = true; fetch(`film/${film}`, { method: "POST" }); }
});
source.onmessage = (event) => {
  const { order, parts } = JSON.parse(event.data);
  for (const part of [...main.children]) if (!order.includes(part.id)) part.remove();
  order.forEach((name, place) => {
    let part = document.getElementById(name);
    if (!part) { part = document.createElement("div"); part.id = name; }
    if (main.children[place] !== part) main.insertBefore(part, main.children[place] ?? null);
    if (name in parts) fill(part, parts[name]);
  });
};
"""
_SCRIPT = charts_script() + _LIVE_SCRIPT
_POLICY = (
    f"default-src 'none'; script-src 'self' {hash_of(_SCRIPT)}; style-src 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = """
h1 { margin-bottom: 1.5rem }
figure { margin: 0 } figure img, figure video { max-width: 100%; max-height: 24rem;
  image-rendering: pixelated }
figcaption { color: var(--soft); font-size: .85rem }
"""
