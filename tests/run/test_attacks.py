"""Folders that were made to take all memory or time of whoever opens them, over all tools.

Each tool runs in a child of this process, which has loaded everything. It ends after 20 s of a core, and waits for
nothing, with 2 GB, and says at most one line of error.
"""

import contextlib
import hashlib
import io
import os
import resource
import shutil
import sys
import time
import tomllib
import traceback
from functools import partial
from pathlib import Path

import pytest
import tomli_w
import torch
from helpers.runs import SMALL, train

from rank0rl import start
from rank0rl.__main__ import module_of
from rank0rl.run import checkpoint
from rank0rl.run.launch_options import Words

LIMIT_S, LIMIT_BYTES = 20.0, 2 << 30
DOTS = "a." * 60_000


def forged(tree):
    payload = tree() + b"\n\x02\0\0\0\0\0\0\0{}"
    head = f"rank0rl checkpoint {checkpoint._VERSION}\n{hashlib.sha256(payload).hexdigest()}\n"
    return head.encode() + payload


def sparse(path, size, head=b""):
    path.write_bytes(head)
    os.truncate(path, size)


def settings(**change):
    """Change settings in the checkpoint and in config.toml."""

    def attack(folder):
        path = checkpoint.latest(folder)
        state = checkpoint.read(path)
        checkpoint.write(path, {**state, "settings": {**state["settings"], **change}})
        toml = tomllib.loads((folder / "config.toml").read_text())
        (folder / "config.toml").write_text(tomli_w.dumps({**toml, **change}))

    return attack


def content(name, *parts):
    """Write a file; "checkpoint" is the last one. A part is bytes, or makes them: large ones exist only then."""

    def attack(folder):
        path = checkpoint.latest(folder) if name == "checkpoint" else folder / name
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            for part in parts:
                file.write(part() if callable(part) else part)

    return attack


def special(name, make):
    def attack(folder):
        path = checkpoint.latest(folder) if name == "checkpoint" else folder / name
        path.unlink(missing_ok=True)
        make(path)

    return attack


def state(change):
    """Change what a checkpoint holds besides its settings."""

    def attack(folder):
        path = checkpoint.latest(folder)
        saved = checkpoint.read(path)
        change(saved)
        checkpoint.write(path, saved)

    return attack


def nested(value, times):
    for _ in range(times):
        value = [value]
    return value


