"""A service that answers observations with actions: models, sessions and requests.

It knows nothing of HTTP. Any thread calls `Service.read`, one alone `Service.answer`; another may
replace the model meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podracer.config.experiment import Experiment
from podracer.errors import CheckpointError, ConfigError, PodracerError, StorageError
from podracer.io.models import MODEL, RECORD
from podracer.io.steps import Choice
from podracer.ops.action_masks import component_masks
from podracer.policy import Policy, batch_size_of
from podracer.run.loading import load_run
from podracer.types import NO_ACTION, ArraySpec
from podracer_deploy.serve.arrays import RequestError, arrays_of, least_values, pad, text_size

MAX_SESSIONS = 10_000
MAX_SESSION_ROWS = 100_000  # in all sessions together: each has a memory
MAX_ROWS = 4096
MAX_BYTES = 8 * 2**20  # size of a request, which is parsed as one piece
_CURRENT = "current"  # file that names the current one of a directory of models
KEYS = ("observation", "session", "reset", "reward")

logger = logging.getLogger("podracer")


@dataclasses.dataclass(frozen=True)
class Model:
    """A policy with the name of its run or model, and what it was trained for."""

    name: str
    updates: int
    agent: str
    environment: str
    policy: Policy
    pod: int | None = None  # number within a sweep


@dataclasses.dataclass
class Session:
    """An episode, or a batch of them, that a client plays with one model."""

    model: Model
    policy: Policy
    rows: int


@dataclasses.dataclass(frozen=True)
class Question:
    """A request that fits the models' observations."""

    observation: Any  # arrays [rows, ...]
    rewards: np.ndarray  # [rows]
    rows: int
    is_batch: bool
    session: Any
    reset: bool | list[Any]


def load_model(
    directory: Path,
    experiment: Experiment,
    policy: str | None = None,
    checkpoint: Choice = "newest",
    pod: int | None = None,
) -> Model:
    """Load the model of a run directory, ready to answer single observations.

    `policy` is `greedy` or `sampled`, by default the one of the run's evaluations. Raises as
    `load_run`.
    """
    policy = experiment.evaluation_policy if policy is None else policy
    run = load_run(directory, recipe=experiment, pod=pod, checkpoint=checkpoint)
    acting = Policy(run.agent, run.state.learner, sampled=policy == "sampled")
    name, updates = directory.resolve().name, int(run.state.update)
    model = Model(name, updates, run.agent.name, acting.spec.name, acting, run.pod)
    prepare(model, (1,))
    return model


def prepare(model: Model, batch_sizes: tuple[int, ...]) -> None:
    """Compile a model's programs for batches of these sizes."""
    zeros = jax.tree.map(lambda x: x[None], least_values(model.policy.spec.observation))
    for size in batch_sizes:
        model.policy.copy()(pad(zeros, size))


