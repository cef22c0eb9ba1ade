"""Learning curves: from runs to curves, from seeds to one curve, from agents to interquartile means."""

import re
import sys

import numpy as np
import pytest
from helpers import forks
from helpers.runs import write_run

from rank0rl.tools import plot
from rank0rl.tools.plot import Curves


def curves(*seeds):
    return Curves(np.array([0.0, 1.0]), np.array(seeds, float))


def test_seeds_of_one_agent_are_one_curve_where_all_of_them_have_come(tmp_path):
    a = write_run(tmp_path / "a", ["nan", 10, 20, 30], seed=0)
    b = write_run(tmp_path / "b", [0, 20, 40], seed=1, checkpoint_every=5, rank0_envs=1)
    groups = plot.group([a, b])
    assert list(groups) == [("Walker2d-v5", "ppo")]
    (both,) = groups.values()
    assert (both.x[0], both.x[-1]) == (2000, 3000)  # the first of a with a return, the last of b
    np.testing.assert_allclose(both.ret[0], 10 + 10 * (both.x - 2000) / 1000)
    np.testing.assert_allclose(both.ret[1], 20 + 20 * (both.x - 2000) / 1000)


def test_other_settings_are_another_agent_in_the_same_environment_alone(tmp_path):
    folders = [
        write_run(tmp_path / "a", [1, 2], lr=0.001, seed=1),
        write_run(tmp_path / "b", [1, 2], lr=0.002, seed=1, hidden=[8]),
        write_run(tmp_path / "c", [1, 2], lr=0.003, env_id="Hopper-v5"),
        write_run(tmp_path / "d", [1, 2], lr=0.004, algo="rank0rl.algos.trpo:TRPO"),
        write_run(tmp_path / "e", [1, 2], lr=0.001, env_id="Swimmer-v5", max_replay_steps=10),
        write_run(tmp_path / "f", [1, 2], lr=0.001, env_id="Swimmer-v5", max_replay_steps=20),
    ]
    assert list(plot.group(folders)) == [
        ("Hopper-v5", "ppo"),
        ("Swimmer-v5", "ppo max_replay_steps=10"),
        ("Swimmer-v5", "ppo max_replay_steps=20"),
        ("Walker2d-v5", "ppo hidden=[8] lr=0.002"),
        ("Walker2d-v5", "ppo lr=0.001"),
        ("Walker2d-v5", "trpo"),
    ]


def test_classes_of_one_file_are_agents_of_their_own(tmp_path):
    folders = [
        write_run(tmp_path / "a", [1, 2], algo="mine.py:A"),
        write_run(tmp_path / "b", [1, 2], algo="mine.py:B"),
        write_run(tmp_path / "c", [1, 2], algo="elsewhere/mine.py:B", seed=1),
    ]
    found = {agent: len(of.ret) for (_, agent), of in plot.group(folders).items()}
    assert found == {"mine:A": 1, "mine:B": 2}
    assert list(plot.group(folders[1:])) == [("Walker2d-v5", "mine")]


def test_hours_and_what_is_as_fast_as_what(tmp_path):
    one = write_run(tmp_path / "a", [1, 2, 3], seconds=7200, nprocs=1)
    two = write_run(tmp_path / "b", [1, 2, 3], seconds=3600, nprocs=2)
    groups = plot.group([one, two], "hours")
    ends = {agent: (of.x[0], of.x[-1]) for (_, agent), of in groups.items()}
    assert ends == {"ppo nprocs=1": (2, 6), "ppo nprocs=2": (1, 3)}
    with pytest.raises(ValueError, match=r"a and .*b have the same seed"):
        plot.group([one, two])


def test_interquartile_means_by_hand():
    groups = {
        ("A", "good"): curves([0, 100], [20, 140]),
        ("A", "bad"): curves([10, 10], [10, 65]),
        ("B", "good"): curves([0, 2], [0, 4]),
        ("B", "bad"): curves([0, 0], [0, 1]),
    }
    means = plot.interquartile_means(groups)
    # A: start 10, the best ends at 120: scores 90/110, 130/110; 0, 0.5. B: 0, 3: 2/3, 4/3; 0, 1/3.
    assert means["good"][0] == pytest.approx((90 / 110 + 130 / 110) / 2)
    assert means["bad"][0] == pytest.approx((0 + 1 / 3) / 2)
    for mean, low, high in means.values():
        assert low < mean < high
    assert means == plot.interquartile_means(groups)
    # Neither with seeds of one agent alone, nor in another order.
    assert means == plot.interquartile_means({("C", "good"): curves([0, 5], [0, 6]), **groups})


def test_the_interval_is_that_of_a_plain_loop():
    scores = [np.array([0.0, 1.0, 5.0]), np.array([10.0, 12.0])]
    rng = np.random.default_rng(3)
    drawn = []
    for _ in range(4000):
        every = sorted([rng.choice(s) for s in scores for _ in s])  # within each environment
        drawn.append(np.mean(every[1:4]))  # of 5, a quarter rounded down is 1
    mean, low, high = plot.interquartile_mean(scores)
    assert mean == pytest.approx((1 + 5 + 10) / 3)
    np.testing.assert_allclose([low, high], np.percentile(drawn, [2.5, 97.5]), atol=0.35)


@pytest.mark.parametrize(
    "without",
    [
        {("B", "ppo"): curves([0, 1])},  # one seed
        {("B", "ppo"): curves([1, 0], [1, 1])},  # nothing gained
        {("B", "trpo"): curves([0, 1], [0, 1])},  # none of that agent
    ],
)
def test_no_interquartile_mean_of_one_environment(without):
    both = {("A", "ppo"): curves([0, 1], [0, 2])}
    assert plot.interquartile_means({**both, ("B", "ppo"): curves([0, 1], [0, 1])})
    assert plot.interquartile_means({**both, **without}) == {}


