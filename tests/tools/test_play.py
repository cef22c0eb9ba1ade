"""A run's policy in a window and on film."""

import io
import os
import sys
from types import SimpleNamespace

import imageio_ffmpeg
import numpy as np
import pytest
from helpers import forks
from helpers.envs import Drawn, NoiseAgent
from helpers.ranks import HERE, run
from helpers.runs import curve, train

from rank0rl.agent import Space
from rank0rl.api import evaluate
from rank0rl.envs import make as envs
from rank0rl.mpi import comm
from rank0rl.policy import load
from rank0rl.run.hooks import Record
from rank0rl.run.options import RunOptions
from rank0rl.tools import play, video

DRAWN = "helpers.envs:Drawn-v0"


@pytest.fixture(autouse=True)
def no_display(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(video.sys, "platform", "linux")


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Train a small run in an environment that can be drawn."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = [DRAWN, "--env-kwargs", "vary=1", "--num-envs", "2", "--hidden", "8"]
    train(tmp_path / "r", *args, "--steps-per-batch", "8", "--total-steps", "16")
    return tmp_path / "r"


def pictures(path):
    """Return the description of a video and the brightness of each picture."""
    frames = imageio_ffmpeg.read_frames(str(path))
    about = next(frames)
    return about, [np.frombuffer(frame, np.uint8).mean() for frame in frames]


def film_one(path, **kwargs):
    spaces = SimpleNamespace(act=Space("box", (1,), "float32"))
    return video.film(NoiseAgent(spaces), RunOptions(env_id=DRAWN, env_kwargs=kwargs), path)


@pytest.mark.slow
def test_a_film_has_the_episodes_of_evaluate(drawn, tmp_path, capsys):
    before = {p: p.read_bytes() for p in drawn.rglob("*") if p.is_file()}
    path = tmp_path / "a.mp4"
    assert play.main([str(drawn), "--episodes", "2", "--seed", "4", "--video", str(path)]) == 0
    ended = evaluate(drawn, 5, 4)
    assert capsys.readouterr().out.splitlines() == [
        f"episode {i}: return {ended['return'][i]:.6g}, length {ended['length'][i]}" for i in (0, 1)
    ]
    lengths = ended["length"][:2].tolist()
    about, shown = pictures(path)
    assert (about["size"], about["fps"], about["codec"]) == ((48, 34), 20, "h264")
    assert np.allclose(shown, [20 * t for n in lengths for t in range(n + 1)], atol=4)
    assert imageio_ffmpeg.count_frames_and_secs(str(path))[0] == sum(lengths) + 2
    assert {p: p.read_bytes() for p in drawn.rglob("*") if p.is_file()} == before


@pytest.mark.slow
def test_a_film_without_noise(drawn, tmp_path):
    path = tmp_path / "a.mp4"
    fixed, noisy = (
        play._play(
            play.Options(run=drawn, seed=4, deterministic=deterministic, video=path), load(drawn)
        )["return"].tolist()
        for deterministic in (True, False)
    )
    assert fixed == evaluate(drawn, 1, 4, deterministic=True)["return"].tolist() != noisy


def test_a_window_where_there_is_a_display(drawn, monkeypatch, capsys):
    assert play.main([str(drawn)]) == 2
    assert "--video" in capsys.readouterr().err
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.setenv(name, ":0")
        assert play.main([str(drawn), "--seed", "1", "--episodes", "2"]) == 0
        monkeypatch.delenv(name)
        out = capsys.readouterr().out
        assert out.count("a window") == 2
        assert f"episode 0: return {evaluate(drawn, 1, 1)['return'][0]:.6g}, length" in out
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(play, "whole_episodes", lambda *_, **__: int("of the environment"))
    with pytest.raises(ValueError, match="of the environment"):
        play.main([str(drawn)])
    monkeypatch.setattr(video.sys, "platform", "darwin")
    assert video.has_display()


def test_without_imageio_ffmpeg_nothing_begins(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ValueError, match=r"pip install imageio-ffmpeg"):
        video.film(None, None, tmp_path / "a.mp4")
    assert not list(tmp_path.iterdir())


def test_after_an_error_all_is_closed_and_the_film_ends_there(tmp_path):
    closed = Drawn.closed
    with pytest.raises(ZeroDivisionError):
        film_one(tmp_path / "a.mp4", length=9, fails="step")
    assert Drawn.closed == closed + 1
    assert len(pictures(tmp_path / "a.mp4")[1]) == 4


def test_what_cannot_be_drawn_leaves_no_file(tmp_path):
    path = tmp_path / "a.mp4"
    for fails, facts in (
        ("render", "Drawn-v0: ZeroDivisionError: on purpose"),
        ("dtype", r"uint8: Drawn-v0 gave float32 \(33, 47, 3\)"),
    ):
        with pytest.raises(ValueError, match=facts):
            film_one(path, fails=fails)
        assert not path.exists()
    film_one(path)
    old = path.read_bytes()
    with pytest.raises(ValueError):
        film_one(path, fails="render")
    assert path.read_bytes() == old
    with pytest.raises(ValueError, match=r"Drawn-v0 gave \(33, 47, 3\), then \(40, 47"):
        film_one(path, fails="size")


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"\.mp4: got .*a\.avi"):
        film_one(tmp_path / "a.avi")
    with pytest.raises(ValueError, match=r"No such file .*a\.mp4"):
        film_one(tmp_path / "none" / "a.mp4")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a.mp4").symlink_to("/dev/full")
    monkeypatch.setattr(video.files, "append", lambda path: io.BytesIO())  # which refuses a link
    with pytest.raises(ValueError, match=r"ffmpeg .*a\.mp4"):
        film_one(tmp_path / "a.mp4")