TEXTS = [
    f"{DOTS}a = 1\n".encode(),
    f"[{DOTS}a]\n".encode(),
    f"x = {{{DOTS}a = 1}}\n".encode(),
    b"x = " + b"[" * 3000 + b"]" * 3000,
    b"x = " + b"{a = " * 3000 + b"1" + b"}" * 3000,
    b"".join(b"k%d = 1\n" % i for i in range(300_000)),
    b"".join(b"[t.t%d]\n" % i for i in range(100_000)),
    lambda: b'x = "' + b"y" * (15 << 20) + b'"\n',
    lambda: b"x = [" + b"1," * (5 << 20) + b"]\n",
    b"[[record]]\n" * 500_000,
    b"x = 1" + b"0" * 100_000,
    b"x = '\x1b[2J'\n",
    b"\xff" * 1000,
    b"",
]
TABLES = [
    (b"iteration,steps\n", lambda: b"\n" * (300 << 20)),
    (b"iteration,steps\n", lambda: b"1,2\n" * (60 << 20)),
    (b"iteration", lambda: b",a" * (20 << 20), b"\n"),
    (b'iteration,steps\n"', lambda: b"x" * (100 << 20)),
    (lambda: b"\0" * (100 << 20),),
    (lambda: b"\r" * (200 << 20),),
    (lambda: b"\r\n" * (100 << 20),),
    (b"iteration,", lambda: b"1" * (200 << 20)),
]
SPECIAL = [
    os.mkfifo,
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to(path),
    lambda path: path.mkdir(),
    lambda path: sparse(path, 1 << 36),
    lambda path: sparse(path, 1 << 30),
    lambda path: sparse(path, 1 << 36, f"rank0rl checkpoint {checkpoint._VERSION}\n".encode()),
]
TREES = [
    lambda: b"[" * 1_000_000,
    lambda: b'{"dict": [' + b"[]," * (10 << 20) + b"[]]}",
    lambda: b'{"dict": [["a", [' + b"{}," * (10 << 20) + b"{}]]]}",
    lambda: b'{"dict": [["a", ' + b"9" * (30 << 20) + b"]]}",
    lambda: b'{"dict": [["a", "' + b"x" * (31 << 20) + b'"]]}',
    lambda: b" " * (1 << 26),
]
SETTINGS = [
    {"hidden": [60_000, 60_000]},
    {"hidden": [1 << 40]},
    {"hidden": [2] * 100_000},
    {"value_hidden": [60_000, 60_000]},
    {"memory_size": 60_000, "recurrent": "gru"},
    {"num_envs": 10**7},
    {"num_envs": 10**18},
    {"steps_per_batch": 10**12, "num_envs": 2},
    {"minibatch_size": 10**15},
    {"total_steps": 10**300},
    {"wrappers": ["FrameStackObservation(stack_size=200000000)"]},
    {"wrappers": ["FrameStackObservation(stack_size=2e8)"]},
    {"wrappers": ["TimeLimit(max_episode_steps=-1)"]},
    {"wrappers": ["ReshapeObservation(shape=(100000,100000))"]},
    {"wrappers": ["TimeAwareObservation"] * 100_000},
    {"wrappers": ["TimeAwareObservation(" + "[" * 5000 + ")"]},
    {"wrappers": ["DelayObservation(delay=100000000)"]},
    {"env_kwargs": {"max_episode_steps": -1}},
    {"env_kwargs": {"max_episode_steps": 10**30}},
    {"env_kwargs": {"a": {"b": ["x" * 10**6] * 20}}},
    {"env_id": "Pendulum-v1", "env_kwargs": {"max_episode_steps": -1}},
    {"env_id": "x" * 10**7},
    {"env_id": "FrozenLake-v1", "env_kwargs": {"desc": ["S" + "F" * 3000] * 3000}},
    {"algo": "x" * 10**6},
    {"info": [f"sum:{i}" for i in range(200_000)]},
    {"hook": ["a.py:B"] * 100_000},
    {"gamma": 10**400},
    {"lr": "1:" * 10**6},
    {"keep_checkpoints": "spread:" + "9" * 5000},
    {"max_replay_steps": 10**18},
    {"checkpoint_every": 10**18},
    {"gather_parts": 10**12},
    {"learner_threads": 10**9},
    {"epochs": 0},
    {"seed": 10**4000},
]
STATES = [
    lambda saved: saved["progress"].update(iteration=10**18),
    lambda saved: saved["progress"].update(iteration=-(10**18)),
    lambda saved: saved["progress"].update(steps=10**400),
    lambda saved: saved["progress"].update(returns=[0.0] * 10**6),
    lambda saved: saved["collector"]["envs"].update(steps=torch.full((2,), 1 << 60)),
    lambda saved: saved["collector"]["envs"].update(kept=torch.full((2,), 1 << 60)),
    lambda saved: saved["collector"]["envs"].update(kept=torch.full((2,), -5)),
    lambda saved: saved["collector"]["envs"].update(obs=torch.zeros(2, 1 << 20)),
    lambda saved: saved["collector"].update(envs={}),
    lambda saved: saved["collector"].update(envs=nested(1, 60)),
    lambda saved: saved["collector"].update(settings={"1": "[" * 10**6}),
    lambda saved: saved["weights"].update({str(i): torch.zeros(0) for i in range(100_000)}),
    lambda saved: saved["weights"].clear(),
    lambda saved: saved.update(agent=nested(1, 60)),
    lambda saved: saved.update(agent={"adam": {str(i): i for i in range(300_000)}}),
    lambda saved: saved.update(rows_sha256="x" * 10**7),
    lambda saved: saved.update(hooks={"x": nested({}, 60)}),
]
JSONS = [
    b"[" * 10**6,
    b'{"a": ' * 10**6,
    b'{"a": ' + b"9" * 10**6 + b"}",
    b"{}",
    b"[]",
    b'{"ended": 5}',
]
ATTACKS = [
    *(content("config.toml", text) for text in TEXTS),
    *(content("progress.csv", *parts) for parts in TABLES),
    *(content("summary.json", text) for text in JSONS),
    *(content("checkpoint", partial(forged, tree)) for tree in TREES),
    *(
        special(name, make)
        for name in ("config.toml", "progress.csv", "summary.json", "checkpoint")
        for make in SPECIAL
    ),
    *(settings(**change) for change in SETTINGS),
    *(state(change) for change in STATES),
]


