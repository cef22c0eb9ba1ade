"""The record of a run has one header, flushed rows, and no row twice after a resume."""

import json

import pytest

from rank0rl.run.hooks import Record
from rank0rl.run.logger import Logger, check_rows


def lines(folder):
    return (folder / "progress.csv").read_text().split()


def test_rows_are_on_disk_as_soon_as_they_are_written(tmp_path):
    logger = Logger(tmp_path, quiet=True)
    logger.row({"iteration": 1, "x": 0.123456789, "n": 12345678})
    assert lines(tmp_path) == ["iteration,x,n", "1,0.123457,12345678"]


def test_columns_may_be_missing_and_come_later(tmp_path):
    logger = Logger(tmp_path, quiet=True)
    for row in ({"iteration": 1, "x": 0.0}, {"iteration": 2, "y": "a,b"}, {"iteration": 3, "x": 1}):
        logger.row(row)
    logger.close()
    written = (tmp_path / "progress.csv").read_bytes()
    assert written == b'iteration,x,y\r\n1,0,\r\n2,,"a,b"\r\n3,1,\r\n'
    again = Logger(tmp_path, quiet=True)
    again.go_on_after(1)
    again.row({"iteration": 2, "y": "a,b", "z": 0.5})
    check_rows(tmp_path, 2, again.rows_sha256)
    with pytest.raises(ValueError, match="not those that the run wrote"):
        check_rows(tmp_path, 1, again.rows_sha256)


def test_two_groups_with_one_name_are_an_error():
    record = Record()
    record.add("run", {"iteration": 1, "x": 0.0})
    with pytest.raises(ValueError, match="update: 'x' is a column .* other than iteration, x$"):
        record.add("update", {"loss": 0.0, "x": 1.0})


def test_going_on_drops_later_rows_and_keeps_one_header(tmp_path):
    first = Logger(tmp_path, quiet=True)
    for iteration in range(1, 5):
        first.row({"iteration": iteration, "x": 1.0})
    first.close()
    second = Logger(tmp_path, quiet=True)
    second.go_on_after(2)
    second.row({"iteration": 3, "x": 2.0})
    assert lines(tmp_path) == ["iteration,x", "1,1", "2,1", "3,2"]


def test_going_on_before_the_first_row(tmp_path):
    Logger(tmp_path, quiet=True).go_on_after(0)
    assert not (tmp_path / "progress.csv").exists()


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK0RL_TERMINAL", raising=False)
    logger = Logger(tmp_path)
    logger.show("one")
    logger.show("two")  # too soon after the first
    logger.print("three [3]")
    logger.close()
    assert capsys.readouterr().out == "one\nthree [3]\n"


def test_the_supervisors_terminal_is_drawn_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK0RL_TERMINAL", "80")
    logger = Logger(tmp_path)
    logger.show("one", stays=True)
    logger.show("two [m] [/m]")
    logger.close()
    out = capsys.readouterr().out
    assert "one\n" in out  # drawn, and left there
    assert "two [m] [/m]" in out
    assert "\x1b[" in out


def test_the_summary(tmp_path):
    Logger(tmp_path, quiet=True).summary({"a": 1, "return_mean": None})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1, "return_mean": None}
