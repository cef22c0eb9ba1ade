"""Films of an agent's episodes as MP4 files, made without a display.

Without a display, MuJoCo draws with EGL or OSMesa. $MUJOCO_GL names the one to use; this module
sets it if you have not.
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

from rank0rl import evaluation
from rank0rl.agent import Agent
from rank0rl.batch import Batch
from rank0rl.envs import spaces
from rank0rl.envs.make import watched
from rank0rl.evaluation import whole_episodes
from rank0rl.launch import python
from rank0rl.mpi import comm
from rank0rl.options import OptionError
from rank0rl.run import files
from rank0rl.run.hooks import Hook, Record
from rank0rl.run.options import RunOptions
from rank0rl.run.shares import make_shown

_MUJOCO_HINT = (
    "without a display, MuJoCo draws with EGL or OSMesa. On Debian and Ubuntu, install EGL with "
    "apt install libegl1 libgl1, or OSMesa with apt install libosmesa6. MUJOCO_GL=egl or "
    "MUJOCO_GL=osmesa chooses one of them"
)


class _Video(Hook):
    """A hook of training: it films one episode every few iterations into videos/ of the run's folder."""

    name = "video"
    on_every_rank = True

    def __init__(self, options: RunOptions, folder: Path, every: int) -> None:
        self._options, self.folder, self._every = options, folder, every

    def after(self, agent: Agent, iteration: int, record: Record) -> None:
        """Film an episode; ranks other than 0 return at once."""
        if iteration % self._every or comm.get_rank():
            return
        path = self.folder / "videos" / f"{iteration:08d}.mp4"
        path.parent.mkdir(exist_ok=True)
        acting = evaluation.Deterministic.of(agent, self._options.eval_deterministic)
        film(acting, self._options, path, self._options.seed)


def hooks(options: RunOptions, folder: Path) -> list[Hook]:
    """Return the hook that films a run in a list if the options ask for it, else []."""
    return [_Video(options, folder, options.video_every)] if options.video_every else []


def film(agent: Agent, options: RunOptions, path: Path, seed: int = 0, episodes: int = 1) -> Batch:
    """Film the first episodes that `evaluate` runs with the same seed, as an MP4 file.

    The film has one picture after every reset and every step, written at once. After an error, the
    file holds the pictures before it; without any picture, there is no file.

    Returns:
        "return" and "length" of each episode, shape (episodes,).

    Raises:
        OptionError: if imageio-ffmpeg is missing, the file cannot be written, or the environment
            cannot be drawn.
    """
    camera = _Camera(path)
    _do_without_display()
    try:
        ended = whole_episodes(
            agent,
            lambda index: watched(_make(options, index), camera.shoot),
            episodes,
            seed,
            num_envs=1,
        )
    finally:
        camera.close()
    if not path.exists():
        raise OptionError(f"ffmpeg has written nothing to {path}; its own message is above")
    return ended


def check(options: RunOptions) -> None:
    """Draw one picture if a run is to be filmed: an OptionError says why it cannot be, before training starts."""
    if options.video_every is None:
        return
    _ffmpeg()
    _do_without_display()
    env = _make(options)
    env.reset(seed=0)
    _drawn(env)
    env.close()


def _make(options: RunOptions, index: int = 0) -> Any:
    return make_shown(options, index, render_mode="rgb_array")


def has_display() -> bool:
    """Return True if there is a display for a window."""
    return sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


@functools.cache  # a failed attempt is not repeated
def _do_without_display() -> None:
    """Prepare drawing without a display: choose a library that works for MuJoCo, and tell pygame.

    Each library is tried in its own process, because a failure would break PyOpenGL for the other.
    """
    if has_display():
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    if "MUJOCO_GL" in os.environ or not importlib.util.find_spec("mujoco"):
        return
    for name in ("egl", "osmesa"):
        code = f"from mujoco.{name} import GLContext; GLContext(8, 8).make_current()"
        command, env = python("-c", code)
        tried = subprocess.run(command, env=env, check=False, capture_output=True)
        if tried.returncode == 0:
            os.environ["MUJOCO_GL"] = name
            return


def _ffmpeg() -> Any:
    try:
        import imageio_ffmpeg

        return imageio_ffmpeg
    except ImportError as error:
        raise OptionError(
            f'a video needs the extra "video" ({error}): run pip install -e ".[video]", or '
            f"pip install imageio-ffmpeg"
        ) from None


class _Camera:
    """A writer of pictures of one size to a video file, whose name must end in .mp4."""

    def __init__(self, path: Path) -> None:
        open_ = _ffmpeg().write_frames
        if path.suffix != ".mp4":
            raise OptionError(f"the name of a video must end in .mp4: got {path}")
        try:
            files.append(path).close()
        except OSError as error:
            raise OptionError(f"cannot write the video: {error}") from None
        self._path, self._open = path, open_
        self._writer: Any = None
        self._shape: tuple[int, ...] = ()

    def shoot(self, env: Any) -> None:
        """Add the environment's current picture."""
        picture = _drawn(env)
        if self._writer is None:
            self._shape = picture.shape
        elif picture.shape != self._shape:
            raise OptionError(
                f"all pictures of a video must have the same size: {spaces.name_of(env)} gave "
                f"{self._shape}, then {picture.shape}"
            )
        height, width, _ = picture.shape
        # Both sides must be even, because H.264 stores colors at half the size.
        picture = np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if self._writer is None:
            self._writer = self._open(
                self._path,
                picture.shape[1::-1],
                fps=env.metadata.get("render_fps") or 30,
                macro_block_size=1,  # the default would stretch pictures to a multiple of 16
                ffmpeg_log_level="error",
            )
            self._writer.send(None)
        try:
            self._writer.send(np.ascontiguousarray(picture))
        except OSError as error:
            raise OptionError(f"ffmpeg cannot write {self._path}: {error}") from None

    def close(self) -> None:
        """Finish the file; delete it if it is empty."""
        if self._writer is not None:
            self._writer.close()
        if not self._path.stat().st_size:
            self._path.unlink()


def _drawn(env: Any) -> Any:
    """Return the environment's current picture, shape (height, width, 3), uint8."""
    try:
        picture = np.asarray(env.render())
    except Exception as error:  # an environment can raise anything
        hint = f"\n{_MUJOCO_HINT}" if "mujoco" in sys.modules else ""
        raise OptionError(
            f"cannot draw {spaces.name_of(env)}: {type(error).__name__}: {error}{hint}"
        ) from error
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise OptionError(
            f"render() must return a picture of shape (height, width, 3), uint8: "
            f"{spaces.name_of(env)} gave {picture.dtype} {picture.shape}"
        )
    return picture
