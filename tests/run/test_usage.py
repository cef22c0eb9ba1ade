"""Seconds per phase."""

import pytest

from rank0rl.run import usage
from rank0rl.run.usage import Phases


def test_phases_add_up_and_begin_again(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr(usage.time, "perf_counter", lambda: next(clock))
    phases = Phases()
    for _ in range(2):
        with phases("a"):
            pass
    with pytest.raises(KeyError), phases("b"):
        raise KeyError
    assert phases.take() == {"a": 5.0, "b": 1.0}
    assert phases.take() == {}
