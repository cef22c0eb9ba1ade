"""The pair of files laid out as CleanRL's are: few lines differ, both run, and all ranks' episodes are logged."""

import ast
import difflib
import os
import re
import runpy
import shlex
import sys
from unittest import mock

import pytest
from helpers.ranks import HERE, on_ranks, typed

import rank0rl

EXAMPLES = HERE.parent / "examples"
SHORT = "--num-envs 2 --num-steps 256 --num-minibatches 4 --update-epochs 1 --total-timesteps 1024"
CHART = "charts/episodic_return"


def code(name):
    """The lines of an example below its docstring, without empty ones."""
    text = (EXAMPLES / f"{name}.py").read_text()
    below = ast.parse(text).body[0].end_lineno
    return [line for line in text.splitlines()[below:] if line]


def test_twenty_lines_are_new_or_changed_and_all_steps_are_marked():
    before, after = code("cleanrl_style"), code("cleanrl_style_ranks")
    edits = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = [max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in edits if tag != "equal"]
    assert sum(changed) <= 20
    assert set(re.findall(r"# edit (\d)", "\n".join(after))) == set("12345678")


def test_the_page_shows_the_lines_that_differ():
    diff = difflib.unified_diff(
        code("cleanrl_style"), code("cleanrl_style_ranks"), n=0, lineterm=""
    )
    expected = "\n".join(line for line in [*diff][2:] if not line.startswith("@@"))
    assert f"```diff\n{expected}\n```" in (HERE.parent / "docs" / "drop-in.md").read_text(), (
        expected
    )


def episodes(folder):
    """The returns of all episodes that are logged below a folder, from one file."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [file] = [path for path in folder.rglob("*") if path.is_file()]
    events = EventAccumulator(str(file.parent), size_guidance={"scalars": 0}).Reload()
    assert len(events.Scalars("charts/SPS")) == 2  # once per iteration
    return [event.value for event in events.Scalars(CHART)]


IN_ONE_PROCESS = """
import runpy, sys
short = {short}
for name, env, seed in ("_ranks", "CartPole-v1", 1), ("", "CartPole-v1", 2), ("", "Pendulum-v1", 3):
    sys.argv[1:] = [*short, "--env-id", env, "--seed", str(seed)]
    runpy.run_path(f"{folder}/cleanrl_style{{name}}.py", run_name="__main__")
print("mpi4py" in sys.modules)
"""


@pytest.mark.slow
def test_both_run_in_one_process_without_mpi(tmp_path):
    text = IN_ONE_PROCESS.format(short=SHORT.split(), folder=EXAMPLES)
    *lines, mpi = typed(f"python -c {shlex.quote(text)}", cwd=tmp_path)
    assert [line.split()[1] for line in lines] == ["512", "1024"] * 3
    assert mpi == "False"
    first, second, third = sorted(
        (tmp_path / "runs").iterdir(), key=lambda path: path.name.split("__")[1]
    )
    for folder in (first, second):
        assert 700 < sum(episodes(folder)) <= 1024  # a reward of 1 for each step of whole episodes
    assert len(episodes(third)) == 4  # of 200 steps each, which are cut off
    assert all(-2000 < ret < 0 for ret in episodes(third))


def on_rank_train(folder):
    """Train as a rank; the rows of its batches and hashes of what ranks must have in common."""
    seen = {"rows": [], "weights": []}
    accum, bcast = rank0rl.rank0_accum_batches, rank0rl.rank0_bcast_wts

    def accum_(batch):
        gathered = accum(batch)
        seen["rows"].append([len(batch["obs"]), len(gathered["obs"])])
        return gathered

    def bcast_(agent):
        bcast(agent)
        seen["weights"].append(rank0rl.chksum(agent))  # raises if ranks differ

    cwd = os.getcwd()
    try:
        os.chdir(folder)
        with (
            mock.patch("rank0rl.mpi.gather.rank0_accum_batches", accum_),
            mock.patch("rank0rl.mpi.weights.rank0_bcast_wts", bcast_),
            mock.patch.object(sys, "argv", ["x", "--nprocs", "2", *SHORT.split()]),
        ):
            end = runpy.run_path(str(EXAMPLES / "cleanrl_style_ranks.py"), run_name="__main__")
    finally:
        os.chdir(cwd)
    norms = [end["obs_rms"], end["return_rms"]]
    rank0rl.chksum([norm.moments for norm in norms])
    return seen | {"norms": [norm.count for norm in norms], "first": end["obs"][0].tolist()}


@pytest.mark.slow
def test_rank_0_learns_from_the_rows_of_both_ranks_and_logs_the_episodes_of_both(tmp_path):
    first, second = on_ranks(2, "test_cleanrl_style:on_rank_train", str(tmp_path))
    assert first["rows"] == [[256, 512]] * 2
    assert second["rows"] == [[256, 0]] * 2
    assert first["weights"] == second["weights"]
    assert len(set(first["weights"])) == 2
    assert first["first"] != second["first"]  # each has its own episodes
    returns = episodes(tmp_path)
    assert 700 < sum(returns) <= 1024  # each rank has made 512 steps
    resets = len(returns) + 2
    assert first["norms"] == second["norms"] == [1024 + resets, 1024]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["cleanrl_style.py", "cleanrl_style_ranks.py --nprocs 2"])
def test_it_learns(command, tmp_path):
    typed(f"python {EXAMPLES}/{command} --total-timesteps 80000", cwd=tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [run] = (tmp_path / "runs").iterdir()
    returns = EventAccumulator(str(run)).Reload().Scalars(CHART)
    assert sum(event.value for event in returns[-20:]) / 20 > 450
