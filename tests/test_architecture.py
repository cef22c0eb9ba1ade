"""docs/architecture.md says what is true: its paths exist, and its list is what a trace finds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def functions_of_files(text):
    """Return file -> the functions that are called there; numbers of lines may have changed since."""
    rows = re.findall(r"^\| `(\S+)` \| \d+ \| \d+ \| (.+) \|$", text, re.MULTILINE)
    return {path: names.split(", ") for path, names in rows}


@pytest.mark.slow
def test_the_list_of_an_iteration_is_what_the_trace_gives():
    command = [sys.executable, str(ROOT / "benchmarks" / "house.py"), "--path"]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    found = functions_of_files(done.stdout)
    assert "train" in found["rank0rl/trainer.py"]
    assert functions_of_files(PAGE) == found, "run: python benchmarks/house.py --write"


def test_every_path_of_the_page_exists():
    paths = set(re.findall(r"\b(?:rank0rl|algos|tests|benchmarks)/[\w/]*(?:\.py)?", PAGE))
    assert len(paths) > 40
    assert {path for path in paths if not (ROOT / path).exists()} == set()
