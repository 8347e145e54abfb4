"""The live page: what it shows, that it grows with the files, and that it only reads."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time

import pytest
from charts import blocks, figures

from podracer.reports.page import plotly_script
from podracer.reports.watch import files
from podracer.reports.watch import server as servers
from podracer.reports.watch.files import Tail
from podracer.reports.watch.runs import WatchedRun
from podracer.reports.watch.server import LiveServer, live_page
from podracer.reports.watch.watcher import Watcher

RETURNS = "Episode return (dots: evaluation)"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
STAGES = {
    "actor_time_environment": 3.0, "actor_time_inference": 1.0, "actor_time_transfer": 0.5,
    "actor_time_parameters": 0.2, "actor_time_queue": 0.3, "learner_time_learn": 1.0,
    "learner_time_report": 0.1, "learner_time_collect": 3.9,
}  # fmt: skip


def record(updates, **values):
    common = {"frames": updates * 100, "seconds": updates * 5.0, "frames_per_second": 20.0}
    returns = {"episode_return": updates / 10, "loss": 1 / (1 + updates), "time_compile": 0.0}
    return {"updates": updates, **common, **returns, **values}


def write(path, records, mode="w"):
    with open(path, mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def make_run(run, records, **experiment):
    run.mkdir(parents=True)
    driver = {"kind": "AnakinConfig", "num_envs": 10, "rollout_length": 10}
    experiment = {"frames": 2000, "seed": 0, "driver": driver, "agent": {}, **experiment}
    config = {"recipe": experiment.get("recipe", "catch"), "experiment": experiment}
    (run / "config.json").write_text(json.dumps(config))
    write(run / "metrics.jsonl", records)
    return run


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("podracer.reports.watch.watcher.SHORTEST_PAUSE", 0.0)
    monkeypatch.setattr("podracer.reports.watch.watcher.SHARE", 1e9)


@contextlib.contextmanager
def served(directory, **options):
    """Serve the page of a directory at a free port, and yield the server."""
    with LiveServer(Watcher(directory, **options), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def next_event(response):
    line = response.readline()
    assert line.startswith(b"data: "), line
    assert response.readline() == b"\n"
    return json.loads(line[6:])


# --- files that grow ------------------------------------------------------------------------------


def test_a_tail_reads_whole_lines_and_begins_anew_where_a_file_was_replaced(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    tail.update()
    assert tail.records == []
    write(path, [record(1), record(2)])
    with path.open("a") as file:
        file.write('no record\n{"updates": 3, "lo')
    tail.update()
    assert tail.records == [record(1), record(2)]
    assert tail.unreadable == 1
    with path.open("a") as file:
        file.write('ss": 1}\n')
    tail.update()
    assert tail.records[2] == {"updates": 3, "loss": 1}
    write(tmp_path / "other", [record(1), record(9), record(10), record(11)])
    (tmp_path / "other").replace(path)  # as `resume` cuts records
    tail.update()
    assert [x["updates"] for x in tail.records] == [1, 9, 10, 11]
    assert tail.unreadable == 0
    path.unlink()
    tail.update()
    assert tail.records == []


def test_a_long_file_is_thinned_but_for_evaluations_and_the_last_record(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "KEPT_RECORDS", 10)
    evaluated = {"evaluation_return": 1.0}
    records = [record(i, **(evaluated if i % 33 == 0 else {})) for i in range(1, 201)]
    tail = Tail(tmp_path / "metrics.jsonl")
    for end in (50, 120, 200):
        write(tmp_path / "metrics.jsonl", records[:end])
        tail.update()
        updates = [x["updates"] for x in tail.records]
        assert updates == sorted(set(updates))
        assert updates[-1] == end
        assert {x for x in range(33, end, 33)} <= set(updates)
        assert 10 <= len(updates) <= 40


def test_only_regular_files_are_read(tmp_path):
    write(tmp_path / "outside", [record(1)])
    run = tmp_path / "run"
    run.mkdir()
    for make in (
        lambda path: path.symlink_to(tmp_path / "outside"),
        os.mkfifo,
        os.mkdir,
    ):
        path = run / "metrics.jsonl"
        make(path)
        tail = Tail(path)
        tail.update()
        assert tail.records == []
        path.rmdir() if path.is_dir() else path.unlink()


# --- the page -------------------------------------------------------------------------------------


def test_a_metric_has_the_name_that_a_report_gives_it(tmp_path):
    run = make_run(tmp_path / "run", [record(i, approx_kl=0.1 * i) for i in range(1, 4)])
    assert "Approximate KL divergence" in figures(Watcher(run).parts()["metrics"])


def test_a_run_is_shown_and_nothing_is_written(tmp_path):
    run = make_run(
        tmp_path / "run",
        [record(i, **STAGES, evaluation_return=float(i % 7)) for i in range(1, 11)],
    )
    before = {path: path.stat().st_mtime_ns for path in [run, *run.iterdir()]}
    parts = Watcher(run).parts()
    for text in ("Best evaluation</dt><dd>6.00", "Progress</dt><dd>50 %", "Seed</dt><dd>0"):
        assert text in parts["overview"]
    returns = figures(parts["learning"])[RETURNS]["data"]
    assert returns[-1]["meta"]["curves"]["updates"] == [
        [*range(1, 11)],
        [i % 7 for i in range(1, 11)],
    ]
    assert "they step environments 60 % of theirs" in parts["waiting"]
    waits = figures(parts["waiting"])
    assert [len(waits[f"{x}: share of time"]["data"]) for x in ("Actors", "Learner")] == [5, 3]
    assert waits["Actors: share of time"]["data"][0]["y"] == [0.6] * 20
    assert "Loss" in figures(parts["metrics"])
    assert {path: path.stat().st_mtime_ns for path in [run, *run.iterdir()]} == before


def test_what_could_not_be_read_is_read_again(tmp_path, monkeypatch):
    run = WatchedRun(make_run(tmp_path / "run", [record(1)]))

    def fail():
        raise OSError("stale")

    with monkeypatch.context() as patch:
        patch.setattr(run.metrics_file, "update", fail)
        with pytest.raises(OSError, match="stale"):
            run.update()
    assert run.update()
    assert len(run.records.records) == 1
    assert not run.update()


def test_several_runs_and_seeds_are_compared(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"seed-{seed}", [record(i) for i in range(1, 4)], seed=seed)
    make_run(tmp_path / "other", [record(1)], recipe="pong")
    outside = make_run(tmp_path / "outside" / "run", [])
    (tmp_path / "link").symlink_to(outside)
    watcher = Watcher(tmp_path)
    parts = watcher.parts()
    assert parts["overview"].count("<tr>") == 1 + 3
    labels = [entry["label"] for entry in blocks(parts["learning"])["learning "]["legend"]]
    assert labels == ["other", "catch, 2 seeds"]
    assert "configuration" not in parts
    make_run(tmp_path / "later", [])
    assert "no record yet" in watcher.parts()["overview"]
    assert "There is no run here yet" in Watcher(tmp_path / "link" / "nothing").parts()["overview"]


def test_runs_that_are_left_out_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("podracer.reports.watch.watcher.RUNS", 2)
    for number in (3, 1, 2):
        path = make_run(tmp_path / f"run-{number}", [record(1)])
        for name in ("config.json", "metrics.jsonl"):
            os.utime(path / name, (number, number))
    overview = Watcher(tmp_path).parts()["overview"]
    assert [f"run-{number}" in overview for number in (1, 2, 3)] == [False, True, True]
    assert "1 more runs, which wrote earlier, are not shown" in overview


def test_a_sweep_shows_its_pods_best_configuration_first(tmp_path):
    pods = [
        {"seed": seed, "hyperparameters": [{"name": "rate", "value": rate}]}
        for rate in (0.1, 0.5)
        for seed in (0, 1)
    ]
    run = make_run(tmp_path / "sweep", [record(i) for i in (1, 2, 3)], pods=pods)
    values = [[1.0, 2.0, 3.0, None], [2.0, 2.0, 5.0, None], [1.0, 2.0, 3.0, 5.0]]
    records = [
        {"updates": i, "episode_return": x, "evaluation_return": x} for i, x in enumerate(values, 1)
    ]
    write(run / "pods.jsonl", records)
    part = Watcher(run).parts()["pods-0"]
    assert part.index("rate 0.500</th><td>2</td><td>4.00") < part.index("rate 0.100</th>")
    drawn = {x["meta"]["run"]: x["meta"]["curves"] for x in figures(part)[RETURNS]["data"]
             if x.get("mode") != "lines+markers" and "run" in x["meta"]}  # fmt: skip
    assert drawn["sweep pod 1"]["updates"] == [[1, 2, 3], [2, 2, 2]]
    assert drawn["sweep pod 3"]["updates"] == [[3], [5]]


def test_a_sweep_is_ranked_by_the_interquartile_mean_without_failed_pods(tmp_path):
    returns = {0.1: [1.0] * 8, 0.5: [0.0] * 7 + [99.0], 0.9: [5.0] * 7 + [None]}
    pods = [
        {"seed": seed, "hyperparameters": [{"name": "rate", "value": rate}]}
        for rate in returns
        for seed in range(8)
    ]
    run = make_run(tmp_path / "sweep", [record(1)], pods=pods)
    values = [value for of_rate in returns.values() for value in of_rate]
    write(run / "pods.jsonl", [{"updates": 1, "evaluation_return": values}])
    part = Watcher(run).parts()["pods-0"]
    rows = ("100|1.00", "500|0<", "900|5.00")
    rows = (row.replace("|", "</th><td>8</td><td>") for row in rows)
    first, second, third = (part.index(f"rate 0.{row}") for row in rows)
    assert first < second < third  # a mean of those that are left is no reason to choose it
    assert part.count("1 of 8 evaluation without a finite mean (seed 7)") == 1


def test_a_selection_shows_who_descends_from_whom(tmp_path):
    pods = [
        {"seed": seed, "hyperparameters": [{"name": "rate", "value": rate}]}
        for seed, rate in enumerate((0.1, 0.2, 0.4))
    ]
    exchange = {"kind": "Selection", "every": 10}
    run = make_run(tmp_path / "sweep", [record(30)], pods=pods, exchange=exchange)
    selection = {"parent": [0, 0, 1], "hyperparameter_rate": [0.1, 0.12, 0.2]}
    records = [
        {"updates": 5 * i, "episode_return": [1.0, 3.0, None], **(selection if i % 2 else {})}
        for i in (2, 3, 4, 5, 6)
    ]
    write(run / "pods.jsonl", records)
    part = Watcher(run).parts()["pods-0"]
    rates = figures(part)["rate"]
    assert rates["layout"]["yaxis"]["type"] == "log"
    every, best = rates["data"]
    assert best["text"] == "the best pod and its ancestors"
    # Three lives and three links of each pod before a selection, and the lives after the last.
    assert (every["x"].count(None), best["x"].count(None)) == (3 * (2 + 2 + 1), 2 + 2 + 1)


@pytest.mark.figure(16)
def test_nothing_that_a_file_says_is_run_or_ends_the_page(tmp_path, cases):
    pods = [{"seed": 0, "hyperparameters": [{"name": HOSTILE, "value": 1.0}]}]
    run = make_run(
        tmp_path / "a<b>", [{**record(1), HOSTILE: 1.0}], pods=pods, agent={HOSTILE: HOSTILE},
        seed=HOSTILE, recipe=HOSTILE, evaluation_policy=HOSTILE,
    )  # fmt: skip
    write(run / "pods.jsonl", [{"updates": 1, "episode_return": [1.0]}])
    (run / "crash.json").write_text(json.dumps(dict.fromkeys(("message", "traceback"), HOSTILE)))
    whole = live_page(Watcher(run))
    page, scripts = whole.split("<script src=")
    assert "<script" not in re.sub('<script type="application/json">[^<>&]*</script>', "", page)
    assert whole.count("<script>") == 1
    assert "<img" not in page
    assert "&lt;img" in page
    assert HOSTILE not in scripts
    blocks(page)
    hostile = [
        "[]", "{", "null", '{"experiment": []}', '{"experiment": {"pods": 5}}', "[" * 10**5,
        '{"experiment": {"pods": [{"hyperparameters": [5]}]}}', '{"recipe": {"a": 1}}',
    ]  # fmt: skip
    for text in cases(hostile):
        (run / "config.json").write_text(text)
        assert "overview" in Watcher(run).parts()
    lines = ['{"updates": 1e999, "frames": NaN}', '{"updates": "5"}', "\0", '{"seconds": [[1]]}']
    for line in cases(lines):
        (run / "metrics.jsonl").write_text(line + "\n")
        assert Watcher(run).parts()


@pytest.mark.figure(16)
def test_an_odd_run_hides_nothing_of_the_others(tmp_path, cases):
    odd = make_run(tmp_path / os.fsdecode(b"bad\xff"), [record(1)])
    (odd / "crash.json").write_text(json.dumps({"message": "no file x\udcff.png"}))
    for name in ("good", "late"):
        (make_run(tmp_path / name, [record(1)]) / "play.gif").write_bytes(name.encode())
    watcher = Watcher(tmp_path)
    live_page(watcher).encode(errors="replace")
    whole = watcher.parts()
    assert list(whole)[-1] == "machine"
    hostile = [
        '{"experiment": {"pods": 5}}', '{"experiment": {"pods": [{"hyperparameters": [5]}]}}',
        '{"experiment": {"pods": [5]}}', '{"experiment": {"driver": 5, "frames": "x"}}',
    ]  # fmt: skip
    for text in cases(hostile):
        (odd / "config.json").write_text(text)
        parts = Watcher(tmp_path).parts()
        assert set(whole) <= set(parts)
        assert "good" in parts["overview"]
        assert "bad" in "".join(parts.values())
        assert parts["films"].count("<img") == 2
        assert "Loss" in figures(parts["metrics"])
    (odd / "config.json").write_text(hostile[0])
    films = Watcher(tmp_path)
    films.parts()
    assert [films.film(number).read_bytes() for number in (0, 1)] == [b"good", b"late"]


# --- the server -----------------------------------------------------------------------------------


def test_a_page_with_a_name_that_is_no_text_is_sent(tmp_path):
    run = make_run(tmp_path / os.fsdecode(b"bad\xff"), [record(1)])
    with served(run) as server:
        page = get(server, "/")
        assert page.status == 200
        assert b"bad?" in page.read()


@pytest.mark.figure(16)
def test_other_sites_reach_nothing(tmp_path, cases):
    run = make_run(tmp_path / "run", [record(1)])
    (run / "play.gif").write_bytes(b"GIF89a")
    foreign = [
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
        {"Origin": "http://evil.test"}, {"Origin": "null"}, {"Origin": "http://localhost:1"},
    ]  # fmt: skip
    own = [
        {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate",
         "Sec-Fetch-Dest": "document"},
    ]  # fmt: skip
    with served(run) as server:
        get(server, "/").read()
        for headers in cases(foreign):
            for path in ("/", "/film/0", "/events"):
                assert get(server, path, **headers).status == 403
        for headers in [*own, {"Origin": server.address.rstrip("/")}]:
            assert get(server, "/film/0", **headers).status == 200
        assert get(server, "/nothing").headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert get(server, "/", Host="evil.test@127.0.0.1").status == 421


def test_runs_are_chosen_by_their_names(tmp_path):
    for name in ("cartpole-1", "cartpole-2", "catch-1"):
        make_run(tmp_path / name, [record(1)])
    page = live_page(Watcher(tmp_path, "cart*"))
    assert "cartpole-2" in page
    assert "catch-1" not in page
    assert "There is no run here yet" in live_page(Watcher(tmp_path, "dart*"))


FAKE = """#!/bin/sh
printf GIF89a > "$4/play.gif"
case "$4" in *broken) echo "podracer: it cannot be drawn." >&2; exit 78;; esac
"""


def test_a_film_is_made_when_somebody_asks_for_it(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    monkeypatch.setattr("podracer.reports.watch.runs.sys.executable", str(python))
    runs = tmp_path / "runs"
    run, broken = (make_run(runs / name, [record(1)]) for name in ("a", "broken"))
    with served(runs) as server:
        assert "Film the newest" not in get(server, "/").read().decode()
        assert get(server, "/film/0", "POST").status == 404
    with served(runs, films=True) as server, contextlib.closing(server.watcher):
        assert get(server, "/").read().decode().count("Film the newest policy") == 2
        assert get(server, "/film/0", "POST", Origin="http://evil.test").status == 403
        assert get(server, "/film/7", "POST").status == 404
        assert not (run / "play.gif").exists()
        for number in (0, 1):
            events = get(server, "/events")
            next_event(events)
            assert get(server, f"/film/{number}", "POST").status == 200
            while "being filmed" in (
                films := next_event(events)["parts"].get("films", "being filmed")
            ):
                pass
        assert get(server, "/film/0").read() == b"GIF89a"
        assert "broken: podracer: it cannot be drawn." in films
        assert (broken / "play.gif").exists()


def test_a_client_cannot_take_the_places_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "VIEWERS_OF_CLIENT", 2)
    run = make_run(tmp_path / "run", [record(1)])
    with served(run) as server:
        viewers = [get(server, "/events") for _ in range(2)]
        assert [next_event(viewer)["order"][0] for viewer in viewers] == ["overview"] * 2
        assert get(server, "/events").status == 503
        connection = http.client.HTTPConnection(
            *server.server_address[:2], timeout=20, source_address=("127.0.0.2", 0)
        )
        connection.request("GET", "/events", headers={"Host": "localhost"})
        assert connection.getresponse().status == 200


def test_slow_connections_do_not_shut_others_out(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "CONNECTIONS", 3)
    with served(make_run(tmp_path / "run", [record(1)])) as server:
        slow = [socket.create_connection(server.server_address[:2]) for _ in range(5)]
        for connection in slow[:2]:
            assert connection.recv(1) == b""  # the oldest have ended
        assert get(server, "/").status == 200
        monkeypatch.setattr(servers, "SLOWEST_REQUEST", 0.0)
        slow[4].sendall(b"GE")
        assert slow[4].recv(1) == b""
        for connection in slow:
            connection.close()


@pytest.mark.figure(17)
@pytest.mark.usefixtures("nothing_listens")
def test_changes_arrive_as_they_are_written(tmp_path):
    run = make_run(tmp_path / "run", [record(1)])
    with served(run) as server:
        assert server.address.startswith("http://127.0.0.1:")
        page = get(server, "/")
        assert page.status == 200
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self' 'sha256-" in policy
        content = page.read().decode()
        assert "Progress" in content
        (script,) = re.findall('<script src="(.*?)">', content)
        plotly = get(server, script)
        assert gzip.decompress(plotly.read()).decode() == plotly_script()
        events = get(server, "/events")
        first = next_event(events)
        assert first["order"] == list(first["parts"])
        write(run / "metrics.jsonl", [record(2)], "a")
        second = next_event(events)
        assert second["order"] == first["order"]
        assert "Progress</dt><dd>10 %" in second["parts"]["overview"]
        assert "configuration" not in second["parts"]  # which has not changed


@pytest.mark.figure(16)
def test_no_request_reaches_another_file(tmp_path, cases):
    run = make_run(tmp_path / "run", [record(1)])
    (run / "play.gif").write_bytes(b"GIF89a")
    with served(run) as server:
        get(server, "/").read()
        part = get(server, "/film/0", Range="bytes=3-")
        assert (part.status, part.read()) == (206, b"89a")
        assert part.headers["Content-Range"] == "bytes 3-5/6"
        part = get(server, "/film/0", Range="bytes=1-2")
        assert (part.status, part.read()) == (206, b"IF")
        for range_ in ("bytes=9-", "bytes=-2", "lines=1-2"):  # unknown ones are left out
            assert get(server, "/film/0", Range=range_).read() == b"GIF89a"
        film = get(server, "/film/0?5")
        assert (film.status, film.read()) == (200, b"GIF89a")
        assert film.headers["Content-Type"] == "image/gif"
        paths = [
            "/config.json", "/film/0/../config.json", "/film/../../etc/passwd", "/film/1",
            "/film/-1", "//etc/passwd", "/film/0%2f..", "/film/99999", "/events/..",
        ]  # fmt: skip
        for path in cases(paths):
            assert get(server, path).status == 404
        (run / "play.gif").unlink()
        (run / "play.gif").symlink_to(run / "config.json")
        assert get(server, "/film/0").status == 404
        for name in cases(["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""]):
            assert get(server, "/", Host=name).status == 421
        for name in ("localhost", "localhost:7007", "[::1]:7007"):
            assert get(server, "/", Host=name).status == 200


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_browser_shows_what_comes_later(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", [record(1)])
    (run / "play.gif").touch()
    with served(run) as server:
        # The browser prints the page once it has loaded all, for which the film takes long.
        monkeypatch.setattr(server.watcher, "film", lambda _: time.sleep(8.0))
        threading.Timer(4.0, write, [run / "metrics.jsonl", [record(20)], "a"]).start()
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--timeout=20000"]
        folder = f"--user-data-dir={tmp_path / 'browser'}"
        dom = subprocess.run(
            [*command, folder, "--dump-dom", server.address], capture_output=True, text=True
        ).stdout
    assert '<span id="connection">live</span>' in dom
    assert "Progress</dt><dd>100 %" in dom
