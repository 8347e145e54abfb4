"""Serving: right answers, sentences for wrong requests, models that are replaced meanwhile."""

import contextlib
import dataclasses
import json
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing

import jax
import numpy as np
import pytest
from agents import AGENTS, blueprint
from models import promote, record, rollback
from walk import Walk

import podracer
from podracer.errors import CheckpointError, ConfigError
from podracer.io.seal import seal
from podracer.policy import Policy
from podracer.run.loading import reopen
from podracer.types import ACTION_MASK, ArraySpec, Discrete, EnvironmentSpec
from podracer_deploy.commands import listen
from podracer_deploy.serve import server as servers
from podracer_deploy.serve.server import make_server
from podracer_deploy.serve.service import Model, RequestError, Service, load_model

OBSERVATIONS = np.random.default_rng(0).normal(size=(6, 3, 2)).astype(np.float32)


def model_of(name: str, agent: str, seed: int = 0, **changes) -> Model:
    """A model of an untrained agent, which prefers other actions for every seed."""
    settings = dataclasses.replace(AGENTS[agent], **changes)
    built = blueprint(settings, Walk(Discrete(3)).spec).build()
    state = built.init(jax.random.key(seed), 1)
    shared = jax.tree.map(lambda x: x * 30 if x.ndim == 2 else x, state.shared)
    policy = Policy(built, dataclasses.replace(state, shared=shared))
    return Model(name, 7, agent, "walk", policy)


@pytest.fixture
def service(tmp_path):
    return Service(tmp_path, lambda path: model_of("run", "a2c", seed=3))


@pytest.fixture
def recurrent(tmp_path):
    return Service(tmp_path, lambda path: model_of("run", "ppo-gru"))


def test_one_observation_and_batches_are_answered_as_the_policy_acts(service):
    policy = service.model.policy.copy()
    expected = [int(policy(x)) for x in OBSERVATIONS[:, 0]]
    assert len(set(expected)) > 1
    for x, action in zip(OBSERVATIONS[:, 0], expected, strict=True):
        answer = service.act({"observation": x.tolist()})
        assert answer == {"action": action, "model": "run", "updates": 7}
    answer = service.act({"observation": OBSERVATIONS[:, 0].tolist()})  # 6 rows, padded to 8
    assert answer["actions"] == expected


def test_sessions_remember_apart_from_each_other(recurrent):
    policy = recurrent.model.policy
    assert policy.has_memory
    for episode in range(2):
        expected = [policy.copy() for _ in range(3)]
        for step, rows in enumerate(OBSERVATIONS[:, :3]):
            for i, x in enumerate(rows):
                request = {"observation": x.tolist(), "session": f"s{i}", "reset": step == 0}
                assert recurrent.act(request)["action"] == int(expected[i](x)), (episode, step)


def test_sessions_are_remembered_up_to_a_number_of_observations(recurrent, monkeypatch):
    monkeypatch.setattr("podracer_deploy.serve.service.MAX_SESSION_ROWS", 7)
    batch = OBSERVATIONS[0, :3].tolist()
    for name in ("a", "b", "c"):
        recurrent.act({"observation": batch, "session": name, "reset": True})
    assert recurrent.num_sessions == 2
    with pytest.raises(RequestError, match="there is no session 'a', or no more"):
        recurrent.act({"observation": batch, "session": "a"})
    recurrent.act({"observation": batch, "session": "b"})


