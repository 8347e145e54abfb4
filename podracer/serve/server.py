"""The service over HTTP and JSON, by Starlette and uvicorn."""

from __future__ import annotations

import collections
import json
import logging
import math
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from podracer.io.address import LOOPBACK, family_of
from podracer.serve.arrays import RequestError
from podracer.serve.service import Service

MAX_BYTES = 64 * 2**20

logger = logging.getLogger("podracer")


def make_app(service: Service, *, hosts: tuple[str, ...] = ("*",)) -> Starlette:
    """Return the ASGI application of a service; `hosts` are the names that requests may call it.

    `POST /act` answers `Service.act`, `GET /health` says what is served, and how fast.
    """
    seconds: collections.deque[float] = collections.deque(maxlen=1000)
    counts = collections.Counter[str]()
    start = time.monotonic()

    def refusal(request: Request) -> JSONResponse | None:
        """Refuse what a page in a browser sends by a name of its own, or from another site."""
        headers = request.headers
        addresses = {f"//{headers.get('host', '')}": 400, headers.get("origin"): 403}
        for address, status in addresses.items():
            if "*" not in hosts and address is not None and _hostname(address) not in hosts:
                error = f"only {', '.join(sorted(hosts))} may ask, not {address.strip('/')!r}."
                return JSONResponse({"error": error}, status)
        return None

    async def act(request: Request) -> JSONResponse:
        if (response := refusal(request)) is not None:
            return response
        begin = time.perf_counter()
        counts["requests"] += 1
        try:
            answer, status = service.act(parse(await _read(request))), 200
        except RequestError as error:
            answer, status = {"error": str(error)}, error.status
        except Exception:
            logger.exception("a request failed")
            answer, status = {"error": "the server failed at this request; its log says why."}, 500
        counts["errors"] += status != 200
        seconds.append(time.perf_counter() - begin)
        return JSONResponse(answer, status)

    async def health(request: Request) -> JSONResponse:
        if (response := refusal(request)) is not None:
            return response
        model = service.model
        p50, p99 = np.quantile(seconds or [math.nan], (0.5, 0.99)) * 1e3
        return JSONResponse({
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
        })  # fmt: skip

    routes = [Route("/act", act, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes)


def _hostname(address: str) -> str | None:
    """Return the host of an address, without a port and the brackets of IPv6; None for none."""
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


async def _read(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BYTES:
            raise RequestError(f"a request has at most {MAX_BYTES >> 20} MiB.", status=413)
        parts.append(part)
    return b"".join(parts)


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


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes any that is free. Raises `OSError`."""
    return socket.create_server((host, port), family=family_of(host), backlog=2048)


def make_server(service: Service, host: str) -> uvicorn.Server:
    """Return a server; `run(sockets=[listener])` answers until a signal, and finishes requests."""
    app = make_app(service, hosts=tuple(LOOPBACK) if host in LOOPBACK else ("*",))
    return uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=10
        )
    )
