"""Write the entries of docs/api.md from the signatures and docstrings in the code.

`python docs/make/api.py` prints the page; with --write it writes the file. An entry begins with a comment that names an
object, and its members if not all are shown, and ends with a comment of two points:

    <!-- :: rank0rl.nets.flat.Adam step state load -->
    <!-- .. -->
"""

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
ENTRY = re.compile(r"<!-- :: (\S+)([\w ]*) -->\n.*?<!-- \.\. -->", re.S)
LISTS = {"parameters": "Arguments", "raises": "Raises", "attributes": "Attributes"}

import griffe  # noqa: E402

logging.getLogger("griffe").setLevel(logging.ERROR)
OPTIONS = {"returns_multiple_items": False}


def page(text: str) -> str:
    """Return the page with the entries that the code gives now."""
    loader = griffe.GriffeLoader(search_paths=[str(ROOT)])
    package = loader.load("rank0rl")

    def entry(found: re.Match[str]) -> str:
        path, members = found[1], found[2].split()
        made = "\n\n".join(_object(package[path.removeprefix("rank0rl.")], path, members))
        return f"<!-- :: {path}{found[2]} -->\n\n{made}\n\n<!-- .. -->"

    return ENTRY.sub(entry, text)


def _object(of: griffe.Object, path: str, members: list[str], level: int = 3) -> Iterator[str]:
    """Yield the paragraphs of a function or a class, and those of its members."""
    yield f'<a id="{path}"></a>\n\n{"#" * level} {of.name}'
    yield f"```python\n{_signature(of)}\n```"
    yield from _docstring(of)
    shown = [
        member
        for name, member in of.members.items()
        if of.is_class
        and member.docstring
        and _is_public(name)
        and (not members or name in members)
    ]
    if values := [one for one in shown if one.is_attribute]:
        yield "Attributes:\n\n" + "\n".join(
            f"- `{one.name}{f': {one.annotation}' if one.annotation else ''}`: {_flat(one.docstring.value)}"
            for one in values
        )
    for one in shown:
        if one.is_function:
            yield from _object(one, f"{path}.{one.name}", [], level + 1)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__call__", "__len__")


def _signature(of: griffe.Object) -> str:
    """Return a function's name, arguments and result as code, one argument in a line if they are long."""
    call = of.members.get("__init__", of) if of.is_class else of
    takes = [one for one in getattr(call, "parameters", ()) if one.name not in ("self", "cls")]
    words = [_parameter(one) for one in takes]
    if of.is_class and any(str(base) == "NamedTuple" for base in of.bases):
        words = [
            f"{one.name}: {one.annotation}" + (f" = {one.value}" if one.value else "")
            for one in of.attributes.values()
        ]
    for i, one in enumerate(takes):
        if one.kind is griffe.ParameterKind.keyword_only:
            words.insert(i, "*")
            break
    if of.is_class and not words and of.bases:
        return f"class {of.name}({', '.join(map(str, of.bases))})"
    gives = "" if of.is_class or not call.returns else f" -> {call.returns}"
    line = f"{of.name}({', '.join(words)}){gives}"
    if len(line) <= 88 or not words:
        return line
    return f"{of.name}(\n    " + ",\n    ".join(words) + f",\n){gives}"


def _parameter(one: griffe.Parameter) -> str:
    stars = {"variadic positional": "*", "variadic keyword": "**"}.get(one.kind.value, "")
    kind = f": {one.annotation}" if one.annotation else ""
    equals = " = " if kind else "="
    default = "" if stars or one.default is None else f"{equals}{one.default}"
    default = re.sub(r"\(lambda: (.*)\)\(\)", r"\1", default)  # griffe's form of a default_factory
    return f"{stars}{one.name}{kind}{default}"


def _docstring(of: griffe.Object) -> Iterator[str]:
    """Yield the paragraphs of a docstring."""
    if not of.docstring:
        return
    for section in of.docstring.parse("google", **OPTIONS):
        kind = section.kind.value
        if kind == "text":
            yield section.value
        elif kind in LISTS:
            rows = [
                f"- `{getattr(one, 'name', None) or one.annotation}`: {_flat(one.description)}"
                for one in section.value
            ]
            yield f"{LISTS[kind]}:\n\n" + "\n".join(rows)
        elif kind in ("returns", "yields"):
            yield f"{kind.capitalize()}: {_flat(section.value[0].description)}"
        elif kind == "admonition":
            yield f"{section.title or section.value.annotation.capitalize()}: {_flat(section.value.description)}"
        else:
            raise ValueError(f"{of.path}: no text is made of {kind}")


def _flat(text: str) -> str:
    """Return a text in one line."""
    return " ".join(text.split())


if __name__ == "__main__":
    made = page(PAGE.read_text())
    if "--write" in sys.argv:
        PAGE.write_text(made)
    else:
        print(made, end="")
