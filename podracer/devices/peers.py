"""Processes that share a run: how one joins the others, and how the loss of one ends the others.

JAX ends a process by `abort` where another is lost or does not start. Here that becomes exit code
77 with a sentence and `crash.json` (decision 0032).
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import ctypes
import errno
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from podracer.errors import ConfigError, PodracerError
from podracer.io.exits import STOPPED, exit_at_once
from podracer.io.text import print_stderr

HEARTBEAT_SECONDS = 10  # a process that is silent for longer is lost
NOTICE_SECONDS = 5.0  # a process that waits for longer says what it waits for
NAME_SECONDS = 1.0  # between two looks whether a name is known
REPORT_SECONDS = 1.0  # for `crash.json`, before a process ends
LINGER_SECONDS = 1.0  # process 0 ends after the others, as its end is a loss to them
LOST = (
    "another process of the run is lost: it was killed, failed or hangs, the network did, or one "
    "more process joined under its number. Start all processes again with `podracer resume`."
)


class PeerLostError(PodracerError):
    """Another process of the run ended, hangs, or did not start."""

    exit_code = 77
    component = "peer"


class _AbortHandler:
    """Handler of SIGABRT that reports `error` and ends the process with its exit code.

    The thread that aborts runs it. Handlers of `signal.signal` run in the main thread at some later
    time, and after an abort there is none.
    """

    def __init__(self) -> None:
        self.error = PeerLostError(LOST)
        self.report: Callable[[PeerLostError], None] = lambda error: None
        self._function: Any = None  # kept, as C calls it

    def install(self) -> None:
        """Handle SIGABRT from now on."""
        if self._function is None:
            self._function = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._handle)
            c_signal = ctypes.CDLL(None).signal
            c_signal.argtypes, c_signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
            c_signal(signal.SIGABRT, ctypes.cast(self._function, ctypes.c_void_p))

    def _handle(self, _: int) -> None:
        # In a thread of its own, as the file system may be lost with the network.
        reporter = threading.Thread(target=self.report, args=(self.error,), daemon=True)
        reporter.start()
        reporter.join(REPORT_SECONDS)
        print_stderr(str(self.error))
        exit_at_once(self.error.exit_code)


on_abort = _AbortHandler()


def join(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    seconds: float,
    method: str | None = "deactivate",
) -> None:
    """Join the other processes of the run; JAX finds what is None, of a launcher by its `method`.

    Returns when all have joined. If some have not after so many seconds, or the name of process 0
    is not known by then, the process ends with exit code 77. Raises `ConfigError` if process 0
    cannot listen on the coordinator's address, if this machine has a process of this number
    already, or if JAX does not find the others.
    """
    place = "" if coordinator is None else f" at {coordinator}"
    event = f"all {num_processes or ''} processes of the run to join{place}".replace("  ", " ")
    on_abort.error = PeerLostError(f"waited {seconds:g} s for {event}: start them all.")
    on_abort.install()
    start = time.monotonic()
    # By default JAX listens on all interfaces.
    bind_address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator)
    if process_id == 0 and bind_address:
        wait_for_address(bind_address, seconds, listens=True)
    elif coordinator is not None:
        wait_for_address(coordinator, seconds)
    if coordinator is not None:
        claim_number(coordinator, process_id)
    # Its handler of SIGTERM would replace that of the run.
    jax.config.update("jax_enable_preemption_service", False)

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                coordinator,
                num_processes,
                process_id,
                cluster_detection_method=method,
                initialization_timeout=max(1, math.ceil(seconds - (time.monotonic() - start))),
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                coordinator_bind_address=bind_address,
            )
        except Exception as error:
            if coordinator is not None or isinstance(error, jax.errors.JaxRuntimeError):
                raise
            raise _not_found(error) from error

    _call_in_thread(initialize, f"waits for {event}, for at most {seconds:g} s.")
    on_abort.error = PeerLostError(LOST)


def _not_found(error: Exception) -> PodracerError:
    """Return the error of a process that JAX could not join to the others of its launcher."""
    text = str(error).partition("\n")[0].rstrip(".")
    is_unknown = isinstance(error.__cause__ or error, OSError)
    if is_unknown or "recognize coordinator address" in text:
        return PeerLostError(f"process 0 is not known by its name ({text}): start all processes.")
    return ConfigError(
        f"JAX does not find the other processes of this launcher ({text}): give `coordinator`, "
        "`num_processes` and `process_id`."
    )


def claim_number(coordinator: str, process_id: int | None) -> int:
    """Claim the number until the process ends; return the descriptor of the claim.

    JAX's service would take another process with the same number, and end the run of the first. A
    name that the kernel keeps tells them apart where both are on one machine; nothing listens, and
    of other machines nobody knows. Raises `ConfigError` if the number is taken.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0podracer {coordinator} {process_id}")
    except OSError as error:  # or a system without such names
        if error.errno == errno.EADDRINUSE:
            claim.close()
            raise ConfigError(
                f"process {process_id} of the run at {coordinator} is on this machine already: "
                "give each process a `process_id` of its own."
            ) from None
    return claim.detach()


