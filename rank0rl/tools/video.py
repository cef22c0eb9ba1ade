"""Episodes of an agent as an mp4, made without a display.

MuJoCo draws by EGL or OSMesa then: $MUJOCO_GL names one of them, and is set here where it is not.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rank0rl import envs
from rank0rl.agent import Agent
from rank0rl.batch import Batch
from rank0rl.evaluation import whole_episodes
from rank0rl.run.config import RunOptions


def film(agent: Agent, options: RunOptions, path: Path, seed: int = 0, episodes: int = 1) -> Batch:
    """Film the episodes that `evaluate` counts with the same seed, the first ones of them.

    A picture after every reset and every step, written as they come. After an error the file holds
    what came before it, if anything.

    Args:
        agent: acts; it learns nothing.
        options: of the run whose environment it is.
        path: of the mp4.
        seed: of the episodes.
        episodes: how many.

    Returns:
        "return" and "length" of each, (episodes,).

    Raises:
        ValueError: if imageio-ffmpeg is missing, the file cannot be written, or the environment
            cannot be drawn.
    """
    camera = _Camera(path)
    _do_without_display()
    try:
        ended = whole_episodes(
            agent, lambda: envs.Watched(_make(options), camera.shoot), episodes, seed, lanes=1
        )
    finally:
        camera.close()
    if not path.exists():
        raise ValueError(f"ffmpeg has written nothing to {path}; what it says stands above")
    return ended


def check(options: RunOptions) -> None:
    """Find out whether the environment of a run can be filmed here, before there is a run.

    Raises:
        ValueError: if not, saying why.
    """
    _ffmpeg()
    _do_without_display()
    env = _make(options)
    env.reset(seed=0)
    _drawn(env)
    env.close()


def _make(options: RunOptions) -> Any:
    kwargs = {**options.env_kwargs, "render_mode": "rgb_array"}
    return envs.make(options.env_id, options.wrappers, **kwargs)


def has_display() -> bool:
    """Whether there is a screen for a window."""
    return sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


@functools.cache  # what does not work is not tried again
def _do_without_display() -> None:
    """Where there is none: let MuJoCo draw by what works, and pygame look for no screen.

    Each way is tried in a process of its own: one that fails leaves PyOpenGL unfit for the other.
    """
    if has_display():
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    if "MUJOCO_GL" in os.environ or not importlib.util.find_spec("mujoco"):
        return
    for name in ("egl", "osmesa"):
        code = f"from mujoco.{name} import GLContext; GLContext(8, 8).make_current()"
        tried = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
        if tried.returncode == 0:
            os.environ["MUJOCO_GL"] = name
            return


def _ffmpeg() -> Any:
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise ValueError(
            f'a video needs the extra "video" ({error}): pip install -e ".[video]", or '
            f"pip install imageio-ffmpeg"
        ) from None
    return imageio_ffmpeg


class _Camera:
    """Pictures of one size, in a file.

    Args:
        path: of the file, which must end in .mp4.
    """

    def __init__(self, path: Path) -> None:
        open_ = _ffmpeg().write_frames
        if path.suffix != ".mp4":
            raise ValueError(f"a video must be named something.mp4: got {path}")
        try:
            path.open("ab").close()
        except OSError as error:
            raise ValueError(f"cannot write the video: {error}") from None
        self._path, self._open = path, open_
        self._writer: Any = None
        self._shape: tuple[int, ...] = ()

    def shoot(self, env: Any) -> None:
        """Add what an environment shows now."""
        picture = _drawn(env)
        if self._writer is None:
            self._shape = picture.shape
        elif picture.shape != self._shape:
            raise ValueError(
                f"pictures of a video must have one size: {envs.name_of(env)} gave {self._shape}, "
                f"then {picture.shape}"
            )
        height, width, _ = picture.shape
        # H.264 halves both sides for its colors, so that they must be even.
        picture = np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if self._writer is None:
            self._writer = self._open(
                self._path,
                picture.shape[1::-1],
                fps=env.metadata.get("render_fps") or 30,
                macro_block_size=1,  # or it would stretch pictures to a multiple of 16
                ffmpeg_log_level="error",
            )
            self._writer.send(None)
        try:
            self._writer.send(np.ascontiguousarray(picture))
        except OSError as error:
            raise ValueError(f"ffmpeg cannot write {self._path}: {error}") from None

    def close(self) -> None:
        """Finish the file; where nothing came, there is none."""
        if self._writer is not None:
            self._writer.close()
        if not self._path.stat().st_size:
            self._path.unlink()


def _drawn(env: Any) -> Any:
    """A picture, (height, width, 3), uint8."""
    try:
        picture = np.asarray(env.render())
    except Exception as error:  # whatever the environment raises
        uses_mujoco = "mujoco" in sys.modules
        raise ValueError(
            f"cannot draw {envs.name_of(env)}: {type(error).__name__}: {error}"
            + ("\n" + _MUJOCO_HINT) * uses_mujoco
        ) from error
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise ValueError(
            f"render() must give a picture, (height, width, 3), uint8: {envs.name_of(env)} gave "
            f"{picture.dtype} {picture.shape}"
        )
    return picture


_MUJOCO_HINT = (
    "MuJoCo draws without a display by EGL or by OSMesa: on Debian and Ubuntu, apt install libegl1 "
    "libgl1 for the one, libosmesa6 for the other; MUJOCO_GL=egl or osmesa chooses"
)
