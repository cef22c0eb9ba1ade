"""Train two iterations in environments of other projects, and write what happens: results/foreign_environments.md.

    pip install minigrid highway-env gymnasium-robotics "gymnasium[box2d,toy-text]" ale-py shimmy dm_control "mujoco<4" \
        "pettingzoo[sisl,butterfly]" envpool opencv-python-headless
    python benchmarks/foreign_environments.py               # the table of that file
    python benchmarks/foreign_environments.py Taxi Pong     # some rows, printed only

Each environment is trained in at 1 and at 2 ranks. The table has the first digits of the weights' SHA-256 if they
are the same, else the line that the run ends with.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "benchmarks" / "results" / "foreign_environments.md"
SIZE = "--config configs/ppo.toml --num-envs 2 --steps-per-batch 64 --total-steps 128 --epochs 2 --minibatch-size 32 --hidden 16"
LIMIT_S = 240
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


class Case(NamedTuple):
    """Words of the command line of one environment, and the project that it is of."""

    project: str
    words: str
    options: str = ""
    """More words, which say what it is made with."""


CASES = [
    Case("MiniGrid", "minigrid:MiniGrid-Empty-5x5-v0"),
    Case(
        "MiniGrid",
        "minigrid:MiniGrid-Empty-5x5-v0",
        "--wrappers FilterObservation(filter_keys=['direction','image'])",
    ),
    Case(
        "MiniGrid", "minigrid:MiniGrid-Empty-5x5-v0", "--wrappers minigrid.wrappers:FlatObsWrapper"
    ),
    Case(
        "MiniGrid", "minigrid:MiniGrid-Empty-5x5-v0", "--wrappers minigrid.wrappers:ImgObsWrapper"
    ),
    Case("highway-env", "highway_env:highway-fast-v0"),
    Case("highway-env", "highway_env:parking-v0"),
    Case("gymnasium-robotics", "gymnasium_robotics:FetchReach-v4"),
    Case("gymnasium-robotics", "gymnasium_robotics:PointMaze_UMaze-v3"),
    Case("gymnasium-robotics", "gymnasium_robotics:AdroitHandDoor-v1"),
    Case("Box2D", "LunarLander-v3"),
    Case("Box2D", "LunarLanderContinuous-v3"),
    Case("Box2D", "BipedalWalker-v3"),
    Case("Box2D", "CarRacing-v3"),
    Case("ALE", "ale_py:ALE/Pong-v5", "--env-kwargs obs_type=rgb"),
    Case("ALE", "ale_py:ALE/Pong-v5", "--env-kwargs obs_type=grayscale"),
    Case("ALE", "ale_py:ALE/Pong-v5", "--env-kwargs obs_type=ram"),
    Case("Gymnasium", "Taxi-v4"),
    Case("Gymnasium", "Blackjack-v1"),
    Case("dm_control by shimmy", "shimmy:dm_control/cartpole-balance-v0"),
    Case("dm_control by shimmy", "shimmy:dm_control/walker-walk-v0"),
    Case(
        "PettingZoo",
        "pettingzoo.sisl.multiwalker_v9:parallel_env",
        "--num-envs 6 --steps-per-batch 96",
    ),
    Case(
        "PettingZoo",
        "pettingzoo.sisl.pursuit_v5:parallel_env",
        "--num-envs 16 --steps-per-batch 64",
    ),
    Case(
        "PettingZoo",
        "pettingzoo.butterfly.knights_archers_zombies_v11:parallel_env",
        "--num-envs 8 --steps-per-batch 4000 --total-steps 8000",
    ),
    Case(
        "PettingZoo",
        "examples.all_agents:make",
        "--env-kwargs module=pettingzoo.sisl.multiwalker_v9",
    ),
    Case("vector only", "foreign_environments:VectorOnly-v0"),
    Case("vector", "foreign_environments:vector_cartpole", "--num-envs 4"),
    Case("EnvPool", "foreign_environments:envpool_cartpole"),
    Case("actions", "foreign_environments:tuple_actions"),
    Case("actions", "foreign_environments:dict_actions"),
    Case("actions", "foreign_environments:integer_actions"),
    Case("actions", "foreign_environments:mixed_actions"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help="parts of names; none: all, written to the page")
    some = parser.parse_args().rows
    chosen = [case for case in CASES if not some or any(a in case.words for a in some)]
    with ThreadPoolExecutor(2) as pool:
        rows = [*pool.map(row, chosen)]
    if not some:
        head = [
            "| project | environment | observations; actions | what happens |",
            "|---|---|---|---|",
        ]
        before, _, rest = PAGE.read_text().partition(BEGIN)
        table = "\n".join([BEGIN, "", *head, *rows, "", END])
        PAGE.write_text(before + table + rest.partition(END)[2])


def row(case: Case) -> str:
    """Return the row of an environment in the table."""
    words = f"{case.words} {case.options}".strip()
    text = f"| {case.project} | `{words}` | {spaces(case)} | {what_happens(case)} |"
    print(text, flush=True)
    return text


def what_happens(case: Case) -> str:
    """Train at 1 and at 2 ranks; return the table's words for it."""
    hashes = []
    with tempfile.TemporaryDirectory() as folder:
        for nprocs in (1, 2):
            words = ["train.py", case.words, *SIZE.split(), *case.options.split()]
            words += ["--nprocs", str(nprocs), "--run-dir", f"{folder}/{nprocs}"]
            code, text = run(words)
            if code:
                errors = re.findall(r"^error: (.*)$", text, re.M)
                line = (errors or text.strip().splitlines() or ["no output"])[-1]
                return f"one line: {cell(line)}" if errors else f"fails: {cell(line)}"
            hashes += re.findall(r"^weights +(\w{64})$", text, re.M)
    if len(set(hashes)) == 1:
        return f"the same at 1 and 2 ranks: `{hashes[0][:12]}`"
    return f"differs: {' and '.join(f'`{one[:12]}`' for one in hashes)}"


