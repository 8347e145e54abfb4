"""Twenty planted secrets, and every byte that commands write, searched for them."""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import logging
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import podracer
from podracer.agents.a2c import A2C
from podracer.cli.main import main
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.envs import make
from podracer.envs.catalog import ENVIRONMENTS, Entry
from podracer.envs.catch import Catch
from podracer.fields import static, struct
from podracer.io import text
from podracer.io.reading import read_object
from podracer.io.signals import StopSignals
from podracer.networks import MLP, TorsoNetwork
from podracer.reports.run import write_report
from podracer.tournament.config import Tournament
from podracer.tournament.engine import InlineEngine
from podracer.tournament.leaderboard import LOG, Leaderboard
from podracer.tournament.orchestrator import Orchestrator
from podracer.tournament.selection import Independent

MARK = "S3cr3tZq"  # begins every secret
PLACES = {
    "api_key": "{}",
    "client_secret": "{}",
    "private_key": "{}",
    "db_pass": "{}",
    "smtpAuth": "{}",
    "sig": "{}",
    "accessToken": "{}",
    "session_id": "{}",
    "password": "correct {} battery",
    "url": "https://me:{}@example.org/x",
    "blob": "https://a.example.org/c?sv=2024&sig={}&se=1",
    "signed": "https://b.example.org/x?X-Amz-Credential={}&X-Amz-Security-Token={}"
    "&X-Amz-Signature={}",
    "hosted": "https://c.example.org/x?X-Goog-Signature={}",
    "account": "AccountName=me;AccountKey={};EndpointSuffix=core",
    "header": "Bearer {}",
}
VARIABLES = {
    "WANDB_API_KEY": "{}",
    "DATABASE_URL": "postgres://me:{}@db.example.org/runs",
    "SOME_SETTING": "{}-1",
}
HARMLESS = dict.fromkeys(("bypass", "author", "significance", "signal", "compass"), "is-kept")
NUMBERS = iter(range(100))
OPTIONS, SET = (
    {key: re.sub("{}", lambda _: f"{MARK}{next(NUMBERS):02}", place) for key, place in of.items()}
    for of in (PLACES | HARMLESS, VARIABLES)
)
NAME = ",".join(["rented", *(f"{key}={value}" for key, value in OPTIONS.items())])


@struct
class Rented(Catch):
    """Catch on somebody's server."""

    options: tuple = static(default=())


def market(**_):
    return make("trading:synthetic,tickers=2,bars=200")


EXPERIMENT = Experiment(
    recipe="rented", environment=NAME, agent=A2C(network=TorsoNetwork(MLP((8,)))),
    driver=AnakinConfig(4, 4, 4), frames=64, evaluations=1, evaluation_episodes=2, devices=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    assert next(NUMBERS) >= 20
    monkeypatch.setattr(text, "SECRETS_OF_SETTINGS", set())
    rented = Entry(lambda **options: Rented(options=tuple(sorted(options.items()))), "")
    monkeypatch.setitem(ENVIRONMENTS, "rented", rented)
    monkeypatch.setitem(ENVIRONMENTS, "market", Entry(market, ""))
    for name, value in SET.items():
        monkeypatch.setenv(name, value)


def parts(data: bytes) -> Iterator[bytes]:
    """Yield the bytes, and what is packed in them."""
    yield data
    with contextlib.suppress(OSError, EOFError, zlib.error):
        yield from parts(gzip.decompress(data))
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(io.BytesIO(data)) as file:
        for name in file.namelist():
            yield from parts(file.read(name))
    for match in re.finditer(rb"[A-Za-z0-9+/]{24,}", data):
        with contextlib.suppress(ValueError):  # which is no base64
            yield from parts(base64.b64decode(match[0] + b"=" * (-len(match[0]) % 4)))


def has_secret(data: bytes) -> bool:
    encodings = ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
    marks = [MARK.encode(encoding) for encoding in encodings]
    return any(mark in part for part in parts(data) for mark in marks)


def files_with_secrets(directory: Path) -> dict[str, int]:
    """Modes of the files with a secret."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    found = [path for path in files if has_secret(path.read_bytes())]
    return {path.name: mode(path) for path in found}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class Failing:
    """Sink whose fault quotes all secrets, as does a module below the logger of the package."""

    def write(self, record):
        told = f"no login with {NAME} or {SET}, {[*OPTIONS.values(), *SET.values()]}"
        logging.getLogger("podracer.mazes").warning("told: %s", told, stack_info=True)
        raise OSError(told)

    def close(self): ...


def test_a_run_its_log_and_its_report_have_no_secret(tmp_path, capfd, caplog):
    run = tmp_path / "run"
    podracer.train(EXPERIMENT, run_dir=run, callbacks=[Failing()], progress=True)
    page = write_report([run], run / "report.html").read_text()
    assert 'data-name="learning rented,api_key=[redacted]' in page
    assert page.count("=is-kept") >= len(HARMLESS)
    assert files_with_secrets(tmp_path) == {"config.json": 0o600}
    assert mode(run / "saved.json") == 0o644
    assert not has_secret("".join([*capfd.readouterr(), caplog.text]).encode())
    assert "told: no login with rented,api_key=[redacted],client_secret=[redacted]" in caplog.text


@pytest.mark.slow
def test_no_command_writes_a_secret_for_others(tmp_path, capfd, caplog, monkeypatch):
    def command(*arguments):
        with pytest.raises(SystemExit) as left:
            main([str(x) for x in arguments])
        assert left.value.code == 0, (arguments, capfd.readouterr())

    # JAX may have begun in this process, with the devices of an earlier test.
    monkeypatch.setattr("podracer.devices.startup.use_cpu_devices", lambda number: None)
    small = ("--num-envs=8", "--evaluation-episodes=2", "--evaluations=1", "--devices=1")
    runs = tmp_path / "runs"
    run, swept, traded = (runs / name for name in ("run", "swept", "traded"))
    mirror = f"mirror:file://{tmp_path}/store/run"
    size = ("--frames=512", *small)
    rented = ("catch_a2c", "--environment", NAME, *size)
    command("train", *rented, "--attach", mirror, "--run-dir", run)
    command("resume", run, "--frames=1024")
    command("sweep", *rented, "--vary", "learning_rate=1e-3,1e-2", "--run-dir", swept)
    command("leaderboard", swept)
    environment = NAME.replace("rented", "market")
    command("train", "trading_ppo", "--environment", environment, *size, "--run-dir", traded)
    command("backtest", traded)
    for format in ("onnx", "stablehlo"):
        command("export", run, "--format", format)
    command("eval", run, "--episodes=2")
    command("report", run)
    command("report", run, swept, traded, "--out", runs / "comparison.html")
    tournament = Tournament(
        (EXPERIMENT,), Independent(), pods=2, rounds=1, round_frames=64, episodes=2
    )
    board = runs / "tournament"
    with Leaderboard(board, tournament.header()) as opened:
        loop = Orchestrator(tournament, opened, InlineEngine(), StopSignals(), lambda state: None)
        assert loop.run() == 0
    command("report", board)
    command("leaderboard", board)
    assert read_object(run / "config.json")["experiment"]["environment"] == NAME
    owners = ("config.json", "best.json", "task.json", LOG)
    assert files_with_secrets(runs) == dict.fromkeys(owners, 0o600)
    assert files_with_secrets(tmp_path / "store").keys() == {"config.json"}
    assert not has_secret("".join([*capfd.readouterr(), caplog.text]).encode())
