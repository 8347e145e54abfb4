"""The service over HTTP and JSON, by Starlette and uvicorn."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import math
import resource
import time
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from podracer_deploy.serve.address import LOOPBACK, host_in, is_of_another_site
from podracer_deploy.serve.arrays import RequestError
from podracer_deploy.serve.service import Question, Service

_INLINE = 2**16  # bytes of a body that the event loop parses itself
_THROWN_AWAY = 64 * 2**20  # bytes of a body that is too long
PATIENCE_SECONDS = 30.0  # seconds in which a request arrives, from its first byte to its last
_HEADERS = {"Cross-Origin-Resource-Policy": "same-origin", "X-Content-Type-Options": "nosniff"}

logger = logging.getLogger("podracer")


def make_app(service: Service, *, hosts: tuple[str, ...] = ("*",)) -> Starlette:
    """Return the ASGI application of a service; `hosts` are the names that requests may call it.

    `POST /act` answers `Service.act`, `GET /health` says what is served, and how fast.
    """
    seconds: collections.deque[float] = collections.deque(maxlen=1000)
    counts = collections.Counter[str]()
    start = time.monotonic()
    large = asyncio.Semaphore()  # one large body is parsed at a time

    async def question_in(request: Request) -> Question:
        body = await _read(request, service.max_bytes)
        if len(body) <= _INLINE:
            return service.read(parse(body))
        async with large:
            return await asyncio.to_thread(lambda: service.read(parse(body)))

    async def act(request: Request) -> Response:
        if (response := _refusal(request, hosts)) is not None:
            return response
        begin = time.perf_counter()
        counts["requests"] += 1
        try:
            answer, status = service.answer(await question_in(request)), 200
        except RequestError as error:
            answer, status = {"error": str(error)}, error.status
        except ClientDisconnect:
            counts["errors"] += 1
            return Response()  # nobody reads it
        except Exception:
            logger.exception("a request failed")
            answer, status = {"error": "the server failed at this request; its log says why."}, 500
        counts["errors"] += status != 200
        seconds.append(time.perf_counter() - begin)
        return JSONResponse(answer, status, _HEADERS)

    async def health(request: Request) -> Response:
        if (response := _refusal(request, hosts)) is not None:
            return response
        model = service.model
        p50, p99 = np.quantile(seconds or [math.nan], (0.5, 0.99)) * 1e3
        return JSONResponse(
            {
                "status": "ok",
                "model": model.name,
                "updates": model.updates,
                "pod": model.pod,
                "agent": model.agent,
                "environment": model.environment,
                "has_memory": model.policy.has_memory,
                "sessions": service.num_sessions,
                "seconds": round(time.monotonic() - start, 1),
                "requests": counts["requests"],
                "errors": counts["errors"],
                "milliseconds_p50": round(float(p50), 3) if seconds else None,
                "milliseconds_p99": round(float(p99), 3) if seconds else None,
            },
            headers=_HEADERS,
        )

    routes = [Route("/act", act, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes)


def _refusal(request: Request, hosts: tuple[str, ...]) -> Response | None:
    """Refuse what a page in a browser sends by a name of its own, or from another site."""
    if "*" in hosts:
        return None
    headers = request.headers
    host, origin = headers.get("host", ""), headers.get("origin")
    if host_in(host) not in hosts:
        wrong, status = repr(host), 400
    elif origin is not None and host_in(origin.partition("://")[2]) not in hosts:
        wrong, status = repr(origin), 403
    elif origin is None and is_of_another_site(headers.get):
        wrong, status = "a page of another site", 403
    else:
        return None
    error = f"only {', '.join(sorted(hosts))} may ask, not {wrong}."
    return JSONResponse({"error": error}, status, _HEADERS)


async def _read(request: Request, limit: int) -> bytes:
    """Return the body. Raises `RequestError` for one that is longer than the limit.

    A little more is read and thrown away, since most clients read no answer before they have sent.
    """
    length = request.headers.get("content-length", "0")
    size, body = 0, bytearray()
    if len(length) < 20 and int(length) <= limit + _THROWN_AWAY:  # the protocol saw that it is one
        async for part in request.stream():
            size += len(part)
            body += part if size <= limit else b""
            if size > limit + _THROWN_AWAY:
                break
        if size <= limit:
            return bytes(body)
    raise RequestError(f"a request for this model has at most {limit:,} bytes.", status=413)


def parse(body: bytes) -> dict[str, Any]:
    """Return the object of a request. Raises `RequestError` for what is none."""

    def refuse(constant: str) -> float:
        raise RequestError(f"a request cannot hold {constant}.")

    try:
        value = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RequestError("a request must be one JSON object.") from error
    if not isinstance(value, dict):
        raise RequestError("a request must be one JSON object.")
    return value


class _Connection(H11Protocol):
    """Connection that is closed if a request takes long to arrive, however slowly it comes.

    Where three quarters of the files that the process may open are such, the oldest gives way.
    """

    _deadline: asyncio.TimerHandle | None = None  # while it waits for a request
    _since = 0.0  # when the wait began

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect(True)
        connections = (x for x in self.connections if isinstance(x, _Connection))
        waiting = [connection for connection in connections if connection._deadline is not None]
        if len(waiting) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4:
            oldest = min(waiting, key=lambda connection: connection._since)
            oldest._expect(False)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle = self.cycle  # newest request; complete where this is a part of the next one
        self._expect(cycle is None or cycle.more_body or cycle.response_complete)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect(self.cycle.more_body)

    def _expect(self, waits: bool) -> None:
        if waits and self._deadline is None:
            self._since = self.loop.time()
            self._deadline = self.loop.call_later(PATIENCE_SECONDS, self.transport.abort)
        elif not waits and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def make_server(service: Service, host: str) -> uvicorn.Server:
    """Return a server; `run(sockets=[listener])` answers until a signal, and finishes requests."""
    app = make_app(service, hosts=tuple(LOOPBACK) if host in LOOPBACK else ("*",))
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=10,
    )
    return uvicorn.Server(config)