def spaces(case: Case) -> str:
    """Return the spaces of an environment, as its project made it."""
    option, *words = case.options.split() or [""]
    kwargs = dict(word.split("=") for word in words) if option == "--env-kwargs" else {}
    wrappers = words if option == "--wrappers" else []
    _, text = run(["-c", SPACES, case.words, repr(kwargs), repr(wrappers)])
    found = re.findall(r"^spaces: (.*)$", text, re.M)
    return found[0] if found else "-"


SPACES = """
import ast, re, sys
from rank0rl.envs import make as envs, spaces
def words(space):
    name = type(space).__name__
    inner = getattr(space, "spaces", None)
    if inner is not None:
        parts = inner.values() if isinstance(inner, dict) else inner
        found = [words(one) for one in parts]
        return f"{name} of {', '.join(found)}" if len(found) < 4 else f"{name} of {len(found)} parts"
    shape = getattr(space, "shape", None)
    n = getattr(space, "n", None) if name == "Discrete" else shape
    return f"{name} {n}" + f" {space.dtype}" * (name == "Box")
env_id, kwargs, wrappers = sys.argv[1], *map(ast.literal_eval, sys.argv[2:])
env = envs.make(envs.resolve(env_id), wrappers, **kwargs)
obs = env.env.observation_space if spaces.is_flattened(env) else env.observation_space
nested = spaces.nested_actions(env)
act = nested.__self__.env.action_space if nested else env.action_space
print(f"spaces: {words(obs)}; {words(act)}")
"""


def run(words: list[str]) -> tuple[int, str]:
    """Run Python in this checkout; return its exit code and all that it printed."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks")))
    env = {**os.environ, "PYTHONPATH": path, "SDL_VIDEODRIVER": "dummy", "MUJOCO_GL": "disable"}
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *words],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"took longer than {LIMIT_S} s"
    return done.returncode, done.stdout + done.stderr


def cell(text: str) -> str:
    """Return text that fits into a table, without paths and addresses of this machine."""
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    text = re.sub(r"(/[\w.+-]+){3,}/", "", text)
    return " ".join(text.replace("|", "\\|").split())


def envpool_cartpole():
    """Make four CartPoles of EnvPool."""
    import envpool

    return envpool.make_gymnasium("CartPole-v1", num_envs=4)


def vector_cartpole(num_envs=2):
    """Make two CartPoles of Gymnasium that step together."""
    import gymnasium as gym

    return gym.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")


def tuple_actions():
    """Make CartPole, whose actions are a Tuple of choices."""
    from gymnasium.spaces import Discrete, MultiBinary, Tuple

    return _acting(Tuple((Discrete(2), MultiBinary(3))), lambda act: act[0])


def dict_actions():
    """Make Pendulum, whose actions are a Dict of floats."""
    from gymnasium.spaces import Box, Dict

    space = Dict(torque=Box(-2, 2, (1,)), unused=Box(-1, 1, (2, 2)))
    return _acting(space, lambda act: act["torque"], "Pendulum-v1")


def integer_actions():
    """Make CartPole, whose actions are a Box of integers."""
    import numpy as np
    from gymnasium.spaces import Box

    return _acting(Box(0, 1, (1,), np.uint8), lambda act: int(act[0]))


def mixed_actions():
    """Make Pendulum, whose actions are floats and choices."""
    from gymnasium.spaces import Box, Discrete, Tuple

    return _acting(Tuple((Box(-2, 2, (1,)), Discrete(2))), lambda act: act[0], "Pendulum-v1")


def _acting(space, to_own, env_id="CartPole-v1"):
    import gymnasium as gym

    return gym.wrappers.TransformAction(gym.make(env_id), to_own, space)


def _register() -> None:
    import gymnasium as gym

    gym.register("VectorOnly-v0", vector_entry_point=vector_cartpole)


if __name__ == "__main__":
    main()
else:
    _register()
