"""docs/architecture.md says what is true: its paths exist, and its list is what a trace finds."""

import importlib.util
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


def test_the_list_of_an_iteration_is_what_the_trace_gives():
    command = [sys.executable, str(ROOT / "benchmarks" / "trace_iteration.py")]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    found = functions_of_files(done.stdout)
    assert "train" in found["rank0rl/trainer.py"]
    assert functions_of_files(PAGE) == found, "run: python benchmarks/trace_iteration.py --write"


def test_every_path_of_the_page_exists():
    paths = set(re.findall(r"\b(?:rank0rl|algos|tests|benchmarks)/[\w/]*(?:\.py)?", PAGE))
    assert len(paths) > 40
    assert {path for path in paths if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("def f():\n    return 1\n", 2),
        (
            "@staticmethod\ndef f():\n    '''Doc.'''\n    g = lambda: [\n        1,\n    ]\n    return g\n",
            7,
        ),
        ("def f():\n    def g():\n        x = 1\n        return x\n", 4),
    ],
)
def test_lines_of_a_function(text, lines):
    path = ROOT / "benchmarks" / "trace_iteration.py"
    spec = importlib.util.spec_from_file_location("trace_iteration", path)
    trace_iteration = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(trace_iteration)
    scope = {}
    exec(text, scope)
    function = getattr(scope["f"], "__func__", scope["f"])
    assert trace_iteration.lines(function.__code__) == lines
