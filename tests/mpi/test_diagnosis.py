"""Why a job ends: found once, told once."""

import signal

import pytest

from rank0rl.mpi import job
from rank0rl.mpi.diagnosis import Diagnosis, ending


class Alone:
    """Contact to no other host."""

    def lost(self, _):
        return {}


def write(folder, **files):
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)


@pytest.mark.parametrize(
    ("reporter", "failed", "code", "err"),
    [
        ("", "", 137, "rank 1 was ended\nthe job ends\n"),
        ("0", "3", 3, ""),
        ("0", "", 137, "rank 1 was ended\nthe job ends\n"),  # rank 0 died before its report
    ],
)
def test_a_report_is_made_once_and_has_the_code_of_who_makes_it(
    reporter, failed, code, err, tmp_path, capsys
):
    for name, text in (("reporter", reporter), ("failed", failed)):
        if text:
            assert job.write_once(tmp_path / name, text)
    diagnosis = Diagnosis(tmp_path, 2, Alone(), lambda _: False)
    assert diagnosis.report(137, "rank 1 was ended")
    assert (diagnosis.code, capsys.readouterr().err) == (code, err)
    assert not job.write_once(tmp_path / "failed", "77")
    assert (tmp_path / "failed").read_text() == str(code)


@pytest.mark.parametrize(
    ("files", "launcher", "code", "said"),
    [
        ({}, None, None, ""),
        ({"failed": "4"}, None, 4, ""),
        ({"status_1": "3"}, None, 3, "rank 1 ended with exit code 3 before the other ranks"),
        ({"status_1": "3", "ended_1": ""}, None, 3, "rank 1 ended with exit code 3\n"),
        ({"status_1": "2", "ended_1": ""}, None, 2, ""),  # wrong use: rank 0 has said it
        ({"status_0": "137"}, None, 137, "rank 0 was ended by signal 9, SIGKILL"),
        ({"rank_0": "1"}, 0, 1, "the launcher ended before its ranks"),
        ({"rank_0": "1", "ended_0": ""}, 0, None, ""),
    ],
)
def test_what_the_files_of_a_job_say(files, launcher, code, said, tmp_path, capsys):
    write(tmp_path, **files)
    diagnosis = Diagnosis(tmp_path, 2, Alone(), lambda _: False)
    assert diagnosis.find(launcher) is (code is not None)
    assert diagnosis.code == code
    assert said in capsys.readouterr().err


def test_a_lost_host_is_named(tmp_path, capsys):
    class Lost(Alone):
        def lost(self, _):
            return {"two": "timed out"}

    diagnosis = Diagnosis(tmp_path, 2, Lost(), lambda _: False)
    assert diagnosis.find(None)
    assert diagnosis.code == 1
    assert "no connection to host two: timed out" in capsys.readouterr().err


def test_an_exit_status_in_words():
    assert ending(128 + signal.SIGTERM, False) == "was ended by signal 15, SIGTERM"
    assert "memory" in ending(128 + signal.SIGKILL, False)
    assert ending(3, True) == "ended with exit code 3"
