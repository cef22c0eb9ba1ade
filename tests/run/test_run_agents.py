"""An agent is found by its name."""

import sys

import pytest

from rank0rl.run import agents
from rank0rl.run.agents import load_agent, short_name


@pytest.mark.parametrize("algo", ["ppo", "rank0rl.algos.ppo:PPO", "some/where/ppo.py:PPO"])
def test_an_agent_has_one_name_for_files(algo):
    assert short_name(algo) == "ppo"


def test_a_name_in_algos_and_a_module_and_a_file_give_the_agent(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from rank0rl.algos.ppo import PPO\nclass Mine(PPO): pass\n")
    assert load_agent("ppo") is load_agent("rank0rl.algos.ppo:PPO")
    assert load_agent(str(file)) is load_agent(str(file))  # loaded once
    assert load_agent(str(file)).__name__ == load_agent(f"{file}:Mine").__name__ == "Mine"
    assert load_agent(f"{file}:PPO").__name__ == "PPO"


def test_an_agent_of_ones_own_has_the_algos_of_its_project(tmp_path, monkeypatch):
    file, util = tmp_path / "mine.py", tmp_path / "algos" / "util.py"
    util.parent.mkdir()
    (util.parent / "__init__.py").touch()
    util.write_text("from rank0rl import Agent as Base\n")
    methods = "; ".join(f"{name} = print" for name in agents._METHODS)
    file.write_text(f"from algos.util import Base\nclass Mine(Base): {methods}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_agent(f"{file}:Mine").__name__ == "Mine"
    assert load_agent("cem").__module__ == "rank0rl.algos.cem"
    del sys.modules["algos"], sys.modules["algos.util"]


OWN_OPTIONS = """
from dataclasses import dataclass
from rank0rl.algos.ppo import PPO
@dataclass(frozen=True)
class MyOptions:
    kl_coef: float = 1.0
class Mine(PPO):
    Options = MyOptions
class Child(Mine):
    pass
"""


@pytest.mark.parametrize("algo", ["mine.py:Mine", "mine.py:Child"])
def test_options_without_those_of_the_base_class_are_one_line(tmp_path, algo):
    (tmp_path / "mine.py").write_text(OWN_OPTIONS)
    with pytest.raises(ValueError, match=r"\w+\.Options must derive from PPOOptions") as error:
        load_agent(f"{tmp_path}/{algo}")
    assert "got MyOptions; import PPOOptions from rank0rl.algos.ppo, " in str(error.value)
    assert str(error.value).endswith("write class MyOptions(PPOOptions)")


@pytest.mark.parametrize(
    ("algo", "text", "said"),
    [
        ("no_such_agent", "", "no agent 'no_such_agent'"),
        ("none.py", "", "no agent 'none.py'"),
        ("mine.py", "import no_such_module", "no_such_module"),
        ("mine.py", "from rank0rl.algos.ppo import PPO", "does not name one agent"),
        ("mine.py", "class Mine: pass", "no class there derives from rank0rl.Agent"),
        ("mine.py:Other", "from rank0rl.algos.ppo import PPO", "PPO"),
        ("mine.py", "from rank0rl import Agent\nclass A(Agent): pass", "update"),
    ],
)
def test_what_is_not_an_agent_is_named(tmp_path, monkeypatch, algo, text, said):
    monkeypatch.chdir(tmp_path)
    load_agent.cache_clear()
    if text:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=said):
        load_agent(algo)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os\nclass A(\n", r"mine\.py cannot be imported: .*\(mine\.py, line 2\)"),
        ("\0", r"mine\.py cannot be imported: .*null bytes"),
        ("import sys\nsys.exit(7)\n", r"mine\.py cannot be imported: line 2 .*sys\.exit\(7\)"),
        ("import argparse as a\na.ArgumentParser().exit(3)\n", r"line 2 .*sys\.exit\(3\)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line(tmp_path, text, said):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        load_agent(str(tmp_path / "mine.py"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["mine.py", "a_package_of_mine.agent:A"])
def test_an_exception_in_a_file_is_told_with_its_place_alone(tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / name.partition(":")[0].replace(".agent", "/agent.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("def f():\n    open('not_there')\n\n\nf()\n")
    with pytest.raises(ValueError, match="cannot be imported") as error:
        load_agent(str(file) if name == "mine.py" else name)
    _, *told, last = str(error.value).splitlines()
    assert [line.strip() for line in told if "^" not in line] == [
        f'File "{file}", line 5, in <module>',
        "f()",
        f'File "{file}", line 2, in f',
        "open('not_there')",
    ]
    assert last.startswith("FileNotFoundError")
