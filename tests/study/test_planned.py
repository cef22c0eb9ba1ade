"""Which runs a study has."""

import dataclasses
import json
import tracemalloc

import pytest

from rank0rl.tools.study.planned import Options, _combined, _values, planned, seeds, unequal
from rank0rl.tools.study.study import _enter, _read
from rank0rl.tools.study.training import _spread

SMALL = ["--total-steps", "1000", "--num-envs", "4", "--steps-per-batch", "64"]


@pytest.mark.parametrize(
    ("text", "expected"), [("0:3", [0, 1, 2]), ("7", [7]), ("3,11,5", [3, 11, 5])]
)
def test_seeds(text, expected):
    assert seeds(text) == expected


@pytest.mark.parametrize("text", ["", "a", "3:3", "1,1", "-1", "0:1:2", "-2:3"])
def test_wrong_seeds(text):
    with pytest.raises(ValueError, match=f"seeds must be numbers.*got {text!r}"):
        seeds(text)


NUMBERS = ",".join(map(str, range(1, 301)))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"seeds": "0:1000000000"}, "at most 10,000 seeds: got 1,000,000,000"),
        ({"seeds": f"0:{10**30}"}, "at most 10,000 seeds"),
        ({"grid": (f"epochs={NUMBERS}", f"gamma={NUMBERS}")}, "got 90,000 of each of 5 seeds"),
        ({"grid": (f"epochs={NUMBERS}",), "seeds": "0:100"}, "got 300 of each of 100 seeds"),
    ],
)
def test_too_many_runs_are_refused_before_any_is_made(more, said):
    tracemalloc.start()
    with pytest.raises(ValueError, match=said):
        planned(Options(**{"envs": ("CartPole",)} | more), SMALL)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_agents_with_other_settings_are_named_with_what_differs():
    algos = ("ppo", "examples/spo.py:SPO")
    runs = planned(Options(envs=("Pendulum", "Hopper"), algo=algos, grid=("lr=1e-3,1e-4",)), [])
    assert unequal(runs) == []  # a subclass has the settings of its parent
    own = [run for run in runs if "SPO" in run.options.algo]
    others = planned(Options(envs=("Pendulum",), algo=("ppo",)), ["--gamma", "0.5"])
    [line] = unequal([*own, *others])
    assert line.startswith(
        "on Pendulum-v1, agents have different settings: gamma (spo 0.9, ppo 0.5), lr ("
    )
    assert "num_envs" not in line


def test_agents_and_environments_of_one_short_name_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("v1", "v2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(
            "from rank0rl.algos.ppo import PPO\nclass A(PPO): pass\nclass B(PPO): pass\n"
        )
    names = [
        run.name
        for algos in (("v1/mine.py:A", "v1/mine.py:B", "ppo"), ("v1/mine.py:A", "v2/mine.py:A"))
        for run in planned(Options(envs=("CartPole",), algo=algos, seeds="0"), SMALL)
    ]
    assert names == [
        "CartPole-v1_mine_A-seed0",
        "CartPole-v1_mine_B-seed0",
        "CartPole-ppo-seed0",
        "CartPole-v1_mine_A-seed0",
        "CartPole-v2_mine_A-seed0",
    ]
    for name in ("a b", "a_b"):
        (tmp_path / f"{name}.py").write_text(
            "from rank0rl.algos.ppo import PPO\nclass A(PPO): pass\n"
        )
    with pytest.raises(
        ValueError, match="two runs of the study would be called CartPole-a_b-seed0"
    ):
        planned(Options(envs=("CartPole",), algo=("a b.py", "a_b.py"), seeds="0"), SMALL)


def test_settings_are_compared_where_two_agents_have_them(tmp_path):
    algos = ("ppo", "examples/spo.py", "reinforce")
    (tmp_path / "one.toml").write_text("clip_ratio = 0.1\n")
    own = planned(Options(envs=("Pendulum",), algo=algos[1:]), [])
    more = planned(Options(envs=("Pendulum",), algo=("ppo",)), ["--clip-ratio", "0.1"])
    [line] = unequal([*own, *more])
    assert "clip_ratio (spo 0.2, ppo 0.1)" in line


def test_every_combination_of_a_grid():
    assert [*_combined({})] == [{}]
    assert [*_combined(_values(["lr=1e-4,3e-4", "norm-obs=true,false"]))] == [
        {"lr": lr, "norm_obs": norm} for lr in ("1e-4", "3e-4") for norm in ("true", "false")
    ]


@pytest.mark.parametrize("word", ["lr", "lr=", "=1", "lr=1,,2"])
def test_a_wrong_grid(word):
    with pytest.raises(ValueError, match="a setting must be NAME=VALUE"):
        _values([word])


def test_every_setting_has_its_first_seed_early():
    given = Options(envs=("CartPole", "Pendulum"), seeds="0:2", grid=("hidden=8 8,16",))
    runs = planned(given, SMALL)
    assert [run.name for run in runs] == [
        f"{env}-ppo-hidden={size}-seed{seed}"
        for seed in (0, 1)
        for env in ("CartPole", "Pendulum")
        for size in ("8_8", "16")
    ]
    own = ("CartPole", "--algo", "ppo", "--hidden", "8", "8")
    assert runs[0].words == (*own, *SMALL, "--seed", "0")
    assert runs[0].options.env_id == "CartPole-v1"
    assert runs[0].most == 4
    assert runs[0].part({"steps": "250", "episodes": "1"}) == 0.25


