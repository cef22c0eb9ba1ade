"""Schedules: where they begin, where they end, and what lies between."""

import math

import pytest

from rank0rl.options import changing, value_at


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_schedule_goes_from_its_first_number_to_its_last(shape):
    numbers = [value_at(f"{shape}:3e-4:1e-5", step / 100) for step in range(101)]
    assert (numbers[0], numbers[-1]) == (3e-4, pytest.approx(1e-5))
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[50] == pytest.approx((3e-4 + 1e-5) / 2)


def test_the_shapes_are_what_they_are_called():
    assert value_at("linear:2:1", 0.25) == 1.75
    assert value_at("cosine:2:1", 0.25) == pytest.approx(1 + (1 + math.cos(math.pi / 4)) / 2)
    assert value_at(0.1, 0.9) == 0.1


def test_a_line_to_zero_has_the_bits_of_its_product():
    assert all(value_at("linear:3e-4:0", k / 488) == 3e-4 * (1 - k / 488) for k in range(488))


def test_what_changes_goes_into_the_record():
    assert changing(0.5, lr="linear:1:0", clip_ratio=0.2) == {"lr": 0.5}
