"""Compiled kernels: where they are kept, and who loads the compiler."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import numpy as np
import pytest
import torch
from helpers.ranks import HERE

from rank0rl.nets.kernels import compiler
from rank0rl.nets.kernels.compiler import Team, meet
from rank0rl.nets.kernels.distributions import _log_gamma, _trigamma
from rank0rl.nets.kernels.mlp import _activate
from rank0rl.nets.mlp import _IN_TORCH, Activation

ROOT = HERE.parent


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A function that returns the folder anew, and a home for it that is safe."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir(mode=0o700)
    return compiler.cache_folder.__wrapped__


def test_the_folder_is_private_and_named_after_all_kernels_and_the_cpu(
    cache, tmp_path, monkeypatch
):
    folder = cache()
    assert folder.parent == tmp_path / "home" / "rank0rl"
    assert {each.stat().st_mode & 0o777 for each in (folder, folder.parent)} == {0o700}
    assert cache() == folder
    with monkeypatch.context() as other_cpu:
        other_cpu.setattr(compiler, "get_host_cpu_features", lambda: "+avx2")
        assert cache() != folder
    monkeypatch.setattr(compiler, "__file__", str(tmp_path / "compiler.py"))
    (tmp_path / "kernels.py").write_text("another formula")
    assert cache() != folder


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_look_into_is_not_used(mode, cache):
    cache().chmod(mode)
    assert cache() is None


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("mode", "safe"), [(0o770, False), (0o757, False), (0o1777, True), (0o755, True)]
)
def test_nobody_else_can_put_another_in_its_place(which, mode, safe, cache):
    folder = cache()
    folder.parents[which].chmod(mode)
    assert (cache() == folder) == safe


def test_a_link_is_not_used(cache, tmp_path):
    folder = cache()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert cache() is None


def test_the_folder_of_another_user_is_not_used(cache, monkeypatch):
    folder = cache()
    if os.getuid():
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    else:  # root trusts its own, and may give it away
        os.chown(folder, 12345, -1)
    assert cache() is None


KERNEL = """
import numpy as np
from rank0rl.nets.kernels.compiler import cache_folder, kernel
from rank0rl.nets.kernels import steps
before = [*cache_folder().rglob("*.nbc")] if cache_folder() else None
print(steps.block_rows(1), kernel(steps.block_rows)(256), len(before or []))
"""


def compile_in(folder):
    """Compile a kernel in a process of its own; return what it computes, and the files found before."""
    env = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    words = [sys.executable, "-c", KERNEL]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    _, result, files = map(int, done.stdout.split())
    assert result == 128
    return files


@pytest.mark.slow
def test_kernels_are_kept_and_damage_costs_a_compilation_only(cache, tmp_path):
    home = tmp_path / "home"
    assert compile_in(home) == 0
    kept = [path for path in home.rglob("*") if path.suffix in (".nbi", ".nbc")]
    assert len(kept) == 2
    for path in kept:
        whole = path.read_bytes()
        for damaged in (b"", whole[: len(whole) // 2], b"x" * 100):
            path.write_bytes(damaged)
            compile_in(home)
            assert path.read_bytes() != damaged  # mended


OF_HEADS = """
import sys
import time
import torch
from helpers.policies import policy_of, rng, value_of
from torch import nn
from rank0rl.nets.actor_critic import ClosedForm
from rank0rl.nets.flat import Adam, Flat
from rank0rl.algos.ppo import clipped_slope
from rank0rl.nets.kernels.compiled import CompiledSteps
from rank0rl.nets.kernels.steps import make_steps
for kind in ("gaussian", "state", "beta", "several"):
    nets = nn.ModuleDict({"policy": policy_of(kind), "value": value_of((5,), (8,), rng())})
    CompiledSteps(nets, None, Adam(Flat(nets)), 0.5, 1).compile(ClosedForm(clipped_slope, 0.2))
    print(sum(make_steps.stats.cache_misses.values()))
