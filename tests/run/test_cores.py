"""The cores that a process may use."""

import pytest

from rank0rl.run import machine


def test_cores_are_counted_once():
    assert 1 <= len(machine.available_cores()) <= 1024


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max 100000", [(0, 1), (2, 3)]), ("100000 100000", [(0, 1)]), ("x", [(0, 1), (2, 3)])],
)
def test_a_containers_limit_counts(limit, expected, monkeypatch):
    files = {"/sys/fs/cgroup/cpu.max": limit}
    ids = {f"/sys/devices/system/cpu/cpu{i}/topology/core_id": str(i // 2) for i in range(4)}
    ids |= {name.replace("core_id", "physical_package_id"): "0" for name in ids}
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {3, 2, 1, 0})
    monkeypatch.setattr(machine.Path, "read_text", lambda path: {**files, **ids}[str(path)])
    assert machine.available_cores() == expected
