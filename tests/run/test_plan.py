"""What rank 0 finds out before a run."""

import pytest

from rank0rl import start
from rank0rl.run import machine, plan, settings
from rank0rl.run.launch_options import Words
from rank0rl.run.options import RunOptions


def test_the_command_line_is_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("num_envs = 4\nsteps_per_batch = 16\nlr = 1e-3\n")
    argv = ["CartPole-v1", "--config", str(file), "--num-envs", "2", "--run-dir", str(tmp_path)]
    made = plan.prepare(Words.read(argv), None, 1)
    assert (made.options.num_envs, made.options.steps_per_batch, made.options.seed) == (2, 16, 0)
    assert (made.agent.lr, made.source, made.folder) == (1e-3, str(file), tmp_path)


@pytest.mark.parametrize("argv", [["--episodes-per-batch", "4"], ["--episodes_per_batch=4"]])
def test_the_kind_of_batch_on_the_command_line_replaces_that_of_the_file(argv):
    options, _ = settings._read_line(Words.read(argv), {"steps_per_batch": 64}, "file")
    assert (options.steps_per_batch, options.episodes_per_batch) == (None, 4)


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        ("--hidden 10000000", ("--hidden 10000000", "0.9 GB", "0.5 GB")),  # 16 * (5 + 1) * 10^7
        ("--hidden 8 6000 6000", ("--hidden 8 6000 6000", "0.5 GB")),
        ("--algo klppo --value-hidden 6000 6000", ("--value-hidden 6000 6000",)),
        ("--steps-per-batch 64000000", ("64000000 steps", "1.0 GB")),
        ("--num-envs 10000000", ("640000000 steps", "9.5 GB")),
        ("--hidden 5000000", ()),
        ("--algo cem --episodes-per-batch 40", ()),
    ],
)
def test_what_memory_cannot_hold_is_refused(argv, facts, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 1 << 29)
    argv = ["CartPole", *argv.split(), "--run-dir", str(tmp_path / "r")]
    if not facts:
        plan.prepare(Words.read(argv), None, 1)
        return
    with pytest.raises(ValueError, match="more memory than there is") as error:
        plan.prepare(Words.read(argv), None, 1)
    assert all(fact in str(error.value) for fact in facts), error.value
    assert not (tmp_path / "r").exists()


def test_further_checks_are_made_before_there_is_a_folder(tmp_path):
    seen = []

    def refuse(options):
        seen.append(options.env_id)
        raise ValueError("not here")

    argv = ["CartPole", "--run-dir", str(tmp_path / "r")]
    with pytest.raises(ValueError, match="not here"):
        plan.prepare(Words.read(argv), None, 1, check=refuse)
    assert seen[0].startswith("CartPole-v")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        ("CartPole --num-envs 4 --run-dir r", ""),
        ("CartPole --stop-after-iterations 5", "--stop-after-iterations 5"),
        ("CartPole --quiet --stop_after_seconds=1.5", "--stop-after-seconds 1.5 --quiet"),
        (
            "m:make --start-timeout 900 --nprocs 2 --env-folders scratch --trust",
            "--nprocs 2 --start-timeout 900.0 --env-folders scratch",
        ),
        ("CartPole --quiet --no-quiet --stop-after-seconds None", ""),
    ],
)
def test_a_restart_keeps_what_the_checkpoint_does_not_hold(argv, kept):
    again = Words.to_go_on("r", Words.read(argv.split()).given)
    assert again.argv == ["--resume", "r", *kept.split()]
    assert again.given["trust"]


def test_the_command_that_goes_on_repeats_what_no_checkpoint_holds(tmp_path):
    argv = ["CartPole-v1", "--run-dir", str(tmp_path), "--env-folders", "my scratch", "--phases"]
    argv += ["--max-restarts", "2", "--stop-after-iterations", "3", "--trust", "--total-steps", "9"]
    said = start._resume_command(plan.prepare(Words.read(argv), None, 1), 2, " --algo a.py:A")
    assert said.endswith(
        f" --resume {tmp_path} --algo a.py:A --nprocs 2 --max-restarts 2 "
        f"--env-folders 'my scratch' --phases"
    )


def test_another_length_or_device_is_said(tmp_path):
    old = RunOptions()
    new = RunOptions(total_steps=5, num_episodes=7, device="cuda")
    said = plan._schedule_notes(new, old)
    for facts in (("1000000", "5"), ("None", "7"), ("cpu", "cuda")):
        assert any(all(fact in note for fact in facts) for note in said)
    assert plan._schedule_notes(old, old) == []


def test_a_command_line_goes_through_tyro_once(tmp_path, monkeypatch):
    """And what it says is over the file in configs/, also where it says the default."""
    seen = []
    cli = settings.tyro.cli
    monkeypatch.setattr(
        settings.tyro, "cli", lambda *a, **k: seen.append(k["args"]) or cli(*a, **k)
    )
    (tmp_path / "ppo-CartPole.toml").write_text("epochs = 2\nlr = 0.5\nseed = 3\nnum_envs = 4\n")
    argv = ["--seed", "0", "CartPole-v1", "--lr=linear:3e-4:0", "--epochs", "7"]
    found = settings.read(Words.read(argv), tmp_path)
    options, agent = found.options, found.agent
    assert found.file == tmp_path / "ppo-CartPole.toml"
    assert (options.seed, options.num_envs, options.env_id) == (0, 4, "CartPole-v1")
    assert (agent.lr, agent.epochs) == ("linear:3e-4:0", 7)
    assert seen == [argv]
