"""Seconds per phase."""

import time

import pytest

from rank0rl.run.timing import Phases


def test_phases_add_up_and_begin_again():
    phases = Phases()
    for _ in range(2):
        with phases("a"):
            time.sleep(0.02)
    with pytest.raises(KeyError), phases("b"):
        raise KeyError
    seconds = phases.take()
    assert seconds["a"] >= 0.04
    assert seconds["a"] > seconds["b"] >= 0
    assert phases.take() == {}
