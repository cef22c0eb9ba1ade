"""Who may import whom. An arrow that is not in this table is a mistake in the design."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Layer -> its files. A name that ends in a dot is a folder: all files in it that no other layer names.
LAYERS = {
    "launch": {"rank0rl.launch."},  # what the process loads that the user starts
    "mpi": {"rank0rl.mpi."},
    "base": {f"rank0rl.{name}" for name in ("agent", "batch", "options", "returns", "seeding")},
    "nets": {"rank0rl.nets.", "rank0rl.nets.kernels."},
    "envs": {"rank0rl.envs.", "rank0rl.rollout"},
    "run": {"rank0rl.run."},
    "loop": {
        f"rank0rl.{name}" for name in ("trainer", "collector", "learner", "evaluation", "policy")
    },
    "start": {"rank0rl.start"},
    "tools": {"rank0rl.tools.", "rank0rl.tools.speedup.", "rank0rl.tools.study."},
    "compat": {"rank0rl.compat."},
    "cli": {"rank0rl.cli", "rank0rl.__main__"},
    "api": {"rank0rl", "rank0rl.api"},  # the first imports names when they are first used
    "algos": {"rank0rl.algos."},
}

TRAINING = {"launch", "mpi", "base", "nets", "envs", "run", "loop", "start"}

# Layer -> what it may import of the project besides itself (layers and single files), and of outside.
TABLE = {
    "launch": (set(), set()),
    "mpi": ({"launch"}, {"numpy", "torch", "mpi4py", "threadpoolctl"}),
    "base": (set(), {"numpy"}),
    "nets": (
        {"rank0rl.agent", "rank0rl.batch", "rank0rl.options", "rank0rl.returns"},
        {"numpy", "torch", "numba", "llvmlite", "scipy"},
    ),
    "envs": ({"base", "launch"}, {"numpy"}),
    "run": (
        {"launch", "mpi", "base", "nets", "envs"},
        {"numpy", "torch", "tyro", "tomli_w", "rich", "safetensors", "wandb"},
    ),
    "loop": ({"launch", "mpi", "base", "nets", "envs", "run"}, {"numpy"}),
    "start": (TRAINING, set()),
    "tools": (
        TRAINING | {"compat", "rank0rl.algos"},
        {
            "numpy",
            "torch",
            "tyro",
            "tomli_w",
            "rich",
            "matplotlib",
            "jinja2",
            "markupsafe",
            "imageio_ffmpeg",
            "optuna",
        },
    ),
    "compat": ({"launch", "mpi", "rank0rl.nets.normalize"}, {"numpy", "torch"}),
    "cli": (TRAINING | {"tools", "rank0rl.algos"}, set()),
    "api": (TRAINING | {"cli", "tools", "compat"}, {"numpy", "gymnasium", "pandas"}),
    "algos": (
        {
            *("rank0rl.agent", "rank0rl.batch", "rank0rl.options", "rank0rl.returns"),
            *("rank0rl.envs.demonstrations", "nets"),
        },
        {"numpy", "torch", "scipy", "cma"},
    ),
}
# File -> what it alone of its layer may import.
MORE_OUTSIDE = {
    "rank0rl.seeding": {"torch"},  # in one function, which processes of environments do not call
    "rank0rl.envs.make": {"gymnasium"},
    "rank0rl.envs.spaces": {"gymnasium"},
    "rank0rl.envs.wrappers": {"gymnasium"},
    "rank0rl.envs.games": {"gymnasium"},
    "rank0rl.envs.shared": {"gymnasium"},
    "rank0rl.envs.state": {"gymnasium", "safetensors"},
    "rank0rl.envs.process": {"threadpoolctl"},
    "rank0rl.envs.demonstrations": {"minari"},
    "rank0rl.tools.record": {"minari", "gymnasium"},
    "rank0rl.tools.speedup.probes": {"gymnasium"},
    "rank0rl.policy": {"gymnasium"},
}


def module_of(path):
    """Return the dotted name of a file: rank0rl/nets/__init__.py -> rank0rl.nets, algos/ppo.py -> rank0rl.algos.ppo."""
    of = ["rank0rl"] * (path.parts[0] == "algos")
    return ".".join([*of, *path.with_suffix("").parts]).removesuffix(".__init__")


def read_tree(root):
    """Return path from root -> text, of all Python files of the packages."""
    files = [path for top in ("rank0rl", "algos") for path in sorted((root / top).rglob("*.py"))]
    return {path.relative_to(root): path.read_text() for path in files}


@functools.cache  # a planted import changes one file of them all
def imports(text, modules):
    """Return (line, module) of each import in a file once, those in functions and for types included.

    A module of the project is named in full, an outside one by its package.
    """
    return [*dict.fromkeys(imports_of(ast.parse(text), modules))]


def imports_of(tree, modules):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            of = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in of]
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            names = named(tree, node.args[0], modules)
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if top == "rank0rl":
                yield node.lineno, name
            elif top not in sys.stdlib_module_names:
                yield node.lineno, top


def named(tree, argument, modules):
    """Return the modules that an argument of import_module may name, with strings of its file."""
    strings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    if isinstance(argument, ast.Constant):
        return [argument.value]
    if not isinstance(argument, ast.JoinedStr):
        return []
    pattern = "".join(
        re.escape(piece.value) if isinstance(piece, ast.Constant) else r"(.+)"
        for piece in argument.values
    )
    found = {module: re.fullmatch(pattern, module) for module in modules}
    return [module for module, match in found.items() if match and set(match.groups()) <= strings]


def layer_of(module):
    """Return the layer of a module, "" if the table has none for it."""
    folder = module.rpartition(".")[0] + "."
    for name in (module, f"{module}.", folder):
        for layer, files in LAYERS.items():
            if name in files:
                return layer
    return ""


def graph(files):
    """Return (module, line, imported module) of all imports in files."""
    modules = frozenset(module_of(path) for path in files)
    return [
        (module_of(path), line, name)
        for path, text in files.items()
        for line, name in imports(text, modules)
    ]


def forbidden(files):
    """Return a line for each import that the table does not allow."""
    modules = [module_of(path) for path in files]
    wrong = [f"{module}: no layer" for module in modules if not layer_of(module)]
    for module, line, name in graph(files):
        layer = layer_of(module)
        if not layer:
            continue
        project, outside = TABLE[layer]
        outside = outside | MORE_OUTSIDE.get(module, set())
        allowed = {layer} | project | outside
        if name not in allowed and (layer_of(name) or "none") not in allowed:
            wrong.append(f"{module}:{line} imports {name}")
    return wrong


def circle(arrows):
    """Return the nodes of one circle, in order and the first one twice; [] if there is none."""
    after = {}
    for start, end in arrows:
        if start != end:
            after.setdefault(start, set()).add(end)
    done, way = set(), []

    def walk(node):
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        way.append(node)
        found = next((found for n in sorted(after.get(node, ())) if (found := walk(n))), [])
        way.pop()
        done.add(node)
        return found

    return next((found for node in sorted(after) if (found := walk(node))), [])


def circle_of_files(files):
    return circle((module, name) for module, _, name in graph(files))


def circle_of_layers(files):
    arrows = [(layer_of(module), layer_of(name)) for module, _, name in graph(files)]
    return circle((start, end) for start, end in arrows if end)  # "": from outside


TREE = read_tree(ROOT)


def test_no_import_but_those_of_the_table():
    assert forbidden(TREE) == []


def test_no_circle_of_files():
    assert circle_of_files(TREE) == []


def test_no_circle_of_layers():
    """The files at the top of rank0rl/ are of several layers: as one folder they are a circle."""
    assert circle_of_layers(TREE) == []


def test_the_kernels_have_one_door():
    inside = "rank0rl.nets.kernels"
    opened = {module for module, _, name in graph(TREE) if name.startswith(inside)}
    outside = {module for module in opened if not module.startswith(inside)}
    assert outside == {"rank0rl.nets.update"}


PLANTED = {
    "rank0rl/launch/__init__.py": "import numpy",
    "rank0rl/mpi/__init__.py": "from rank0rl.agent import Agent",
    "rank0rl/nets/__init__.py": "from rank0rl import seeding",
    "rank0rl/nets/kernels/__init__.py": "from rank0rl import mpi",
    "rank0rl/batch.py": "import torch",
    "rank0rl/agent.py": "from rank0rl.mpi import comm",
    "rank0rl/envs/__init__.py": "from rank0rl.mpi.comm import rank",
    "rank0rl/rollout.py": "import gymnasium",
    "rank0rl/run/__init__.py": "from rank0rl.trainer import train",
    "rank0rl/trainer.py": "from rank0rl import tools",
    "rank0rl/collector.py": "import mpi4py.MPI",
    "rank0rl/start.py": "from rank0rl import cli",
    "rank0rl/tools/__init__.py": "import rank0rl.cli",
    "rank0rl/tools/speedup/__init__.py": "from rank0rl import cli",
    "rank0rl/tools/study/__init__.py": "from rank0rl import cli",
    "rank0rl/compat/__init__.py": "from rank0rl import batch",
    "rank0rl/cli.py": "import numpy",
    "rank0rl/__init__.py": "import mpi4py",
    "algos/ppo.py": "from rank0rl import mpi",
}


@pytest.mark.parametrize(("name", "line"), PLANTED.items())
@pytest.mark.parametrize(
    "where",
    ["{}\n", "def f():\n    {}\n", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\n"],
    ids=["top", "function", "types"],
)
def test_a_forbidden_import_is_found(name, line, where):
    path = Path(name)
    planted = {**TREE, path: TREE[path] + where.format(line)}
    new = set(forbidden(planted)) - set(forbidden(TREE))
    assert len(new) == 1
    assert new.pop().startswith(module_of(path))


def test_something_is_planted_in_every_layer_and_folder():
    assert {layer_of(module_of(Path(name))) for name in PLANTED} == set(LAYERS)
    assert {path.parent for path in TREE} == {Path(name).parent for name in PLANTED}


@pytest.mark.parametrize(
    ("path", "line", "nodes"),
    [
        ("rank0rl/batch.py", "from rank0rl import agent", {"rank0rl.batch", "rank0rl.agent"}),
        ("rank0rl/run/new.py", "def f():\n    import rank0rl.run.new2", None),
    ],
)
def test_a_circle_is_found(path, line, nodes):
    planted = {**TREE, Path(path): TREE.get(Path(path), "") + f"\n{line}\n"}
    if nodes is None:
        planted[Path("rank0rl/run/new2.py")] = "from rank0rl.run import new\n"
        nodes = {"rank0rl.run.new", "rank0rl.run.new2"}
        planted = {p: text for p, text in planted.items() if p.stem.startswith("new")}
    assert set(circle_of_files(planted)) == nodes


def test_a_circle_of_folders_is_found():
    two = {
        Path("rank0rl/tools/a.py"): "from rank0rl.compat import b\n",
        Path("rank0rl/compat/b.py"): "",
        Path("rank0rl/compat/c.py"): "import rank0rl.tools.d\n",
        Path("rank0rl/tools/d.py"): "",
    }
    assert circle_of_files(two) == []
    assert set(circle_of_layers(two)) == {"tools", "compat"}


def test_names_that_are_imported_when_used_are_found():
    files = {
        Path("rank0rl/__init__.py"): 'H = {"f": "mpi.comm"}\nimport_module(f"rank0rl.{H[name]}")\n',
        Path("rank0rl/mpi/comm.py"): "",
        Path("rank0rl/mpi/gather.py"): "",
    }
    assert graph(files) == [("rank0rl", 2, "rank0rl.mpi.comm")]


@pytest.mark.parametrize("module", ["rank0rl", "rank0rl.launch.fork", "rank0rl.cli"])
def test_the_supervisor_loads_nothing_heavy(module):
    heavy = "{'numpy', 'torch', 'mpi4py', 'gymnasium', 'tyro', 'rich'}"
    code = f"import {module}, sys; print({heavy} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_every_public_name_is_where_it_is_said_to_be():
    import rank0rl

    for name in rank0rl.__all__:
        assert getattr(rank0rl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(rank0rl, "nothing")


def test_every_folder_is_packaged_and_says_what_it_is_for():
    folders = {path.parent for path in TREE if path.parts[0] == "rank0rl"}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    assert {".".join(folder.parts) for folder in folders} <= set(packages)
    for folder in folders:
        said = (ast.get_docstring(ast.parse(TREE[folder / "__init__.py"])) or "").splitlines()
        assert said, f"{folder}/__init__.py has no docstring"
        assert said[0].endswith("."), f"{folder}: {said[0]!r} is not a sentence on a line"


def test_benchmarks_import_nothing_of_the_tests():
    helpers = {path.stem for path in (ROOT / "tests").rglob("*.py")} | {"tests"}
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        own = {file.stem for file in path.parent.glob("*.py")}
        names = {name for _, name in imports(path.read_text(), frozenset())}
        assert names & (helpers - own) == set(), path


def test_no_test_file_imports_another():
    for path in sorted((ROOT / "tests").rglob("*.py")):
        names = {name for _, name in imports(path.read_text(), frozenset())}
        assert {name for name in names if name.startswith("test_")} == set(), path
