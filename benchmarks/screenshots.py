"""Screenshots of the pages of podracer for docs/images, by headless Chromium.

    python benchmarks/screenshots.py FOLDER [--only NAME ...]

Runs are made in FOLDER where they are missing (some minutes), then pages and their pictures. Look
at each picture before it goes into docs/images.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

RUNS = {  # the arguments of `podracer` that make each
    "cartpole": "train cartpole_ppo --frames 250000 --seed 1 --target-return None",
    "seeds": "sweep catch_a2c --seeds 10 --frames 409600 --updates-per-chunk 10",
    "sweep": "sweep catch_a2c --vary learning_rate=1e-4:1e-1 --draws 16 --seeds 2 --frames 204800 "
    "--updates-per-chunk 10",
    "cup": "tournament catch_a2c --pods 3 --rounds 3 --round-frames 81920 --selection Softmax",
    "trading": "train trading_ppo --frames 100000 --evaluations 4",
}
_CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


class Shot(NamedTuple):
    """Picture of a page: which, its size in pixels, and whether it is dark."""

    page: str  # name of a run, for its report
    width: int
    height: int
    is_dark: bool = False


SHOTS = {
    "report-run": Shot("cartpole", 1280, 1000),
    "report-seeds": Shot("seeds", 1280, 1000),
    "report-sweep": Shot("sweep", 1280, 1500),
    "report-sweep-dark": Shot("sweep", 1280, 1000, is_dark=True),
    "report-tournament": Shot("cup", 1280, 1300),
    "report-trading": Shot("trading", 1280, 1300),
    "report-phone": Shot("cartpole", 400, 1400),
}


def podracer(*arguments: str) -> list[str]:
    """Return the command."""
    return [sys.executable, "-m", "podracer", *arguments]


def address_of(page: str, runs: Path) -> str:
    """Write the report of a run and return its address."""
    command = podracer("report", str(runs / page))
    return Path(subprocess.check_output(command, text=True).strip()).resolve().as_uri()


def take(shot: Shot, address: str, file: Path) -> None:
    """Write a picture of a page."""
    # A window is at least 500 pixels wide, so a report is in a frame of its own width.
    frame = file.with_suffix(".html")
    style = "margin: 0; border: 0; display: block"
    frame.write_text(
        f'<body style="{style}"><iframe src="{address}" style="{style}; width: {shot.width}px; '
        f'height: {shot.height}px"></iframe></body>'
    )
    is_framed = shot.width < 500
    dark = ["--force-dark-mode"] if shot.is_dark else []
    subprocess.run(
        [
            *_CHROMIUM,
            *dark,
            f"--user-data-dir={file.parent / 'browser'}",
            f"--window-size={shot.width},{shot.height}",
            "--allow-file-access-from-files",  # of the report, by its frame
            "--virtual-time-budget=20000",
            f"--screenshot={file}",
            frame.as_uri() if is_framed else address,
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    frame.unlink()


def main() -> None:
    """Make what is missing, and all pictures or those that are named."""
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*SHOTS], default=[*SHOTS])
    options = parser.parse_args()
    folder = options.folder.resolve()
    runs, pictures = folder / "runs", folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    shots = {name: SHOTS[name] for name in options.only}
    pages = {shot.page for shot in shots.values()}
    for name, arguments in RUNS.items():
        if name in pages and not (runs / name).exists():
            command = podracer(*arguments.split(), "--run-dir", str(runs / name))
            subprocess.run(command, check=True)
    for name, shot in shots.items():
        take(shot, address_of(shot.page, runs), pictures / f"{name}.png")
        print(pictures / f"{name}.png")


if __name__ == "__main__":
    main()
