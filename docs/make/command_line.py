"""Write docs/command-line.md from the options themselves: their types, defaults and help texts.

`python docs/make/command_line.py` prints the page; with --write it writes the file.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # this checkout, not one that is installed

import tyro  # noqa: E402

from rank0rl.__main__ import TOOLS, module_of  # noqa: E402
from rank0rl.options import facts, flag  # noqa: E402
from rank0rl.run.agents import load_agent  # noqa: E402
from rank0rl.run.options import Pairs, RunOptions  # noqa: E402

PAGE = ROOT / "docs" / "command-line.md"
AGENTS = ("ppo", "trpo", "klppo", "a2c", "reinforce", "es", "cmaes", "cem", "bc")
GROUPS = {
    "nprocs": "Ranks and hosts",
    "num_envs": "The run",
    "steps_per_batch": "Batches and updates",
    "stop_after_iterations": "Stop early",
    "keep_batches": "Output and trust",
    "env_id": "Environment, seed and length",
    "learner_threads": "Updates and gather",
    "stop_at_return": "Stop at a return",
    "eval_every": "Evaluations",
    "checkpoint_every": "Checkpoints",
    "wrappers": "Environments and episodes",
    "env_retries": "Environments that fail",
    "video_every": "Videos and records",
}
"""The first option of each group -> the group's title. The order is that of the fields."""

HEAD = """\
# Command line

<!-- Written by docs/make/command_line.py from the options in the code. Change them there. -->

Type `python -m rank0rl`, then the name of a tool, then its options. After an installation, `rank0rl` is the same as
`python -m rank0rl`. Each tool has `--help`: `python -m rank0rl plot --help`.

{tools}

How to write options:

- A switch has two forms: `--overlap` turns it on, and `--no-overlap` turns it off.
- A whole number may also be written as `1_000_000`, and in `train` as `1e6`.
- An option with *several* values takes them as words: `--hidden 128 128`.
- A *schedule* is a string such as `linear:3e-4:0` or `cosine:3e-4:0`: the value at the start of the run, and at its end.
- `None` means that the option is not set.
- The column *default* holds if no file of settings says otherwise. Most agents have one in `configs/`, see [Settings](runs.md#settings): PPO takes layers, step size and others
  from there. `train ENV --help` shows the values that a run would have.

## train

In a checkout, `train.py` is the same as `-m rank0rl train`. The column *marks* has three words:

- *curve*: the option can change the learning curve.
- *resume*: a resumed run may have another value than before.
- *file*: a TOML file can set the option. The others belong to one start of a run.
"""


def page() -> str:
    """Return the text of the page."""
    tools = _table(
        ["tool", "what it does"], [[f"[`{n}`](#{n})", _text(p)] for n, p in TOOLS.items()]
    )
    parts = [HEAD.format(tools=tools), *_run(), "## Agents"]
    parts += ["`--algo NAME` chooses the agent. Each agent adds options of its own to `train`."]
    for name in AGENTS:
        options = load_agent(name).Options
        parts += [f"### {name}", _text(inspect.getdoc(options)), _options(options)]
    for name in list(TOOLS)[1:]:
        options = module_of(name).Options
        parts += [f"## {name}", _text(" ".join(inspect.getdoc(options).split())), _options(options)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _run() -> Iterator[str]:
    """Yield the title and the table of each group of options of a run."""
    rows = dict(_rows(RunOptions))
    starts = [*map([*rows].index, GROUPS), len(rows)]
    for title, start, end in zip(GROUPS.values(), starts, starts[1:], strict=False):
        group = [[*row[:3], _marks(name), row[3]] for name, row in [*rows.items()][start:end]]
        yield f"### {title}"
        yield _table(["option", "value", "default", "marks", "meaning"], group)


def _marks(name: str) -> str:
    known = facts(RunOptions)[name]
    marks = {"curve": known.changes_curve, "resume": known.resume, "file": known.in_file}
    return " ".join(mark for mark, is_set in marks.items() if is_set)


def _options(kind: type) -> str:
    return _table(["option", "value", "default", "meaning"], [row for _, row in _rows(kind)])


def _rows(kind: type) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each option, and its cells: option, value, default, meaning."""
    hints, known, docs = get_type_hints(kind, include_extras=True), facts(kind), _docs(kind)
    for field in dataclasses.fields(kind):
        marks = get_args(hints[field.name])[1:] if _is_annotated(hints[field.name]) else ()
        if tyro.conf.Suppress[int].__metadata__[0] in marks:
            continue
        is_word = tyro.conf.Positional[int].__metadata__[0] in marks
        aliases = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
        names = [*aliases, field.name.upper() if is_word else flag(field.name)]
        value = _value(hints[field.name]) + _range(known[field.name].interval)
        if known[field.name].prefix:
            value += f", or {known[field.name].prefix}N"
        option = ", ".join(f"`{name}`" for name in names)
        yield field.name, [option, value, _default(field), _text(docs[field.name])]


def _is_annotated(kind: Any) -> bool:
    return get_origin(kind) is Annotated


def _value(kind: Any) -> str:
    """Return the words for an option's type."""
    if kind == Pairs:
        return "several NAME=VALUE"
    if _is_annotated(kind):
        kind = get_args(kind)[0]
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{each}`" for each in parts)
    if get_origin(kind) is tuple:
        return f"several: {_value(parts[0])}"
    if parts:
        words = [_value(each) for each in parts if each is not NoneType]
        return "number or schedule" if words == ["number", "text"] else words[0]
    names = {int: "integer", float: "number", str: "text", bool: "switch", Path: "path"}
    return names[kind]


def _range(interval: str) -> str:
    """Return ", from 0 to 1" for "[0, 1]", and ", above 0" for "(0, inf)"."""
    low, _, high = interval[1:-1].partition(", ")
    words = [] if low in ("", "-inf") else ["from" if interval[0] == "[" else "above", low]
    if high not in ("", "inf"):
        words += ["to" if interval[-1] == "]" else "below", high]
    return f", {' '.join(words)}" if words else ""


def _default(field: "dataclasses.Field[Any]") -> str:
    """Return an option's default as one writes it on the command line."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "needed"
    if isinstance(value, bool):
        return "on" if value else "off"
    words = " ".join(map(str, value)) if isinstance(value, tuple | dict) else str(value)
    return f"`{words}`" if words else "none"


def _docs(kind: type) -> dict[str, str]:
    """Return the help text of each field: the string below it, in the class that has it."""
    docs = {}
    for each in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                docs[field.target.id] = text.value.value
    return docs


def _text(text: str) -> str:
    """Return a text of the code as Markdown in a table: options in code font, nothing else marked up."""
    escaped = re.sub(r"([|*<\[\]])", r"\\\1", text)
    escaped = re.sub(r"\bdocs/([a-z-]+\.md)", _link, escaped)
    return re.sub(r"(?<![\w-])(--[a-z][a-z0-9-]*)", r"`\1`", escaped)


def _link(page: re.Match[str]) -> str:
    """Return a link to a page of docs/, with its title."""
    title = (PAGE.parent / page[1]).read_text().partition("\n")[0].removeprefix("# ")
    return f"[{title}]({page[1]})"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/command-line.md")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
