"""Compiled kernels: where they are kept, and who loads the compiler."""

import os
import subprocess
import sys

import numpy as np
import pytest
from on_ranks import HERE

from rank0rl.nets import compiler
from rank0rl.nets.kernels import tanh_
from rank0rl.nets.team import Team, meet

ROOT = HERE.parent


def test_the_folder_is_private_and_named_after_all_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compiler.cache_folder()
    assert folder.parent == tmp_path / "rank0rl"
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(compiler, "__file__", str(tmp_path / "compiler.py"))
    (tmp_path / "kernels.py").write_text("another formula")
    assert compiler.cache_folder() != folder


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_folder_that_others_can_write_is_not_used(mode, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler.cache_folder().chmod(mode)
    assert compiler.cache_folder() is None


def test_the_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler.os, "getuid", lambda: 12345)
    assert compiler.cache_folder() is None


def test_without_a_folder_kernels_are_compiled_all_the_same(tmp_path):
    (tmp_path / "file").touch()
    code = (
        "import numpy as np\n"
        "from rank0rl.nets.kernels import square\n"
        "from rank0rl.nets.compiler import cache_folder, kernel\n"
        "assert cache_folder() is None\n"
        "print(kernel(square.py_func)(np.ones(3)))"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == 3


@pytest.mark.parametrize("agent", ["ppo", "trpo", "klppo", "reinforce", "cem"])
def test_ranks_that_only_collect_load_no_compiler(agent):
    code = (
        "import sys, numpy as np\n"
        "from rank0rl.agent import Space, Spaces\n"
        "from rank0rl.run.agents import load_agent\n"
        f"agent = load_agent({agent!r})\n"
        "box = Space('box', (2,), 'float32', low=-np.ones(2), high=np.ones(2))\n"
        "one = agent(Spaces(Space('box', (3,), 'float32'), box), agent.Options(), np.random.default_rng(0))\n"
        "one.act(np.ones((2, 3), 'f'), np.ones((2, max(1, one.noise[1])), 'f'), np.arange(2))\n"
        "print(sorted({'numba', 'llvmlite', 'scipy'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(("dtype", "error"), [("float32", 5e-7), ("float64", 1e-15)])
def test_tanh_is_close_and_never_beyond_one(dtype, error):
    x = np.linspace(-20, 20, 400_001).astype(dtype)
    kernel = compiler.kernel(_tanh)
    y = kernel(x[:, None].copy(), np.zeros(1, dtype))[:, 0]
    assert abs(y - np.tanh(x.astype("float64"))).max() <= error
    assert abs(y).max() <= 1
    odd = np.array([[np.nan, np.inf, -np.inf]], dtype).T
    nan, one, minus_one = kernel(odd, np.zeros(1, dtype))[:, 0]
    assert np.isnan(nan)
    assert (abs(one), abs(minus_one)) == (pytest.approx(1), pytest.approx(1))


def _tanh(x, bias):
    tanh_(x, bias)
    return x


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_meet_as_often_as_they_are_asked_to(threads):
    """Each round, every thread adds up what all had written in the round before."""
    seen = np.zeros((300, 8), np.int64)
    Team(threads).run(compiler.kernel(_rounds), 8, seen)
    expected = [[pow(threads, i, 97)] * threads for i in range(300)]
    np.testing.assert_array_equal(seen[:, :threads], expected)


def _rounds(thread, threads, barrier, seen):
    seen[0, thread] = 1
    meet(threads, barrier)
    for i in range(1, len(seen)):
        total = 0
        for other in range(threads):
            total += seen[i - 1, other]
        seen[i, thread] = total % 97
        meet(threads, barrier)
