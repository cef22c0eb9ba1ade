"""What a study reads of its runs."""

import json

import pytest

from rank0rl.tools.study.planned import Options, planned
from rank0rl.tools.study.training import _complaint, _last_row


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("", None),
        ("a,b\n", None),
        ("a,b\n1,2", None),
        ("a,b\n1,2\n", {"a": "1", "b": "2"}),
        ("a,b\n1,2\n3,4\n5,", {"a": "3", "b": "4"}),
        ('a,b\n1,"{""x"": 1, ""y"": 2}"\n', {"a": "1", "b": '{"x": 1, "y": 2}'}),
        ("a,b\n" + "1,2\n" * 40000 + "3,4\n", {"a": "3", "b": "4"}),
    ],
)
def test_the_last_complete_row(text, expected, tmp_path):
    path = tmp_path / "progress.csv"
    if text is not None:
        path.write_text(text)
    assert _last_row(tmp_path) == expected


@pytest.mark.parametrize(
    ("by", "over"),
    [
        ("total_steps 1000", True),
        ("total_steps 500", False),
        ("stop_at_return 475", True),
        ("stop_at_return 400", False),
        ("patience 5", False),
        ("", False),
        (None, False),
    ],
)
def test_a_run_is_over_once_it_has_ended_by_itself(by, over, tmp_path):
    (run,) = planned(
        Options(envs=("CartPole",), seeds="0"), ["--total-steps", "1000", "--stop-at-return", "475"]
    )
    if by is not None:
        (tmp_path / run.name).mkdir()
        (tmp_path / run.name / "summary.json").write_text(json.dumps({"ended": by}))
    assert run.ended(tmp_path) is over


def test_a_complaint_is_the_last_error(tmp_path):
    (tmp_path / "output.txt").write_text("1: ...\na.b.OddError: no\nTo repeat it: ...\n\n")
    assert _complaint(tmp_path) == "a.b.OddError: no"
    (tmp_path / "output.txt").write_text("1: ...\nkilled\n")
    assert _complaint(tmp_path) == "killed"
    (tmp_path / "output.txt").write_text("")
    assert _complaint(tmp_path) == "it has printed nothing"
