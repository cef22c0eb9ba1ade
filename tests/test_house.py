"""The house does not grow: its files, public names and imports are at most these of today."""

import ast
import importlib.util
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "house.py"

MOST_LINES = 450  # of a file: more is a second idea

# Today's numbers. `python benchmarks/house.py` prints them; its docstring says how each one is counted.
HOUSE = {
    "files": 140,
    "top_modules": 16,
    "public_names": 656,
    "loop_files": 65,
    "train_files": 91,
    "path_files": 26,
    "path_short": 0,
}


@pytest.fixture(scope="module")
def house():
    spec = importlib.util.spec_from_file_location("house", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_house_does_not_grow(house):
    command = [sys.executable, str(SCRIPT), "--json"]
    now = json.loads(subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE).stdout)
    assert HOUSE.keys() <= now.keys() == house.WORDS.keys()
    grown = "\n".join(
        f'    "{key}": {now[key]:_},  # from {most:_}: {house.WORDS[key]}'
        for key, most in HOUSE.items()
        if now[key] > most
    )
    assert not grown, (
        f"the house grew:\n{grown}\nTake away what the change made unnecessary. If it has to grow, raise "
        f"these numbers in HOUSE, in tests/test_house.py, and give the reason in the commit message."
    )
    shrunk = ", ".join(f'"{key}": {now[key]:_}' for key, most in HOUSE.items() if now[key] < most)
    if shrunk:
        warnings.warn(f"the house shrank: lower HOUSE in tests/test_house.py to {shrunk}")


def test_no_file_is_long(house):
    lines = {str(path): house.lines_of([path]) for path in house.read_modules(ROOT).values()}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


@pytest.fixture
def tree(house, tmp_path):
    """A small project: train.py -> cli -> (in a function) tools.video; ppo -> nets.mlp, batch (types)."""
    for path, text in {
        "rank0rl/__init__.py": "def lazy():\n    from rank0rl import batch",
        "rank0rl/cli.py": "def main():\n    from rank0rl.tools import video",
        "rank0rl/batch.py": "class Batch:\n    def take(self): ...\ndef _cut(): ...\nMOST = 1\n",
        "rank0rl/trainer.py": "import numpy\nif TYPE_CHECKING:\n    from rank0rl.batch import Batch",
        "rank0rl/tools/__init__.py": "",
        "rank0rl/tools/video.py": "async def show(): ...",
        "rank0rl/tools/unused.py": "import rank0rl.tools.video",
        "algos/__init__.py": "",
        "algos/ppo.py": "from rank0rl import trainer",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return house.read_modules(tmp_path)


def test_the_closure_at_module_level(house, tree):
    found = {"rank0rl.algos.ppo", "rank0rl.trainer", "rank0rl.batch"}
    assert house.closure(["rank0rl.algos.ppo"], tree) == found
    assert house.closure(["rank0rl.cli"], tree) == {"rank0rl.cli"}


def test_the_closure_with_imports_in_functions(house, tree):
    packages = {"rank0rl", "rank0rl.tools"}
    found = {"rank0rl.cli", "rank0rl.tools.video", "rank0rl.batch"} | packages
    assert house.closure(["rank0rl.cli"], tree, everywhere=True) == found


def test_a_module_that_has_moved_is_no_empty_closure(house, tree):
    with pytest.raises(ValueError, match=r"no module rank0rl\.gone"):
        house.closure(["rank0rl.gone"], tree)


def test_public_names_are_functions_and_classes_at_the_top(house, tree):
    names = [name for path in tree.values() for name in house.public_names(house.parse(path))]
    assert names == ["lazy", "Batch", "main", "show"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("def f():\n    return 1\n", {1: 2}),
        (
            "@wraps(\n    g\n)\n@cache\ndef f():\n    '''Doc.'''\n    return g(\n        1\n    )\n",
            {1: 9},
        ),
        ("class A:\n    async def f():\n        def g():\n            return 1\n", {2: 3, 3: 2}),
    ],
)
def test_lines_of_a_function(house, text, lines):
    assert house.function_lines(ast.parse(text)) == lines


def test_watched_names_that_are_never_called_are_an_error(house, monkeypatch):
    monkeypatch.setattr(house, "MAIN", ("builtins", "len"))
    monkeypatch.setattr(house, "LOOP", ())
    with pytest.raises(ValueError, match=r"no call of rank0_bcast_wts after Collector\.batch"):
        house.trace()
