"""Video files: GIF by Pillow, MP4 by an `ffmpeg` on the PATH."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from podracer.errors import ConfigError, PodracerError
from podracer.io.run_directory import write_bytes

_GIF_MAX_FPS = 50  # browsers slow down any GIF that asks for more
FFMPEG_SECONDS = 600


def write_video(frames: np.ndarray, path: Path, fps: int) -> None:
    """Write frames uint8 `[T, H, W, 3]` as `.gif` or `.mp4`, shown at `fps` frames a second.

    A GIF of at most 256 colors is exact. Raises `ConfigError` for an MP4 without `ffmpeg`,
    `PodracerError` if `ffmpeg` fails.
    """
    write = _write_mp4 if path.suffix.lower() == ".mp4" else _write_gif
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        write(frames, draft, fps)
        write_bytes(path, draft.read_bytes())  # whole, and through no link


def _write_gif(frames: np.ndarray, path: Path, fps: int) -> None:
    stride = -(-fps // _GIF_MAX_FPS)
    images = [Image.fromarray(frame) for frame in frames[::stride]]
    # GIF time goes by hundredths of a second: rounding the ends keeps the total right.
    ends = [round(100 * i * stride / fps) * 10 for i in range(len(images) + 1)]
    images[0].save(
        path,
        save_all=True,
        append_images=images[1:],
        duration=[end - start for start, end in itertools.pairwise(ends)],
        loop=0,
        optimize=True,
    )


def _write_mp4(frames: np.ndarray, path: Path, fps: int) -> None:
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None:
        raise ConfigError(
            f"Writing {path.name} needs ffmpeg, and there is none on the PATH: "
            "install it, or name the file .gif instead."
        )
    _, height, width, _ = frames.shape
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps)]
    # Players want 4:2:0 color, and that wants even sides.
    target = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p"]
    command = [ffmpeg, "-y", "-loglevel", "error", *source, "-i", "-", *target]
    try:
        process = subprocess.run(
            [*command, str(path.absolute())],
            input=frames.tobytes(),
            capture_output=True,
            timeout=FFMPEG_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PodracerError(
            f"ffmpeg has not written {path.name} in {FFMPEG_SECONDS} s: take fewer frames."
        ) from error
    if process.returncode:
        reason = process.stderr.decode(errors="replace").strip() or f"exit {process.returncode}"
        raise PodracerError(f"ffmpeg could not write {path}: {reason.splitlines()[-1]}")
