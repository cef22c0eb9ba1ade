"""One word for one thing, and docstrings that begin as STYLE asks. Prose is free to use any word."""

import ast
import itertools
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTED = ("rank0rl", "algos", "benchmarks", "examples")
NAMED = (*DOCUMENTED, "tests")

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


def files(folders, suffix=".py"):
    """Return all files of these folders, this one apart."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob(f"*{suffix}"))]
    return [path for path in found if path != Path(__file__)]


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
        for path in files([folder])
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


# Words that went, as a whole word of a name; then names that went as names of functions only.
GONE = {"lane", "lanes", "unit", "units", "everyones", "quiet", "learners", "allreduce"}
GONE_PAIRS = {("most", "probable")}
GONE_FUNCTIONS = {"share", "agree", "quiet"}
GONE_KEYS = {"old"}
KEPT = {"quiet", "--quiet", "--no-quiet", "Allreduce", "Iallreduce"}  # an option; MPI's own
OTHERS = {  # folders that take over other projects' names, or teach MPI -> the words they keep
    "rank0rl/compat": {"allreduce"},
    "tests/compat": {"allreduce"},
    "examples/mpi": {"allreduce"},
}


def words(name):
    """Return the words of a name: rank0_lanes, --rank0-lanes and Rank0Lanes are of two words."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word.lower() for word in re.split(r"[_\-.\s]+", apart) if word]


def gone(name):
    """Return the words of a name that went."""
    if name in KEPT:
        return set()
    of = words(name)
    pairs = {" ".join(pair) for pair in itertools.pairwise(of) if pair in GONE_PAIRS}
    return (GONE & set(of)) | pairs


def documents(tree):
    """Return the strings that stand alone, such as docstrings: they are prose."""
    return {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}


def names(tree):
    """Yield (line, name) of identifiers, of strings that are one, and of options in strings."""
    prose = documents(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield line, value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            if node.value.isidentifier():
                yield line, node.value
            for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", node.value):
                yield line, option


def functions(tree):
    """Yield (line, name) of functions that are defined or called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.lineno, getattr(node.func, "id", getattr(node.func, "attr", ""))


def keys(tree):
    """Yield (line, key) of the keys of dicts and of subscripts that are strings."""
    for node in ast.walk(tree):
        found = node.keys if isinstance(node, ast.Dict) else []
        found = [node.slice] if isinstance(node, ast.Subscript) else found
        for key in found:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.lineno, key.value


def words_that_went(text, kept=frozenset()):
    """Return (line, name) wherever a name has a word that went."""
    tree = ast.parse(text)
    wrong = {(line, name) for line, name in names(tree) if gone(name) - kept}
    wrong |= {(line, f"{name}()") for line, name in functions(tree) if name in GONE_FUNCTIONS}
    return sorted(wrong | {(line, key) for line, key in keys(tree) if key in GONE_KEYS})


@pytest.mark.parametrize("folder", NAMED)
def test_no_name_has_a_word_that_went(folder):
    wrong = []
    for path in files([folder]):
        where = path.relative_to(ROOT)
        kept = OTHERS.get(str(where.parent), set())
        wrong += [f"{where}: the file's name" for _ in gone(where.stem) - kept]
        wrong += [
            f"{where}:{line} {name}" for line, name in words_that_went(path.read_text(), kept)
        ]
    assert wrong == []


def test_no_setting_has_a_word_that_went():
    for path in files(["configs"], ".toml"):
        assert [key for key in tomllib.loads(path.read_text()) if gone(key)] == [], path


@pytest.mark.parametrize(
    "text",
    [
        "rank0_lanes = 1",
        "x.unit",
        "f(unit=1)",
        "def f(lane): pass",
        "class LaneBlock: pass",
        'x["old"]',
        '{"old": 1}',
        'x = {"unit": 1}',
        'parser.add_argument("--rank0-lanes")',
        'raise ValueError(f"give --rank0-lanes {n}")',
        "comm.share(1)",
        "def agree(): pass",
        "def quiet(agent): pass",
        "class MostProbable: pass",
        "from x import learners",
        'run("--update", "allreduce")',
    ],
)
def test_a_word_that_went_is_found(text):
    assert len({line for line, _ in words_that_went(text)}) == 1


@pytest.mark.parametrize(
    "text",
    [
        '"""Hidden units of a lane."""',
        'print("units of a layer")',
        "options.quiet",
        'run("--quiet")',
        "comm.Allreduce(x)",
        "share = 0.5",
        "old = read()",
        "community = 1",
    ],
)
def test_other_words_are_free(text):
    assert words_that_went(text) == []