def test_the_picture_and_the_table(tmp_path, capsys):
    folders = [
        write_run(
            tmp_path / f"{env_id}{algo}{seed}", [0, 10 + seed], env_id=env_id, algo=algo, seed=seed
        )
        for env_id in ("A-v1", "B-v1")
        for algo in ("ppo", "my_$x$_agent:It")
        for seed in (0, 1)
    ]
    out = tmp_path / "curves.svg"
    assert plot.main([*map(str, folders), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"A-v1  ppo: 10\.5 .*10 .*11.* 2.* 2,000 steps", said)
    assert re.search(r"mean +ppo: 1\.000 .*0\.952 .*1\.048", said)
    assert said.endswith(f"{out}\n")
    picture = out.read_text()
    for text in ("A-v1", "B-v1", "ppo", "my_$x$_agent", "interquartile mean", "2k"):
        assert f">{text}<" in picture, text
    assert "band: lowest to highest seed" in picture
    assert picture.count("fill-opacity: 0.25") == 4


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_other_kinds_of_picture(suffix, begins, tmp_path):
    run, out = write_run(tmp_path / "a", [1, 2]), tmp_path / f"x.{suffix}"
    assert plot.main([str(run), "--out", str(out), "--x", "hours"]) == 0
    assert out.read_bytes().startswith(begins)


def test_one_seed_has_no_band(tmp_path):
    out = tmp_path / "x.svg"
    assert plot.main([str(write_run(tmp_path / "a", [1, 2])), "--out", str(out)]) == 0
    assert "band" not in out.read_text()
    assert "fill-opacity" not in out.read_text()
    assert ">ppo<" in out.read_text()


def test_wrong_use(tmp_path, capsys, monkeypatch):
    good = write_run(tmp_path / "good", [1, 2])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "progress.csv").write_text("epoch,reward\n1,2\n")
    text = write_run(tmp_path / "text", [1, "x"])
    bare = write_run(tmp_path / "bare", [1])
    (bare / "config.toml").unlink()
    early = write_run(tmp_path / "early", [3], seed=1)
    late = write_run(tmp_path / "late", ["nan", 3], seed=2)
    for args, facts in (
        ([tmp_path / "nowhere"], ("nowhere", "progress.csv")),
        ([write_run(tmp_path / "empty", [])], ("empty/progress.csv", "no rows")),
        ([good, tmp_path / "nowhere"], ("nowhere", "check the name")),
        ([tmp_path / "other"], ("other/progress.csv", "episodes")),
        ([text], ("text/progress.csv", "return_mean", "'x'")),
        ([bare], ("bare/config.toml",)),
        ([write_run(tmp_path / "nan", ["nan"])], ("nan", "no return")),
        ([good, good], ("good", "same seed")),
        ([early, late], ("2,000", "1,000")),
        ([], ("folder", "runs/")),
        ([good, "--out", tmp_path / "x.bmp"], ("x.bmp", ".png", ".svg", ".pdf")),
        ([good, "--out", tmp_path / "none" / "x.png"], ("none/x.png",)),
    ):
        assert plot.main([*map(str, args)]) == 2
        err = capsys.readouterr().err
        assert all(fact in err for fact in facts), err
        assert err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.main([str(good), "--out", str(tmp_path / "x.png")]) == 2
    assert "pip install -e '.[plot]'" in capsys.readouterr().err


def test_folders_without_a_row_are_left_out_and_named(tmp_path, capsys):
    good = write_run(tmp_path / "good", [1, 2])
    (tmp_path / "study").mkdir()
    folders = [write_run(tmp_path / "empty", []), good, tmp_path / "study"]
    assert plot.main([*map(str, folders), "--out", str(tmp_path / "x.png")]) == 0
    empty, other = capsys.readouterr().err.splitlines()
    assert empty.startswith(f"left out: {tmp_path / 'empty'}")
    assert other.startswith(f"left out: {tmp_path / 'study'} ")


def test_a_run_without_a_return_is_left_out(tmp_path, capsys):
    good, young = write_run(tmp_path / "good", [1, 2]), write_run(tmp_path / "young", ["nan"])
    out = ["--out", str(tmp_path / "x.png")]
    assert plot.main([str(good), str(young), *out]) == 0
    assert f"left out: {young} has no return yet" in capsys.readouterr().err
    assert plot.main([str(young), *out]) == 2


def test_all_runs_with_equal_seeds_are_named_at_once(tmp_path):
    a, b, c, d, e, f = (
        write_run(tmp_path / name, [1, 2], seed=seed)
        for name, seed in (("a", 0), ("b", 1), ("c", 0), ("d", 0), ("e", 1), ("f", 2))
    )
    which = f"{a} and {c} and {d}; {b} and {e} have the same seed and the same settings"
    with pytest.raises(ValueError, match=re.escape(f"{which}: leave out {c}, {d}, {e}") + "$"):
        plot.group([a, b, c, d, e, f])


def test_a_row_that_is_being_written_is_left_out(tmp_path):
    run = write_run(tmp_path / "a", [1, 2])
    with (run / "progress.csv").open("a") as file:
        file.write("3,3000,30,90,7")  # of 70.5
    (of_run,) = plot.group([run]).values()
    assert of_run.x[-1] == 2000


def test_it_is_one_of_the_tools():
    done = forks.run("-m", "rank0rl", "plot", "nowhere")
    assert done.returncode == 2
    assert "nowhere" in done.stderr