def test_a_run_by_episodes(tmp_path):
    (run,) = planned(Options(envs=("CartPole",), algo=("reinforce",), seeds="0"), ["-n", "50"])
    (tmp_path / run.name).mkdir()
    for by, over in (("num_episodes 50", True), ("num_episodes 40", False), ("hook Mine", True)):
        (tmp_path / run.name / "summary.json").write_text(json.dumps({"ended": by}))
        assert run.ended(tmp_path) is over
    (tmp_path / run.name / "summary.json").write_text('{"ended')  # damaged: the run goes on
    assert not run.ended(tmp_path)
    assert run.part({"steps": "250", "episodes": "10"}) == 0.2


def test_what_was_found_is_beside_the_defaults():
    runs = planned(Options(envs=("CartPole",), seeds="3"), SMALL, {"lr": "0.01"})
    assert [run.name for run in runs] == ["CartPole-ppo-seed3", "CartPole-ppo-lr=0.01-seed3"]


@pytest.mark.parametrize(
    "more", [{"envs": ("CartPole", "CartPole-v1")}, {"grid": ("patience=5,6",)}]
)
def test_runs_must_differ(more):
    given = Options(**{"envs": ("CartPole",), "seeds": "0"} | more)
    with pytest.raises(ValueError, match="have the same curve: leave one of them out"):
        planned(given, SMALL)


def test_a_search_may_find_the_defaults():
    runs = planned(Options(envs=("CartPole",), seeds="3"), SMALL, {"gamma": "0.99"})
    assert [run.name for run in runs] == ["CartPole-ppo-seed3"]


def test_a_wrong_option_is_found_before_anything_is_trained(capsys):
    with pytest.raises(ValueError, match="gamma must be in"):
        planned(Options(envs=("CartPole",), seeds="0", grid=("gamma=0.9,2",)), SMALL)
    with pytest.raises(ValueError, match="environment"):
        planned(Options(envs=("NoSuch",), seeds="0"), SMALL)


@pytest.mark.parametrize(
    ("cores", "left_s", "most", "expected"),
    [
        (2, [10], [8], [2]),
        (4, [10, 10], [8, 8], [2, 2]),
        (4, [30, 10], [8, 8], [3, 1]),
        (8, [10, 10], [2, 3], [2, 3]),
        (3, [10, 10, 10], [8, 8, 8], [1, 1, 1]),
        (2, [], [], []),
    ],
)
def test_cores_go_to_the_run_that_would_end_last(cores, left_s, most, expected):
    assert _spread(cores, left_s, most) == expected


def test_a_study_has_a_folder_of_its_own(tmp_path):
    (tmp_path / "config.toml").touch()
    with pytest.raises(ValueError, match="holds a run, .*: name another --out"):
        _enter(tmp_path)


def test_rank_0_may_leave_fewer_envs_to_others():
    (run,) = planned(Options(envs=("CartPole",), seeds="0"), [*SMALL, "--rank0-envs", "3"])
    assert run.most == 2


@pytest.mark.parametrize(
    "words",
    [
        *(["--resume=auto"], ["--run-dir=x"], ["--run_dir=x"], ["--seed", "7"], ["--nprocs=2"]),
        ["--keep-batches=x"],
    ],
)
def test_a_study_chooses_seed_ranks_and_folders_of_its_runs(words):
    said = f"leave out {words[0].partition('=')[0].replace('_', '-')}; see --seeds"
    with pytest.raises(ValueError, match=said):
        planned(Options(envs=("CartPole",), seeds="0"), [*SMALL, *words])
    with pytest.raises(
        ValueError, match="one core: got ranks_per_env 2; leave out --ranks-per-env"
    ):
        planned(Options(envs=("CartPole",)), ["--ranks-per-env", "2"])
    with pytest.raises(ValueError, match="leave out --seed; see --seeds"):
        planned(Options(envs=("CartPole",), seeds="0", grid=("seed=1,2",)), SMALL)


def test_no_setting_is_named_twice():
    """The later of two would count, and nobody would know."""
    given = Options(envs=("CartPole",), seeds="0", grid=("gamma=0.9,0.99",))
    with pytest.raises(ValueError, match="--gamma would be the same in every run"):
        planned(given, [*SMALL, "--gamma", "0.95"])
    with pytest.raises(ValueError, match="--grid must have each setting once"):
        planned(dataclasses.replace(given, grid=("lr=1e-3", "epochs=2,3", "lr=1e-4")), SMALL)
    for name in ("--grid", "--search"):
        with pytest.raises(ValueError, match=f"name all values after one {name}"):
            _read(["CartPole", name, "lr=1:2", f"{name}=gamma=0.1:0.2"])
    with pytest.raises(ValueError, match="leave out --cores"):
        _read(["CartPole", "--hosts", "a:2", "--cores", "1"])