def test_rows_of_a_batch_begin_new_episodes_of_their_own(recurrent):
    expected = recurrent.model.policy.copy()
    for step, rows in enumerate(OBSERVATIONS):
        reset = {0: True, 3: [1], 4: []}.get(step, False)
        if step in (3, 4):
            expected.reset(reset)
        request = {"observation": rows.tolist(), "session": "batch", "reset": reset}
        assert recurrent.act(request)["actions"] == np.asarray(expected(rows)).tolist()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, 'no "observation"'),
        ({"observation": [0, 0], "sesion": "a"}, "unknown key 'sesion'"),
        (
            {"observation": [0, 0, 0]},
            r"must be float32\[2\], or a batch of B .*it has the shape \(3,\)",
        ),
        ({"observation": "left"}, "must hold numbers"),
        ({"observation": [1e60, 0]}, "not finite as float32"),
        ({"observation": [0, 0], "reward": [1, 2]}, "one for each row"),
        ({"observation": [0, 0], "session": "a", "reset": "yes"}, "true, false, or a list"),
        ({"observation": [[0, 0], [0, 0]], "session": "a"}, "has 1 observations, not 2"),
    ],
)
def test_a_wrong_request_is_refused_with_a_sentence(service, request_, message):
    service.act({"observation": [0, 0], "session": "a", "reset": True})
    with pytest.raises(RequestError, match=message):
        service.act(request_)
    assert service.act({"observation": [0, 0]})["model"] == "run"


@pytest.mark.parametrize("wrong", [{"reward": "much"}, {"reset": 1}])
def test_a_refused_request_begins_no_session(service, wrong):
    request = {"observation": [0, 0], "session": "new", "reset": True}
    with pytest.raises(RequestError):
        service.act(request | wrong)
    with pytest.raises(RequestError, match="there is no session 'new'"):
        service.act(request | {"reset": False})


def test_one_observation_that_allows_no_action_is_refused(tmp_path):
    observation = {"x": ArraySpec((2,)), ACTION_MASK: ArraySpec((3,), bool)}
    agent = podracer.A2C().build(EnvironmentSpec("masked", observation, Discrete(3)))
    model = Model("run", 7, "a2c", "masked", Policy(agent, agent.init(jax.random.key(0), 1)))
    service = Service(tmp_path, lambda path: model)
    only, none = ({"x": [0, 0], ACTION_MASK: [False, allowed, False]} for allowed in (True, False))
    batch = {name: [only[name], none[name]] for name in only}
    assert service.act({"observation": only})["action"] == 1
    assert service.act({"observation": batch})["actions"][0] == 1  # an episode may be over
    with pytest.raises(RequestError, match="no action was allowed"):
        service.act({"observation": none})


@pytest.mark.parametrize("agent", ["dqn", "rainbow", "r2d2", "ppo-gru"])
def test_constants_that_an_agent_carries_are_no_memory(tmp_path, agent):
    """The ranks of environments; a service answers such a policy without a session."""
    service = Service(tmp_path, lambda path: model_of("run", agent))
    has_memory = agent in ("r2d2", "ppo-gru")
    assert service.model.policy.has_memory == has_memory
    request = {"observation": [0.1, 0.2]}
    with pytest.raises(RequestError, match="session") if has_memory else contextlib.nullcontext():
        assert service.act(request)["model"] == "run"


def models_of(directory, name):
    """Make a directory of models, or promote one more in it, without its checkpoint."""
    (directory / name).mkdir(parents=True)
    (directory / name / "config.json").touch()
    record(directory, name, {"config.json": "0"})
    return directory


def test_a_model_that_cannot_be_read_for_a_moment_is_taken_up_later(tmp_path, caplog):
    failures = [OSError("the disk is away"), OSError("the disk is away"), ConfigError("unfit")]

    def load(path):
        if path.name == "000002" and failures:
            raise failures.pop(0)
        return model_of(path.name, "a2c")

    service = Service(models_of(tmp_path, "000001"), load)
    models_of(tmp_path, "000002")
    for _ in range(2):
        service.refresh()
    assert caplog.text.count("stays: the disk is away") == 1
    for _ in range(3):  # refused for good
        service.refresh()
    assert service.model.name == "000001"
    assert caplog.text.count("stays: unfit") == 1
    models_of(tmp_path, "000003")
    service.refresh()
    assert service.model.name == "000003"


def test_a_model_that_was_seen_half_copied_is_tried_again(tmp_path):
    def load(path):
        if not (path / "state").exists():
            raise CheckpointError("'state' is missing")
        return model_of(path.name, "a2c")

    models = models_of(tmp_path, "000001")
    (models / "000001" / "state").touch()
    service = Service(models, load)
    models_of(tmp_path, "000002")
    service.refresh()
    assert service.model.name == "000001"
    (models / "000002" / "state").touch()
    service.refresh()
    assert service.model.name == "000002"


