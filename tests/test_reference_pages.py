"""The pages of docs/: those that stand for the code are up to date, all are in the site, and the README is short."""

import pydoc
import re
import tomllib

import pytest
from helpers import forks
from helpers.ranks import HERE

import rank0rl
from rank0rl.__main__ import TOOLS

DOCS = HERE.parent / "docs"
COMMAND_LINE = (DOCS / "command-line.md").read_text()
API = (DOCS / "api.md").read_text()
MAKE = "docs/make/command_line.py"


def test_the_command_line_is_what_the_options_say():
    done = forks.run(MAKE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == COMMAND_LINE, f"run: python {MAKE} --write"


def test_the_api_is_what_the_docstrings_say():
    pytest.importorskip("griffe")
    done = forks.run("docs/make/api.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == API, "run: python docs/make/api.py --write"


def test_the_command_line_has_every_tool_and_every_agent():
    agents = {path.stem for path in (HERE.parent / "algos").glob("[!_]*.py")}
    assert {*re.findall(r"^## (\w+)$", COMMAND_LINE, re.M)} == {*TOOLS, "Agents"}
    assert agents <= {*re.findall(r"^### (\w+)$", COMMAND_LINE, re.M)}


@pytest.mark.slow
def test_the_results_are_those_of_the_committed_runs():
    done = forks.run("docs/make/results.py")
    assert done.returncode == 0, done.stderr
    tables = done.stdout.strip().split("\n\n")
    assert len(tables) == 9
    names = ("../README.md", "results.md", "quick-start.md")
    pages = "".join((DOCS / name).read_text() for name in names)
    assert [table for table in tables if table not in pages] == [], (
        "run: python docs/make/results.py --write"
    )


def test_the_api_has_every_public_name_where_it_is():
    """Every object that the page takes its text from exists, and no name of rank0rl is missing."""
    found = re.findall(r"^<!-- :: (\S+)", API, re.M)
    assert [path for path in found if pydoc.locate(path) is None] == []
    named = {path.rpartition(".")[2] for path in found} | {*re.findall(r"`(\w+)`", API)}
    assert {*rank0rl.__all__} - named == set()


def test_every_page_is_in_the_navigation():
    site = tomllib.loads((HERE.parent / "zensical.toml").read_text())["project"]
    pages = re.findall(r"[\w-]+\.md", str(site["nav"]))
    assert sorted(pages) == sorted(path.name for path in DOCS.glob("*.md"))


def test_the_readme_is_read_to_the_end():
    text = (HERE.parent / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.encode()) <= 8000
