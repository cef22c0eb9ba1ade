"""Who may import whom. An arrow that is not in the table is a mistake in the design."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# file -> what it may import: from the project, and from outside of the standard library.
TOOLS = {"config", "logger", "checkpoint", "interrupt", "threads", "timing"}
ALLOWED = {
    "__init__": (set(), set()),
    "job": (set(), set()),
    "hosts": (set(), set()),
    "supervisor": ({"hosts", "job"}, set()),
    "launch": ({"hosts", "job", "supervisor"}, set()),
    "world": ({"job", "launch"}, {"numpy", "mpi4py"}),
    "comm": ({"world"}, {"numpy", "mpi4py"}),
    "tickets": ({"comm", "world"}, {"numpy", "mpi4py"}),
    "accumulate": ({"comm"}, {"numpy"}),
    "stats": ({"comm"}, {"numpy", "torch"}),
    "averages": ({"comm", "learners", "weights"}, {"numpy", "torch"}),
    "mpi_tools": ({"comm", "launch", "stats"}, {"numpy", "torch"}),
    "mpi_pytorch": ({"averages", "comm", "threads", "weights"}, {"torch"}),
    "mpi_tf": ({"averages", "weights"}, {"torch"}),
    "omnisafe": ({"averages", "comm", "compat", "launch", "stats"}, {"numpy", "torch"}),
    "evorl": ({"compat"}, set()),
    "_trees": (set(), set()),
    "_evorl_comm": ({"comm", "compat", "stats"}, {"numpy", "torch"}),
    "_evorl_gradients": ({"compat"}, {"torch"}),
    "_evorl_sharding": ({"compat", "stats"}, {"numpy", "torch"}),
    "batch": (set(), {"numpy"}),
    "returns": (set(), {"numpy"}),
    "seeding": (set(), {"numpy"}),
    "timing": (set(), set()),
    "interrupt": (set(), set()),
    "agent": ({"batch", "learners"}, {"numpy"}),
    "learners": (set(), set()),
    "flat": (set(), {"torch"}),
    "nets": ({"learners"}, {"numpy", "torch"}),
    "policies": ({"agent", "nets"}, {"numpy", "torch"}),
    "actor_critic": (
        {"agent", "batch", "learners", "nets", "policies", "returns"},
        {"numpy", "torch"},
    ),
    "regression": ({"batch", "flat", "learners", "nets"}, {"numpy", "torch"}),
    "twin": ({"batch", "flat", "learners"}, {"numpy", "torch"}),
    "envs": ({"agent"}, {"numpy", "gymnasium"}),
    "rollout": ({"agent", "batch", "seeding", "envs"}, {"numpy"}),
    "weights": ({"comm"}, {"numpy", "torch"}),
    "script": ({"comm", "job", "seeding", "stats"}, {"numpy", "torch"}),
    "threads": (set(), {"torch", "threadpoolctl"}),
    "checkpoint": (set(), {"numpy", "torch"}),
    "config": ({"agent", "job", "launch"}, {"tyro", "tomli_w"}),
    "logger": ({"job", "sinks"}, {"rich"}),
    "sinks": (set(), {"torch", "wandb"}),
    "memory": (set(), set()),
    "state": ({"agent", "batch", "rollout", "weights", *TOOLS}, set()),
    "run": ({"batch", "state", "weights", *TOOLS}, {"numpy"}),
    "provenance": (set(), set()),
    "contract": ({"agent", "batch", "weights"}, {"numpy"}),
    "check": ({"agent", "batch", "config", "envs", "rollout"}, {"numpy", "tyro"}),
    "replay": (
        {"batch", "plan", "rollout", "session", "state", "trainer", "twin", *TOOLS},
        {"tyro"},
    ),
    "episodes": ({"agent", "batch", "rollout", "seeding"}, {"numpy"}),
    "film": ({"agent", "batch", "config", "envs", "episodes"}, {"numpy", "imageio_ffmpeg"}),
    "evaluate": (
        {"agent", "batch", "envs", "episodes", "plan", "session", "state", *TOOLS},
        {"tyro"},
    ),
    "scaling": ({"timing"}, set()),
    "speedup": (
        {
            *("_bare", "agent", "model", "prediction", "prediction_table", "provenance"),
            *("rollout", "scaling", "speedup_table", *TOOLS),
        },
        {"tyro"},
    ),
    "model": (set(), set()),
    "prediction": ({"model", "provenance", "scaling"}, set()),
    "prediction_table": ({"figures", "model", "prediction", "scaling"}, set()),
    "_cost": (
        {*("envs", "plan", "rollout", "session", "trainer", "weights"), *TOOLS},
        set(),
    ),
    "_link": ({"accumulate", "comm", "launch"}, {"numpy"}),
    "speedup_table": ({"scaling", "timing"}, {"matplotlib"}),
    "_bare": ({"envs"}, {"gymnasium", "numpy"}),
    "recorded": ({"config", "logger"}, {"numpy"}),
    "figures": (set(), {"matplotlib"}),
    "plot": ({"config", "figures", "recorded"}, {"numpy", "tyro"}),
    "page": (set(), set()),
    "report": ({"figures", "page", "recorded"}, {"numpy", "tyro"}),
    "play": ({"agent", "batch", "envs", "episodes", "evaluate", "film", *TOOLS}, {"tyro"}),
    "export": ({"agent", "envs", "evaluate", *TOOLS}, {"numpy", "torch", "tyro"}),
    "doctor": ({"hosts", "launch", "provenance"}, {"tyro"}),
    "_probe": ({"provenance"}, set()),
    "_echo": ({"accumulate", "comm", "launch"}, {"numpy"}),
    "__main__": (set(), set()),
    "trainer": (
        {
            *("accumulate", "agent", "batch", "comm", "contract", "episodes", "film", "job"),
            *("memory", "rollout", "run", "seeding", "state", "stats", "weights", *TOOLS),
        },
        {"numpy"},
    ),
    "session": (
        {
            *(
                "agent",
                "averages",
                "comm",
                "envs",
                "episodes",
                "job",
                "plan",
                "provenance",
                "rollout",
                "run",
            ),
            *("seeding", "sinks", "state", "tickets", "trainer", *TOOLS),
        },
        set(),
    ),
    "plan": ({"agent", "envs", "film", "sinks", "twin", *TOOLS}, {"tyro"}),
    "cli": ({"comm", "hosts", "job", "launch", "session"}, set()),
}
ALGOS = (
    {
        *("agent", "batch", "returns", "flat", "nets", "policies", "actor_critic", "regression"),
        "twin",
    },
    {"numpy", "torch"},
)


def imports(path):
    """Project files and outside packages that a file imports, anywhere in it."""
    project, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [(node.module, [alias.name for alias in node.names])]
        else:
            continue
        for module, members in names:
            top, _, rest = module.partition(".")
            if top == "rank0rl":
                project |= {rest.split(".")[0]} if rest else set(members)
            elif top not in sys.stdlib_module_names:
                outside.add(top)
    return project, outside


FILES = sorted((ROOT / "rank0rl").glob("**/*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_framework_imports_what_its_layer_may(path):
    project, outside = imports(path)
    may_project, may_outside = ALLOWED[path.stem]
    assert project <= may_project
    assert outside <= may_outside


@pytest.mark.parametrize("path", sorted((ROOT / "algos").glob("*.py")), ids=lambda p: p.stem)
def test_agents_know_nothing_of_mpi(path):
    project, outside = imports(path)
    assert project <= ALGOS[0]
    assert outside <= ALGOS[1]


@pytest.mark.parametrize("module", ["rank0rl", "rank0rl.mpi.launch", "rank0rl.cli"])
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