def test_a_directory_of_models_is_known_by_more_than_its_numbers(tmp_path):
    """`ln -sfn` exchanges it while it is served."""
    for name in ("one", "two"):
        models_of(tmp_path / name, "000001")
    (tmp_path / "link").symlink_to("one")
    loads = []

    def load(path):
        loads.append(path.resolve().parent.name)
        return model_of(path.name, "a2c", seed=len(loads))

    service = Service(tmp_path / "link", load)
    service.refresh()
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").replace(tmp_path / "link")
    service.refresh()
    service.refresh()
    assert loads == ["one", "two"]


def test_memory_needs_a_session_and_a_lost_one_is_told(recurrent):
    with pytest.raises(RequestError, match="this policy has memory"):
        recurrent.act({"observation": [0, 0]})
    with pytest.raises(RequestError, match="no session 'robot', or no more") as raised:
        recurrent.act({"observation": [0, 0], "session": "robot"})
    assert raised.value.status == 409


def test_a_session_ends_when_its_model_was_replaced_twice(recurrent):
    """Else each earlier model would be kept for the sessions that nobody goes on with."""
    request = {"observation": [0, 0], "session": "robot"}
    recurrent.act({**request, "reset": True})
    recurrent.model = model_of("second", "ppo-gru")
    assert recurrent.act(request)["model"] == "run"
    recurrent.act({**request, "session": "other", "reset": True})
    recurrent.model = model_of("third", "ppo-gru")
    with pytest.raises(RequestError, match="no session 'robot', or no more") as raised:
        recurrent.act(request)
    assert raised.value.status == 409
    assert recurrent.act({**request, "session": "other"})["model"] == "second"
    assert recurrent.num_sessions == 1


