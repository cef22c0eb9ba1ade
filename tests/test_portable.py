"""The same bits on every x86-64 CPU: short trainings here, and on CPUs that qemu-user emulates."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.golden import GOLDEN, ROOT, RUNS

from rank0rl.run import launch_options, machine

QEMU = shutil.which("qemu-x86_64")
emulated = pytest.mark.skipif(not QEMU, reason="needs qemu-x86_64, of Debian's qemu-user")


def trained(*names, cpu=None, **env):
    """Return the hashes of the weights, by name of the run, on this CPU or on one that is emulated."""
    emulator = [QEMU, "-cpu", cpu] if cpu else []
    done = subprocess.run(
        [*emulator, sys.executable, "-W", "ignore", "-m", "helpers.golden", *names],
        cwd=ROOT / "tests",
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def golden(*names):
    """Return the hashes that are expected; skip where other versions are installed."""
    lines = (ROOT / "constraints.txt").read_text()
    for name in ("numpy", "scipy", "numba", "torch", "gymnasium", "mujoco", "cma"):
        wanted, got = (
            re.search(rf"^{name}==(.*)$", lines, re.M)[1],
            importlib.metadata.version(name),
        )
        if got.partition("+")[0] != wanted:
            pytest.skip(f"golden hashes are of {name} {wanted}: this is {got}")
    kept = json.loads(GOLDEN.read_text())
    return {name: kept[name] for name in names or RUNS}


SOME = (
    "ppo CartPole",
    "ppo Walker2d",
    "trpo",
    "cmaes",
    "bc",
    "gru",
    "images",
    "own network",
)


@pytest.mark.fast(1)
@pytest.mark.parametrize("names", [SOME, [name for name in RUNS if name not in SOME]])
def test_all_agents_give_the_golden_hashes(names):
    assert trained(*names) == golden(*names)


CPUS = ("Haswell", "Skylake-Client", "EPYC", "EPYC-Rome")


@emulated
@pytest.mark.slow
@pytest.mark.timeout(3600)  # an emulated CPU is 20 times as slow
@pytest.mark.parametrize("cpu", CPUS)
def test_other_cpus_give_the_golden_hashes(cpu):
    """Each CPU has its share of the runs: all of them take 40 minutes. `docs/reproducibility.md` has the command."""
    names = [*RUNS][CPUS.index(cpu) :: len(CPUS)]
    assert trained(*names, cpu=cpu) == golden(*names)


@pytest.mark.slow
def test_kernels_that_are_compiled_anew_have_the_same_bits(tmp_path):
    """The runs of the first test use kernels that were compiled in any order, or come from the cache."""
    names = [*reversed(RUNS)]
    assert trained(*names, XDG_CACHE_HOME=str(tmp_path)) == golden()


def run_portable(code):
    """Run code where torch's functions are replaced, in a process of its own; fail if it does."""
    env = {**os.environ, "MKL_CBWR": "COMPATIBLE"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


@pytest.mark.slow
def test_functions_that_mkl_rounds_by_cpu_are_those_of_numpy():
    code = (
        "import numpy as np, torch, rank0rl.nets\n"
        "for dtype in (torch.float32, torch.float64):\n"
        "    x = torch.rand(999, dtype=dtype, requires_grad=True)\n"
        "    for y in (x.sqrt(), torch._foreach_sqrt([x])[0], torch.sqrt(x.detach(), out=torch.empty(0, dtype=dtype)),"
        " x.detach().clone().sqrt_()):\n"
        "        assert (y.detach().numpy() == np.sqrt(x.detach().numpy())).all()\n"
        "    assert torch.allclose(x.atan().tan(), x)\n"
        "    x.sqrt().sum().backward()\n"
        "    assert torch.allclose(x.grad, 0.5 / x.detach().sqrt())\n"
        "assert torch.sqrt(torch.tensor(4)).dtype == torch.float32 and torch.rand(3).half().sqrt().dtype == torch.half\n"
    )
    run_portable(code)


@pytest.mark.slow
def test_large_products_of_an_update_are_computed_by_a_kernel():
    code = (
        "import threading, numpy as np, torch\n"
        "from rank0rl.nets.update import compiled_products\n"
        "from rank0rl.nets.kernels.products import matmul\n"
        "net, x = torch.nn.Linear(40, 40), torch.rand(999, 40, requires_grad=True)\n"
        "weight, bias, rows = (each.detach().numpy() for each in (net.weight, net.bias, x))\n"
        "def mkl(): return net(x).detach().numpy().copy()\n"
        "before, there, ours = mkl(), [], matmul(rows, weight.T) + bias\n"
        "assert (before != ours).any()\n"
        "with compiled_products(net, 999):\n"
        "    assert (mkl() == ours).all()\n"
        "    other = threading.Thread(target=lambda: there.append(mkl()))\n"
        "    other.start(); other.join()\n"
        "    assert (there[0] == before).all()\n"
        "    net(x).sum().backward()\n"
        "    assert (x.grad.numpy() == matmul(np.ones((999, 40), 'f'), weight)).all()\n"
        "    cut = torch.rand(99, 80)[:, ::2]\n"
        "    assert torch.allclose(cut.T @ cut, torch.einsum('ij,ik->jk', cut, cut), atol=1e-5)\n"
        "    assert torch.allclose(torch.addmm(x, x, net.weight, beta=2, alpha=0.5), 2 * x + 0.5 * (x @ net.weight), atol=1e-5)\n"
        "    assert (torch.ones(2, 3, dtype=torch.int64) @ torch.ones(3, 2, dtype=torch.int64) == 3).all()\n"
        "    try: net(x[:, :33])\n"
        "    except RuntimeError as error: assert 'multiplied' in str(error)\n"
        "    else: raise AssertionError\n"
        "with compiled_products(net, 9):\n"
        "    assert (mkl() == before).all()\n"
        "assert (mkl() == before).all()\n"
    )
    run_portable(code)


def test_a_fingerprint_names_the_primitive_that_differs(monkeypatch):
    before = machine.fingerprint()
    assert before == machine.fingerprint()
    changed = {**machine._primitives(), "torch exp of float32": lambda: np.zeros(1)}
    monkeypatch.setattr(machine, "_primitives", lambda: changed)
    now = machine.fingerprint()
    assert machine.unlike(before, now) == ["torch exp of float32"]
    start = {"versions": {}, "fingerprint": before}
    [line] = machine.differences(start, {**start, "fingerprint": now})
    assert line.startswith("fingerprint (torch exp of float32) ")
    assert machine.differences(start, {**start, "cpu": "another"}) == []


def test_a_rank_that_computes_other_bits_ends_the_job_at_its_start(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import os\n"
        "if os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '1':\n"
        "    import numpy\n"
        "    from rank0rl.run import machine\n"
        "    was = machine._primitives()\n"
        "    machine._primitives = lambda: {**was, 'numpy exp of float32': lambda: numpy.zeros(1)}\n"
        "from rank0rl.algos.ppo import PPO\n"
    )
    words = f"train.py CartPole --algo {file}:PPO --nprocs 2 --total-steps 4096 --run-dir {tmp_path}/run"
    done = subprocess.run(
        [sys.executable, *words.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "on rank 1 (" in done.stderr
    assert "numpy exp of float32 gives others than on rank 0" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "has"), [("fpu avx avx2 fma", True), ("fpu avx fma", False), ("avx2", False)]
)
def test_a_cpu_without_avx2_is_refused(flags, has, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: f"model name: x\nflags\t\t: {flags}\n")
    assert launch_options._has_avx2() is has
    if not has:
        with pytest.raises(ValueError, match="give --cpu native"):
            launch_options.limit_cpu("portable")
        launch_options.limit_cpu("native")
