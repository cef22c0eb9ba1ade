"""docs/command-line.md is what docs/make/command_line.py writes, with every agent and every tool."""

import re

import warm
from on_ranks import HERE

from rank0rl.__main__ import TOOLS

PAGE = (HERE.parent / "docs" / "command-line.md").read_text()
MAKE = "docs/make/command_line.py"


def test_the_page_is_what_the_options_say():
    done = warm.run(MAKE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE, f"run: python {MAKE} --write"


def test_the_page_has_every_tool_and_every_agent():
    agents = {path.stem for path in (HERE.parent / "algos").glob("[!_]*.py")}
    assert {*re.findall(r"^## (\w+)$", PAGE, re.M)} == {*TOOLS, "Agents"}
    assert agents <= {*re.findall(r"^### (\w+)$", PAGE, re.M)}