"""


@pytest.mark.slow
@pytest.mark.skipif(compiler.cache_folder() is None, reason="no private folder")
def test_kernels_of_each_distribution_are_compiled_once():
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
    for _ in range(2):
        words = [sys.executable, "-c", OF_HEADS]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"] * 4


@pytest.mark.slow
def test_without_a_folder_kernels_are_compiled_all_the_same(tmp_path):
    (tmp_path / "file").touch()
    assert compile_in(tmp_path / "file") == 0


def test_kernels_need_the_compiler():
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    words = [sys.executable, "-c", "import rank0rl.nets.kernels.steps"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert "unset NUMBA_DISABLE_JIT" in done.stderr.splitlines()[-1]


@pytest.mark.fast(1)
@pytest.mark.parametrize("agent", ["ppo", "trpo", "klppo", "reinforce", "cem"])
def test_ranks_that_only_collect_load_no_compiler(agent):
    code = (
        "import sys, numpy as np\n"
        "from rank0rl.agent import Space, Spaces, Step\n"
        "from rank0rl.run.agents import load_agent\n"
        f"agent = load_agent({agent!r})\n"
        "box = Space('box', (2,), 'float32', low=-np.ones(2), high=np.ones(2))\n"
        "one = agent(Spaces(Space('box', (3,), 'float32'), box), agent.Options(), np.random.default_rng(0))\n"
        "one.act(Step(np.ones((2, 3), 'f'), np.ones((2, max(1, one.noise[1])), 'f'), np.arange(2)))\n"
        "print(sorted({'numba', 'llvmlite', 'scipy'} & {*sys.modules}))"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("name", get_args(Activation))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_activations_are_close_also_far_from_zero(name, dtype):
    """Errors are relative to the larger of 1 and the output; torch computes in float64."""
    x = np.concatenate([np.linspace(-20, 20, 400_001), [-3e5, -100, 100, 3e5]]).astype(dtype)
    exact = torch.from_numpy(x.astype("float64")).requires_grad_()
    value = _IN_TORCH[name](exact)
    value.sum().backward()
    y, slopes = x.copy(), np.full_like(x, np.nan)
    kernel = compiler.kernel(_activates)
    kernel(get_args(Activation).index(name), y, slopes)
    error = 5e-15 if dtype == "float64" else 5e-7 if name == "tanh" else 3e-6
    size = np.maximum(1, abs(value.detach().numpy()))
    assert (abs(y - value.detach().numpy()) / size).max() <= error
    if name == "tanh":
        assert abs(y).max() <= 1
    else:
        off = abs(slopes - exact.grad.numpy())
        assert off[x != 0].max() <= 2 * error
    odd = np.array([np.nan, np.inf], dtype)
    kernel(get_args(Activation).index(name), odd, slopes)
    assert np.isnan(odd[0])
    assert odd[1] == pytest.approx(1) if name == "tanh" else not np.isfinite(odd[1])


def _activates(code, x, slopes):
    _activate(code, x, slopes)


def test_special_functions_are_exact():
    """Errors are relative to the larger of 1 and the value, as torch's own are near a zero."""
    x = np.concatenate([np.linspace(1, 40, 10_001), np.geomspace(1, 1e20, 10_001)])
    exact = torch.from_numpy(x)
    wanted = torch.lgamma(exact), torch.digamma(exact), torch.special.zeta(torch.tensor(2.0), exact)
    seen = np.empty((3, len(x)))
    compiler.kernel(_special)(x, seen)
    for y, z in zip(seen, wanted, strict=True):
        assert (abs(y - z.numpy()) / np.maximum(1, abs(z.numpy()))).max() < 2e-14
    assert (abs(seen[2] / wanted[2].numpy() - 1)).max() < 2e-14  # trigamma has no zero
    assert seen[:, 0] == pytest.approx([0, -np.euler_gamma, np.pi**2 / 6], rel=1e-14, abs=1e-14)


def _special(x, seen):
    for i in range(len(x)):
        seen[0, i], seen[1, i] = _log_gamma(x[i])
        seen[2, i] = _trigamma(x[i])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_meet_as_often_as_they_are_asked_to(threads):
    """Each round, every thread adds up what all had written in the round before."""
    seen = np.zeros((300, 8), np.int64)
    Team(threads).run(compiler.kernel(_rounds), 8, seen)
    expected = [[pow(threads, i, 97)] * threads for i in range(300)]
    np.testing.assert_array_equal(seen[:, :threads], expected)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_no_thread_waits_for_one_that_has_failed(failing, monkeypatch):
    monkeypatch.setattr(
        compiler, "_SHORT_S", 60.0
    )  # else a busy machine leaves the first one alone

    def fails(thread, threads, barrier):
        if thread == failing:
            raise ValueError("of one thread")
        meets(threads, barrier)

    meets = compiler.kernel(_meets)
    meets(1, np.zeros(3, np.int64))  # compiled before threads want it

    team = Team(3)
    with pytest.raises((ValueError, RuntimeError)):
        team.run(fails, 3)
    seen = np.zeros((5, 8), np.int64)
    team.run(compiler.kernel(_rounds), 3, seen)
    assert seen[4, :3].tolist() == [81] * 3


def test_threads_that_cannot_be_started_leave_nobody_waiting(monkeypatch):
    team, submit = Team(3), ThreadPoolExecutor.submit

    def second_fails(self, function, thread):
        if thread == 2:
            raise RuntimeError("can't start new thread")
        return submit(self, function, thread)

    meets = compiler.kernel(_meets)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", second_fails)
    with pytest.raises(RuntimeError, match="new thread"):
        team.run(lambda thread, threads, barrier: meets(threads, barrier), 3)


def test_the_first_thread_is_left_alone_for_some_calls_where_others_take_its_core(monkeypatch):
    team = Team(2)

    def waits(thread, threads, barrier):
        time.sleep(0.03 * (threads > 1))
        return threads

    def threads_of(calls):
        return [team.run(waits, 2) for _ in range(calls)]

    assert threads_of(27) == [2, *[1] * 8, 2, *[1] * 16, 2]
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "_SHORT_S", 60.0)  # as if they were quick
        assert threads_of(34) == [*[1] * 32, 2, 2]
    assert threads_of(11) == [2, *[1] * 8, 2, 1]


def _meets(threads, barrier):
    meet(threads, barrier)


def _rounds(thread, threads, barrier, seen):
    seen[0, thread] = 1
    meet(threads, barrier)
    for i in range(1, len(seen)):
        total = 0
        for other in range(threads):
            total += seen[i - 1, other]
        seen[i, thread] = total % 97
        meet(threads, barrier)