@pytest.mark.parametrize(
    ("works", "given", "chosen"),
    [
        (["egl", "osmesa"], None, "egl"),
        (["osmesa"], None, "osmesa"),
        ([], None, None),
        (["egl"], "glfw", "glfw"),
    ],
)
def test_mujoco_draws_by_what_works(works, given, chosen, monkeypatch):
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda name: True)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    if given:
        monkeypatch.setenv("MUJOCO_GL", given)

    def tried(command, **kwargs):
        return SimpleNamespace(
            returncode=not any(f"mujoco.{name} " in command[-1] for name in works)
        )

    monkeypatch.setattr(video.subprocess, "run", tried)
    with monkeypatch.context() as with_display:
        with_display.setenv("DISPLAY", ":0")
        video._do_without_display.__wrapped__()
        assert os.environ.get("MUJOCO_GL") == given
    video._do_without_display.__wrapped__()
    assert os.environ.get("MUJOCO_GL") == chosen
    assert os.environ["SDL_VIDEODRIVER"] == "dummy"
    for name in ("MUJOCO_GL", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)


def draws(name):
    code = f"from mujoco.{name} import GLContext; GLContext(8, 8).make_current()"
    return run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_walker2d_without_a_display(tmp_path):
    if not (draws("egl") or draws("osmesa")):
        pytest.skip("neither EGL nor OSMesa here: apt install libegl1 libgl1, or libosmesa6")
    small = ["--env-kwargs", "width=64", "height=64", "--num-envs", "1", "--hidden", "8"]
    train(tmp_path, "Walker2d", *small, "--steps-per-batch", "64", "--total-steps", "64")
    done = forks.run("-m", "rank0rl", "play", str(tmp_path), "--video", str(tmp_path / "a.mp4"))
    assert done.returncode == 0, done.stderr
    ended = evaluate(tmp_path, 1)
    assert (
        done.stdout == f"episode 0: return {ended['return'][0]:.6g}, length {ended['length'][0]}\n"
    )
    about, shown = pictures(tmp_path / "a.mp4")
    assert about["size"] == (64, 64)
    assert about["fps"] == envs.make("Walker2d-v5").metadata["render_fps"]
    assert len(shown) == ended["length"][0] + 1
    assert min(shown) > 20  # not black


@pytest.mark.slow
def test_films_of_a_training_leave_it_what_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = [DRAWN, "--env-kwargs", "vary=1", "--num-envs", "2", "--hidden", "8", "--seed", "3"]
    args += ["--steps-per-batch", "8", "--total-steps", "40"]
    train(tmp_path / "without", *args)
    train(tmp_path / "r", *args, "--video-every", "2", "--checkpoint-every", "1", nprocs=2)
    assert curve(tmp_path / "r") == curve(tmp_path / "without")
    films = sorted((tmp_path / "r" / "videos").iterdir())
    assert [path.name for path in films] == ["00000002.mp4", "00000004.mp4"]
    saved = tmp_path / "r" / "checkpoints" / "00000004.pt"
    length = evaluate(saved, 1, deterministic=True)["length"][0]
    assert len(pictures(films[1])[1]) == length + 1


def test_the_hook_films_every_few_iterations_and_on_rank_0_alone(tmp_path, monkeypatch):
    spaces = SimpleNamespace(act=Space("box", (1,), "float32"))
    options = RunOptions(env_id=DRAWN, video_every=3)
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setattr(comm, "get_rank", lambda rank=rank: rank)
        (hook,) = video.hooks(options, tmp_path / str(rank))
        for iteration in range(5, 8):
            hook.after(NoiseAgent(spaces), iteration, Record())
    films = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.mp4")]
    assert films == ["0/videos/00000006.mp4"]
    assert video.hooks(RunOptions(env_id=DRAWN), tmp_path) == []


@pytest.mark.slow
def test_what_cannot_be_filmed_is_found_out_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    args = ["helpers.envs:Count-v0", "--num-envs", "2", "--video-every", "2"]
    done = train(tmp_path / "r", *args, nprocs=2, expect=2)
    assert "Count-v0" in done.stderr
    assert not (tmp_path / "r").exists()