def resume(folder):
    argv = ["--resume", str(folder), "--quiet", "--stop-after-iterations", "3"]
    return start.start(Words.read(argv), None, lambda options: None, lambda *options: [])


def tool(name, *args):
    def run(folder):
        return module_of(name).main([str(folder), *(a.format(folder) for a in args)])

    run.__name__ = name
    return run


TOOLS = [
    resume,
    tool("evaluate", "--episodes", "1"),
    tool("plot", "--out", "{}/x.png"),
    tool("report", "--out", "{}/x.html"),
    tool("verify", "--rows", "1"),
    tool("replay", "--iteration", "2", "--env", "0"),
    tool("export", "--out", "{}/x.pt2"),
    tool("record", "--minari", "attacked/ppo-v0", "--episodes", "1"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacks") / "r"
    args = [*SMALL, "--hidden", "8", "--total-steps", "256", "--stop-after-iterations", "2"]
    train(folder, *args, "--seed", "0")
    os.environ["MINARI_DATASETS_PATH"] = str(folder.parent / "sets")
    for use in TOOLS:  # all that they import
        copy = folder.parent / "copy"
        shutil.copytree(folder, copy)
        with contextlib.redirect_stdout(io.StringIO()):
            assert use(copy) == 0, use.__name__
        shutil.rmtree(copy)
    os.environ["MINARI_DATASETS_PATH"] = str(folder.parent / "more sets")
    yield folder
    del os.environ["MINARI_DATASETS_PATH"]


def ended(use, folder):
    """Run a tool in a child; return its exit code, what it said on stderr, seconds, and bytes beyond this process's."""
    said = folder.parent / "said"
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    begun = time.monotonic()
    child = os.fork()
    if not child:
        code = 70
        try:
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            code = use(folder)
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() > begun + 6 * LIMIT_S:
            os.kill(child, 9)
        time.sleep(0.005)
    taken = usage.ru_utime + usage.ru_stime
    code = os.waitstatus_to_exitcode(status)
    return code, said.read_text(errors="replace"), taken, (usage.ru_maxrss << 10) - before


def attacked(run, tmp_path, seeds):
    """Attack a tool for each seed; return all that was wrong."""
    wrong = []
    for seed in seeds:
        attack, use = ATTACKS[seed % len(ATTACKS)], TOOLS[seed // len(ATTACKS) % len(TOOLS)]
        folder = tmp_path / "r"
        shutil.copytree(run, folder)
        attack(folder)
        code, said, taken, more = ended(use, folder)
        lines = [line for line in said.splitlines() if not line.startswith("note: ")]
        # verify and replay say on stdout what differs.
        is_one_line = [line[:7] for line in lines] == ["error: "]
        right = code == 0 or (code == 1 and not lines) or (code in (1, 2) and is_one_line)
        if not right or taken > LIMIT_S or more > LIMIT_BYTES or len(said) > 5000:
            what = f"{use.__name__}: code {code}, {taken:.1f} s, {more >> 20} MB, {said[:100]!r} {said[-300:]!r}"
            wrong.append(f"seed {seed}: {what}")
            print(wrong[-1], flush=True)
        shutil.rmtree(folder)
        shutil.rmtree(run.parent / "more sets", ignore_errors=True)
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_folder_takes_all_memory(run, tmp_path):
    """Each attack meets one tool, all tools in turn."""
    tools = [i % len(TOOLS) for i in range(len(ATTACKS))]
    seeds = [i + len(ATTACKS) * tool for i, tool in enumerate(tools)]
    assert attacked(run, tmp_path, seeds) == []
