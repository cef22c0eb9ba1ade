"""What holds for every test."""

import os
import signal
import sys
from collections import Counter

import pytest
from helpers import forks

from rank0rl.run.launch_options import check_cpu, limit_cpu

# Before NumPy is loaded here, and in the processes that tests start.
limit_cpu("portable")
check_cpu("portable")  # a plugin of pytest may have loaded NumPy: leave it out with -p no:NAME

# Where tests are started in the background of a shell, or under nohup, these are ignored, and so they
# would be in all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Ranks that compile this project's files anew take a tenth longer to start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as slow what comes after the first n cases of a test that is marked fast(n)."""
    seen = Counter()
    for item in items:
        mark = item.get_closest_marker("fast")
        if mark:
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > mark.args[0]:
                item.add_marker("slow")


@pytest.fixture
def forked_python(monkeypatch):
    """Let what this process starts with Python be forks, which have imported torch."""
    monkeypatch.setattr(sys, "executable", f"{forks.folder()}/python")


@pytest.fixture(autouse=True, scope="session")
def _state_folder(tmp_path_factory):
    """Keep the key that seals runs out of the home of whoever runs the tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