@contextlib.contextmanager
def serving(service):
    """Serve in a thread; yields the address."""
    with listen("127.0.0.1", 0) as listener:
        server = make_server(service, "127.0.0.1")
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            with service.following(seconds=0.05):
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def ask(url, body=None, **headers):
    """Return the status and the JSON of an answer."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, body, headers), timeout=60
        ) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, json.loads(text) if text.startswith("{") else text


def test_http_answers_and_errors(service):
    with serving(service) as address:
        act = f"{address}/act"
        assert ask(act, b'{"observation": [0.1, 0.2]}')[1]["model"] == "run"
        for body in (b"", b"[1]", b"{", b'{"observation": [NaN, 0]}', b"[" * 100_000):
            status, answer = ask(act, body)
            assert status == 400
            assert "request" in answer["error"]
        assert ask(act, b" " * (service.max_bytes + 1))[0] == 413
        assert ask(act)[0] == 405
        for host in ("evil.example", "evil.example@127.0.0.1", "127.0.0.1/evil.example", ""):
            assert ask(act, b"{}", Host=host)[0] == 400
        assert ask(f"{address}/health", Host="[::1]:8000")[0] == 200
        observation = b'{"observation": [0.1, 0.2]}'
        for origin in ("https://evil.example", "null", "https://localhost.evil.example", "//["):
            status, answer = ask(act, observation, Origin=origin)
            assert status == 403
            assert "only 127.0.0.1, ::1, localhost may ask" in answer["error"]
        assert ask(f"{address}/health", Origin="http://localhost:3000")[0] == 200
        assert ask(f"{address}/health", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
        status, health = ask(f"{address}/health")
    assert (status, health["requests"], health["errors"], health["status"]) == (200, 7, 6, "ok")
    assert health["milliseconds_p50"] > 0


def test_a_long_body_is_refused_before_it_is_sent(service, caplog):
    with serving(service) as address, closing(socket.create_connection(parts(address))) as client:
        head = b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        client.sendall(head % 10**12)
        assert client.recv(4096).startswith(b"HTTP/1.1 413")
        with closing(socket.create_connection(parts(address))) as leaver:
            leaver.sendall(head % 100 + b'{"observation"')
        assert ask(f"{address}/health")[0] == 200
        while ask(f"{address}/health")[1]["errors"] < 2:
            pass
    assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_slow_connections_give_way(service, monkeypatch):
    """A body that never ends ends its connection, and silent ones leave room for others."""
    monkeypatch.setattr(servers, "PATIENCE_SECONDS", 1.0)
    limit = (12, 12)
    with serving(service) as address:
        head = b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        slow = [socket.create_connection(parts(address)) for _ in range(3)]
        slow[0].sendall(head)
        slow[1].sendall(b"GET /health HTTP/1.1\r\nHo")
        assert [client.recv(1) for client in slow] == [b"", b"", b""]
        monkeypatch.setattr(servers, "PATIENCE_SECONDS", 8.0)
        monkeypatch.setattr(servers.resource, "getrlimit", lambda which: limit)
        slow += [socket.create_connection(parts(address)) for _ in range(10)]
        assert slow[3].recv(1) == b""  # the oldest
        assert ask(f"{address}/health")[0] == 200
        for client in slow:
            client.close()


def parts(address):
    host, port = address.removeprefix("http://").split(":")
    return host, int(port)


@pytest.fixture
def models(runs, tmp_path):
    """A directory of two models, the second one current."""
    for run in runs:
        promote(tmp_path / "models", run)
    return tmp_path / "models"


def load(directory):
    return load_model(directory, reopen(directory))


def test_promotions_and_rollbacks_under_load_lose_no_request(models, runs):
    """Every answer is that of the model that it names."""
    service = Service(models, load)
    observations = np.random.default_rng(0).normal(size=(50, 10, 5)).astype(np.float32)
    expected = [podracer.load_policy(run)(observations).tolist() for run in runs]
    assert expected[0] != expected[1]
    body = json.dumps({"observation": observations.tolist()}).encode()
    answers, stop, run_of = [], threading.Event(), {"000001": 0, "000002": 1}

    def client(url):
        while not stop.is_set():
            answers.append(ask(url, body))

    with serving(service) as address:
        clients = [threading.Thread(target=client, args=(f"{address}/act",)) for _ in range(3)]
        for thread in clients:
            thread.start()
        for turn in range(4):
            model = rollback(models) if turn % 2 else promote(models, runs[0])
            run_of.setdefault(model.name, 0)
            while service.model.name != model.name:
                time.sleep(0.01)
        stop.set()
        for thread in clients:
            thread.join()
    assert {status for status, _ in answers} == {200}
    assert len({answer["model"] for _, answer in answers}) >= 2
    for _, answer in answers:
        assert answer["actions"] == expected[run_of[answer["model"]]]


def test_a_damaged_model_does_not_replace_a_good_one(models, runs, caplog):
    service = Service(models, load)
    for path in (promote(models, runs[0]) / "checkpoints").glob("0*"):
        shutil.rmtree(path)
    service.refresh()
    assert service.model.name == "000002"
    assert "the model 000002 stays" in caplog.text
    rollback(models)
    promote(models, runs[1])
    service.refresh()
    assert service.model.name == "000004"


def test_a_model_of_an_environment_with_another_name_replaces_one(tmp_path):
    """Such as one that traded newer bars, from another file."""
    service = Service(models_of(tmp_path, "000001"), lambda path: renamed(path.name))
    models_of(tmp_path, "000002")
    service.refresh()
    assert service.model.name == "000002"


def renamed(name: str) -> Model:
    model = model_of(name, "a2c")
    model.policy.spec = dataclasses.replace(model.policy.spec, name=f"walk:{name}")
    return model


def test_a_model_that_was_exchanged_is_not_served(models, runs):
    (model := models / "000002").rename(models / "old")
    shutil.copytree(runs[0], model)
    seal(model / "checkpoints")  # valid as a run
    with pytest.raises(CheckpointError, match="000002 is not the model that"):
        Service(models, load)


def test_an_error_that_nobody_foresaw_keeps_the_model(models, caplog):
    loaded = iter([model_of("000001", "a2c")])
    service = Service(models, lambda path: next(loaded))  # StopIteration at the second
    rollback(models)
    service.refresh()
    assert service.model.name == "000001"
    assert "Traceback" in caplog.text
