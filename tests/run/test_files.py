"""Files of a run are regular, of a bounded size, and written in full."""

import os

import pytest

from rank0rl.run import checkpoint, files, folder, settings
from rank0rl.run.agents import load_agent
from rank0rl.run.logger import check_rows


def fifo(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 43)


READERS = {
    "c.pt": checkpoint.read,
    "config.toml": settings.load,
    "progress.csv": lambda path: check_rows(path.parent, 1, ""),
    "agent.py": lambda path: load_agent(str(path)),
}


@pytest.mark.parametrize(("name", "read"), READERS.items())
@pytest.mark.parametrize(
    ("make", "fact"),
    [(fifo, "regular"), (endless, "regular"), (sparse, "8,796,093,022,208")],
)
def test_what_would_wait_or_fill_the_memory_is_not_read(tmp_path, name, read, make, fact):
    make(tmp_path / name)
    with pytest.raises(ValueError, match=fact) as error:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert files.read(tmp_path / "b", "file", 1) == b"x"
    with pytest.raises(ValueError, match="at most 0 bytes, got 1"):
        files.read(tmp_path / "b", "file", 0)


@pytest.mark.parametrize("make", [fifo, lambda path: path.symlink_to(path.parent / "other")])
def test_writing_follows_no_link(tmp_path, make):
    (tmp_path / "other").write_text("mine")
    make(tmp_path / ".a.csv.tmp")
    (tmp_path / "a.tmp").write_text("of a bystander")
    files.write(tmp_path / "a.csv", b"new")
    assert (tmp_path / "a.csv").read_bytes() == b"new"
    assert (tmp_path / "other").read_text() == "mine"
    assert not (tmp_path / ".a.csv.tmp").exists()
    assert (tmp_path / "a.tmp").exists()


@pytest.mark.parametrize("text", ['{"a": ', "[1]", "[" * 100_000])
def test_what_is_not_a_json_object(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"summary .*a\.json"):
        files.read_json(tmp_path / "a.json", "summary")


def test_rows_that_are_cut_short_or_too_long_are_left_out(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n3\n4,5,6\n")
    assert files.read_table(tmp_path / "a.csv", "record") == [{"x": "1", "y": "2"}]
    (tmp_path / "a.csv").write_bytes(b"x\n1\r2\n")
    with pytest.raises(ValueError, match="new-line character"):
        files.read_table(tmp_path / "a.csv", "record")


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "no setting algo, env_id, seed, total_steps"),
        ("env_id = 5\nalgo = 'ppo'\nseed = 0\ntotal_steps = 1\n", "env_id must be str: got 5"),
        ("env_id = 'A'\nalgo = 'ppo'\nseed = 0\ntotal_steps = 1\nrecord = 5\n", "record"),
        ("a = [" + "[" * 5000, "not TOML"),
    ],
)
def test_tools_refuse_a_damaged_config_in_one_line(tmp_path, text, fact):
    columns = "iteration,steps,episodes,seconds,return_mean,steps_per_s,weights_sha256"
    (tmp_path / "progress.csv").write_text(f"{columns}\n1,2,3,4,5,6,7\n")
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ValueError, match=fact) as error:
        folder.read_run(tmp_path)
    assert "config.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_row_that_was_cut_short_is_none(tmp_path):
    """Also if the cut is in its last column."""
    (tmp_path / "t.csv").write_text("a,b\n1,23\n4,5")
    assert files.read_table(tmp_path / "t.csv", "table") == [{"a": "1", "b": "23"}]


def test_a_value_may_be_long(tmp_path):
    (tmp_path / "t.csv").write_text(f"settings\n{'x' * 200_000}\n")
    assert len(files.read_table(tmp_path / "t.csv", "record")[0]["settings"]) == 200_000


def test_a_column_has_a_short_name(tmp_path):
    (tmp_path / "t.csv").write_text(f"{'x' * 5000}\n1\n")
    with pytest.raises(ValueError, match="no column of a run") as error:
        files.read_table(tmp_path / "t.csv", "record")
    assert len(str(error.value)) < 500
