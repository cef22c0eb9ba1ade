"""The first line of a docstring is a sentence in the imperative."""

import ast
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTED = ("rank0rl", "algos", "benchmarks", "examples")

# First words of a docstring that begin no sentence in the imperative, nor a noun phrase.
FRAGMENTS = {"What", "Whether", "How", "Where", "Of", "As", "Which", "Who", "Why", "When", "If"}
# First words that begin no sentence in the imperative.
NOUNS = {
    *("The", "A", "An", "All", "Any", "Both", "Each", "Every", "For", "From", "In", "On", "To"),
    *("No", "None", "Those", "These", "This", "That", "Its", "It", "One", "Name", "Number"),
    *("With", "Without", "Same", "Seconds", "Rows", "Only", "Not", "Like", "And", "Or", "Once"),
}
VERBS_IN_S = {"Focus", "Bias"}  # which are no third person
VERBS_IN_ING = {"Bring", "Ring", "String", "Ping"}  # which are no gerund


def said(node):
    """Return the first word of a docstring, without quotes; "" if there is none."""
    words = (ast.get_docstring(node) or "").split()
    return words[0].strip("`'\"*.,:;()") if words else ""


def is_property(node):
    names = [ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list]
    return {"property", "cached_property", "setter"} & set(names) != set()


def is_imperative(word):
    """Return False for a first word that cannot begin a sentence in the imperative."""
    third = word.endswith("s") and not word.endswith("ss") and word not in VERBS_IN_S
    gerund = word.endswith("ing") and word not in VERBS_IN_ING
    return not (word in FRAGMENTS | NOUNS or third or gerund or word[:1].islower())


def attributes(tree):
    """Yield (line, first word) of the strings that document a field or a constant."""
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        for before, after in itertools.pairwise(body) if isinstance(body, list) else ():
            is_string = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(before, ast.Assign | ast.AnnAssign) and is_string:
                yield after.lineno, str(after.value.value).split()[0]


def first_words(text):
    """Return (line, word) of each docstring that begins with a wrong word."""
    tree = ast.parse(text)
    wrong = [(line, word) for line, word in attributes(tree) if word in FRAGMENTS]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node):
            if (word := said(node)) and not is_imperative(word):
                wrong.append((node.lineno, word))
        elif (
            isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
            and said(node) in FRAGMENTS
        ):
            wrong.append((getattr(node, "lineno", 1), said(node)))
    return sorted(wrong)


@pytest.mark.parametrize("folder", DOCUMENTED)
def test_the_first_word_of_a_docstring(folder):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {word}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, word in first_words(path.read_text())
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""Where it is."""', [(1, "Where")]),
        (
            'class A:\n    """What it is."""\n    a: int\n    """How many."""',
            [(1, "What"), (4, "How")],
        ),
        ('def f():\n    """Returns it."""', [(1, "Returns")]),
        ('def f():\n    """The rows."""', [(1, "The")]),
        ('def f():\n    """`rows` of it."""', [(1, "rows")]),
        ('def f():\n    """Making rows."""', [(1, "Making")]),
        ('class A:\n    @property\n    def f(self):\n        """Of the run."""', [(3, "Of")]),
        ('class A:\n    @property\n    def f(self):\n        """The run\'s rows."""', []),
        ('def f():\n    """Process rows."""\n    def g():\n        """All."""', [(3, "All")]),
        ("def f():\n    return 1", []),
    ],
)
def test_a_wrong_first_word_is_found(text, expected):
    assert first_words(text) == expected