class Service:
    """Policy of a run, or of the current model of a directory of models, with its sessions.

    Args:
        directory: a run, or a directory of models with a record.
        load: called with a run directory; returns its model.
    """

    def __init__(self, directory: Path, load: Callable[[Path], Model]) -> None:
        self._directory, self._load = directory, load
        self._follows = (directory / RECORD).is_file()
        path, self._serving = self._current() if self._follows else (directory, ())
        self.model = load(path)
        self._refused: Any = None
        self._complaint = ""
        self._batch_sizes = {1}
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._served = (self.model, self.model)  # the last but one and the last that answered
        self._seeds = itertools.count()

    @property
    def max_bytes(self) -> int:
        """Number of bytes that a request may have: a batch, but at most 8 MiB.

        One observation is always answered, and no model needs more than `MAX_ROWS` of them.
        """
        row = text_size(self.model.policy.spec.observation)
        return 1024 + max(row, min((row + 64) * MAX_ROWS, MAX_BYTES))

    @property
    def num_sessions(self) -> int:
        """Number of sessions that are remembered."""
        return len(self._sessions)

    @contextlib.contextmanager
    def following(self, seconds: float = 0.5) -> Iterator[None]:
        """Look for a new current model every so many seconds, in a thread, within the context."""
        stopped = threading.Event()

        def follow() -> None:
            while not stopped.wait(seconds):
                self.refresh()

        thread = threading.Thread(target=follow, name="models")
        if self._follows:
            thread.start()
        try:
            yield
        finally:
            stopped.set()
            if self._follows:
                thread.join()

    def act(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request: the action or actions, and which model chose them.

        Raises `RequestError` for what is wrong with it.
        """
        return self.answer(self.read(request))

    def read(self, request: dict[str, Any]) -> Question:
        """Return the arrays of a request, in any thread. Raises `RequestError` as `act` does."""
        for key in request:
            if key not in KEYS:
                raise RequestError(f"unknown key {key!r}: there are {', '.join(KEYS)}.")
        if "observation" not in request:
            raise RequestError('there is no "observation".')
        specs = self.model.policy.spec.observation
        observation = arrays_of(specs, request["observation"])
        try:
            batch_size = batch_size_of(specs, observation)
        except ConfigError as error:
            raise RequestError(str(error)) from error
        rows = 1 if batch_size is None else batch_size
        if not 1 <= rows <= MAX_ROWS:
            raise RequestError(f"a batch has 1 to {MAX_ROWS} observations, not {rows}.")
        if batch_size is None:
            masks = component_masks(self.model.policy.spec, observation)
            if any(mask is not None and not mask.any() for mask in masks):
                raise RequestError(NO_ACTION)
            observation = jax.tree.map(lambda x: x[None], observation)
        reset = request.get("reset", False)
        if not isinstance(reset, bool | list):
            raise RequestError('"reset" is true, false, or a list of rows of the batch.')
        rewards, session = _rewards(request, rows), request.get("session")
        return Question(observation, rewards, rows, batch_size is not None, session, reset)

    def answer(self, question: Question) -> dict[str, Any]:
        """Answer a question, in the one thread that does. Raises `RequestError` as `act` does."""
        rows = question.rows
        model, policy = self._policy_of(question)
        size = 1 << (rows - 1).bit_length()  # so that few programs are compiled
        self._batch_sizes.add(size)
        actions = policy(pad(question.observation, size), pad(question.rewards, size))
        if not np.isfinite(actions).all():
            raise RequestError("the policy's action is not finite.", status=500)
        actions = actions[:rows].tolist()
        key, value = ("actions", actions) if question.is_batch else ("action", actions[0])
        return {key: value, "model": model.name, "updates": model.updates}

    def _policy_of(self, question: Question) -> tuple[Model, Policy]:
        """Return the model and the policy for a question, at the right place of its episodes."""
        name, reset, rows = question.session, question.reset, question.rows
        model = self.model  # read once: another thread replaces it
        self._keep_two_models(model)
        if name is None:
            if model.policy.has_memory:
                raise RequestError(
                    'this policy has memory: name a "session", and send "reset": true with the '
                    "first observation of each episode."
                )
            model.policy.reset()
            return model, model.policy
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise RequestError('a "session" is a text of 1 to 200 characters.')
        if reset is True:  # also a session that played with an older model
            policy = model.policy.copy(next(self._seeds))
            self._sessions[name] = Session(model, policy, rows)
            self._sessions.move_to_end(name)
            self._forget()
        elif name not in self._sessions:
            raise RequestError(
                f'there is no session {name!r}, or no more: send "reset": true with the first '
                "observation of an episode.",
                status=409,
            )
        session = self._sessions[name]
        self._sessions.move_to_end(name)
        if session.rows != rows:
            raise RequestError(f"session {name!r} has {session.rows} observations, not {rows}.")
        if isinstance(reset, list):
            session.policy.reset(_rows_of(reset, rows))
        return session.model, session.policy

    def _forget(self) -> None:
        """End the sessions that were used least recently, if there are too many."""
        num_rows = sum(session.rows for session in self._sessions.values())
        while len(self._sessions) > MAX_SESSIONS or num_rows > MAX_SESSION_ROWS:
            num_rows -= self._sessions.popitem(last=False)[1].rows

    def _keep_two_models(self, model: Model) -> None:
        """End the sessions of all models but the current one and the one before."""
        if model is not self._served[1]:
            self._served = self._served[1], model
            for name, session in list(self._sessions.items()):
                if session.model is not self._served[0]:
                    del self._sessions[name]

    def refresh(self) -> None:
        """Take up the current model if it is another one; keep the old one where that fails.

        What failed is tried again once its files change, or it could not be read.
        """
        version = None
        try:
            path, version = self._current()
            if version in (self._serving, self._refused):
                return
            model = self._load(path)
            prepare(model, tuple(self._batch_sizes))
            old, new = self.model.policy.spec, model.policy.spec
            if (new.observation, new.action) != (old.observation, old.action):
                raise ConfigError("it has other observations or actions.")
        except Exception as error:
            if repr(error) != self._complaint:
                is_known = isinstance(error, PodracerError)
                text = "the model %s stays: %s"
                logger.warning(text, self.model.name, error, exc_info=not is_known)
            self._complaint = repr(error)
            self._refused = None if isinstance(error, StorageError | OSError) else version
            return
        self._serving, self._refused, self._complaint = version, None, ""
        logger.info("model %s replaces %s", model.name, self.model.name)
        self.model = model

    def _current(self) -> tuple[Path, Any]:
        """Return the directory of the current model, and what no other model equals."""
        name = (self._directory / _CURRENT).read_text().strip()
        if not MODEL.fullmatch(name):
            raise CheckpointError(f"{self._directory / _CURRENT} names no model, but {name[:80]!r}")
        path = self._directory / name
        return path, (name, _marks_of(path))


def _marks_of(model: Path) -> list[tuple[object, ...]]:
    """Return what changes when a file of a model does, or the directory behind its name.

    Reads no file: path, device, inode, size and time of each are enough.
    """
    paths = [Path(folder, name) for folder, _, names in os.walk(model) for name in names]
    statuses = [(str(path), os.lstat(path)) for path in sorted(paths)]
    return [(name, x.st_dev, x.st_ino, x.st_size, x.st_mtime_ns) for name, x in statuses]


def _rewards(request: dict[str, Any], rows: int) -> np.ndarray:
    rewards = arrays_of(ArraySpec(()), request.get("reward", 0.0), "reward")
    if rewards.shape not in ((), (rows,)):
        raise RequestError('"reward" is a number, or one for each row of the batch.')
    return np.broadcast_to(rewards, (rows,))


def _rows_of(reset: list[Any], rows: int) -> list[int]:
    if not all(type(row) is int and 0 <= row < rows for row in reset):
        raise RequestError(f'the rows of "reset" are integers from 0 to {rows - 1}.')
    return reset