def wait_for_address(address: str, seconds: float, *, listens: bool = False) -> None:
    """Return when the name in the coordinator's address is known, and process 0 can listen there.

    A name may become known, or one of this machine, after the process has started, as in
    Kubernetes, so for that it waits so many seconds. Raises `PeerLostError` if the name is still
    unknown then, and `ConfigError` if process 0, which `listens`, does not have the address, or
    the port is in use: JAX may die of a segmentation fault there.
    """
    host, _, port = address.rpartition(":")
    start, has_noticed = time.monotonic(), False
    while True:
        try:
            family, _, _, _, name = socket.getaddrinfo(host.strip("[]"), int(port))[0]
            if listens:
                socket.create_server(name[:2], family=family).close()
            return
        except (OSError, OverflowError) as error:
            waited, is_taken = time.monotonic() - start, error.args[0] == errno.EADDRINUSE
            if _is_number(host) or is_taken or waited >= seconds:
                if isinstance(error, socket.gaierror) and not _is_number(host):
                    raise PeerLostError(
                        f"waited {seconds:g} s for the name {host} of process 0 to be known "
                        f"({error}): start process 0, or correct `coordinator`."
                    ) from error
                raise ConfigError(
                    f"process 0 cannot listen on {address} ({error}): `coordinator` must be an "
                    "address of its machine, with a free port."
                ) from error
            if waited >= NOTICE_SECONDS and not has_noticed:
                has_noticed = True
                event = f"{host} to be this machine" if listens else f"the name {host}"
                print_stderr(f"waits at most {seconds:g} s for {event} ({error}).")
        time.sleep(NAME_SECONDS)


def _is_number(host: str) -> bool:
    """Return whether an address is one of IP, which no directory of names will change."""
    return ":" in host or host.replace(".", "").isdigit()


def _call_in_thread(function: Callable[[], None], notice: str) -> None:
    """Call a function that may wait for long, where a signal could not interrupt it."""
    outcome = concurrent.futures.Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=call, name="podracer-join", daemon=True).start()
    try:
        if not concurrent.futures.wait([outcome], NOTICE_SECONDS).done:
            print_stderr(notice)
        outcome.result()
    except BaseException as error:
        atexit.register(exit_at_once, _exit_code(error))
        raise


@contextlib.contextmanager
def reports_loss(report: Callable[[PeerLostError], None]) -> Iterator[None]:
    """Have `report` called with the error if another process is lost within the context."""
    on_abort.report, previous = report, on_abort.report
    try:
        yield
    finally:
        on_abort.report = previous


@contextlib.contextmanager
def leaves_on_error() -> Iterator[None]:
    """Have Python end without waiting for the other processes, if any, if the context raises.

    JAX would wait until all of them end, while they wait for this one.
    """
    if not jax.distributed.is_initialized():
        yield
        return
    atexit.unregister(_leave)
    on_abort.install()
    try:
        yield
    except BaseException as error:
        atexit.register(_leave, _exit_code(error))
        raise


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return STOPPED
    return getattr(error, "exit_code", None) or getattr(error, "code", None) or 70


def _leave(code: int) -> None:
    if jax.process_index() == 0:
        time.sleep(LINGER_SECONDS)
    exit_at_once(code)
