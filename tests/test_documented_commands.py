"""Every command of README.md and docs/ runs: made shorter, or NOT_RUN says why it cannot be run here.

They run in a copy of the checkout, so whatever they write is out of the way. rank0rl alone is that of
the checkout itself: compiled code is kept for a path.
"""

import os
import re
import shlex
import shutil
import tomllib

import pytest
from helpers import forks
from helpers.ranks import HERE, typed

ROOT = HERE.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = {
    *(
        "python",
        "python3",
        "rank0rl",
        "make",
        "pip",
        "pre-commit",
        "mpiexec",
        "srun",
        "sbatch",
        "squeue",
        "tensorboard",
    ),
    *("apt", "cd", "cp", "diff", "getent", "git", "rsync", "ssh", "sudo", "sysctl", "."),
}

# Reason -> regular expressions of whole commands, as the pages show them.
NOT_RUN = {
    "is for an earlier version": [r"python train\.py (?!Lunar|Bipedal|minatar).* --cpu avx2 .*"],
    "needs a network": [r"pip install .*", r"apt install .*"],
    "is for a folder of the reader's": [r"python3 -m venv .*", r"\. \S+/activate", r"cd .*"],
    "needs other hosts": [
        *(r"python .* --hosts .*", r"python .* --hostfile .*"),
        *(r"ssh .*", r"getent .*", r"rsync .*"),
    ],
    "needs a batch system": [r"(srun|sbatch) .*", r"squeue --me", r"mpiexec python .*"],
    "needs root": [r"sysctl .*", r"python benchmarks/(links|machines)\.py .*"],
    "needs Windows": [r"mpiexec .* examples\\mpi\\.*"],
    "is of another program": [r"python train\.py Walker2d-v1 .*"],
    "needs a compiler: tests/test_programs.py runs it": [
        *(r"mpiexec .* \./oscillator", r"python train\.py examples\.oscillator:make .*"),
    ],
    "needs a display": [r"python -m rank0rl play \S+ --seed 3"],
    "needs an account": [r".* --wandb .*"],
    "needs a package that `make test` does not install": [
        *(
            r".* ale_py:.*",
            r".* minigrid:.*",
            r".* minatar\.gym:.*",
            r".* (LunarLander(Continuous)?|BipedalWalker) .*",
            r"python .*pettingzoo.*",
        ),
        r"python benchmarks/foreign_environments\.py",
        r"python benchmarks/(update|minutes|rivals)\.py.*",  # stable-baselines3 too
        r"python benchmarks/train\.py .*(Pong|--sbx|--before) .*",
        *(r"python -m spinup\..*", r"python examples/train_policy\.py .*"),
    ],
    "runs in test_examples.py": [
        *(r"mpiexec .* examples/mpi/\w+\.py", r"python examples/(mpi/|\d\d_).*", r"diff .*"),
    ],
    "runs in mpi/test_chaos.py, with processes of its own": [r"python benchmarks/chaos\.py.*"],
}

# Regular expression -> replacement, in this order. The last value of an option counts.
SHORTER = {
    r" --run-dir runs/(first|second)": "",
    r"\bruns/\S+": "runs/done",  # this and other files are those of the fixture
    r"\b(DIR|OLD|NEW)\b": str(ROOT),
    r"--out benchmarks/results/\S+": "--out v5",  # what is there has other settings
    r"walker2d/ppo-v0 --nprocs": "batches --nprocs",
    r"--seed N": "--seed 0",
    r"\b(ENV|TASK)\b": "CartPole",
    r"--episodes-per-batch \d+": "--episodes-per-batch 4",
    r"^rank0rl train ": "python -m rank0rl train ",
    r"^python (train\.py|-m rank0rl train) (?!.*(--help|--resume|episodes|-n |--algo (klppo|es|cmaes))).*": (
        r"\g<0> --steps-per-batch 256"
    ),
    r"--nprocs 1 2 4 8": "--nprocs 1 2",
    r"^(python (?!benchmarks).*)--nprocs (?!1 2)\d+": r"\1--nprocs 1",
    r"--iteration 90": "--iteration 1",
    r"--episodes \d+": "--episodes 2",
    r"^make .*": r"\g<0> --dry-run",
    r"^mpiexec -n 4": "mpiexec -n 2",
    r"^(mpiexec.* )?python (train\.py|-m rank0rl train) (?!--help).*": r"\g<0> --stop-after-iterations 1",
    r"^python -m rank0rl (?!doctor)\w+$": r"\g<0> --help",  # the name of a tool
    r"^python -m rank0rl speedup .*--nprocs.*": r"\g<0> --iterations 1 --repeats 1",
    r"^python -m rank0rl speedup (?!.*--env-kwargs).*--algo es.*": r"\g<0> --env-kwargs max_episode_steps=20",
    r"--seeds 0:\d+": "--seeds 0:1",
    r"^python -m rank0rl study .*": r"\g<0> --total-steps 256 --num-envs 2 --steps-per-batch 64",
    r"^python -m rank0rl study .*--search.*": r"\g<0> --trials 2",
    r"^python examples/ppo.*": r"\g<0> --iterations 2 --steps-per-batch 256",
    r"^python examples/cleanrl.*": r"\g<0> --total-timesteps 1024 --num-steps 64",
    r"^python benchmarks/(?!table|es_|chaos|same|study|keep_|cpu_|stragglers|large_).*": r"\g<0> --repeats 1",
    r"^python docs/make/timeline\.py": r"\g<0> --repeats 1",
    r"^python benchmarks/(scaling_model|eight_steps|train)\.py.*": r"\g<0> --iterations 2",
    r"^python benchmarks/eight_steps\.py.*": r"\g<0> --steps-per-batch 512",
    r"^python benchmarks/train\.py.*": r"\g<0> --sb3 --single-file --steps-per-batch 512",
    r"^python benchmarks/scaling_model\.py.*": r"\g<0> --cases a",
    r"^python benchmarks/portable\.py.*": r"\g<0> --only PPO --iterations 1",
    r"^python benchmarks/(rollout|limits|env_process)\.py.*": r"\g<0> --steps 32",
    r"^python benchmarks/invariance\.py.*": r"\g<0> --num-envs 2 --steps-per-batch 64",
    r"^python benchmarks/drop_in_learning\.py.*": r"\g<0> --total-timesteps 4096 --nprocs 2",
    r"^python benchmarks/large_replay\.py.*": r"\g<0> --steps 25000 --gb 0.05",
    r"^python benchmarks/study\.py": r"\g<0> --seeds 1 --steps-per-batch 512 --total-steps 2048",
    r"^python benchmarks/same_curve\.py.*": r"\g<0> --only reinforce/CartPole/fixed/plain",
}
SLOW = (
    r"mpiexec .*|python -m rank0rl speedup .*--nprocs.*|python (benchmarks|examples)/.*"
    r"|python train\.py (HalfCheetah|Hopper|InvertedDoublePendulum|Swimmer) .*"
)


def commands(page):
    """Return what a page tells to type: lines of blocks, and code that begins with a program's name.

    What has "..." for a word is no whole command.
    """
    fence = r"^ *```(\w*)\n(.*?)^ *```$"
    blocks = [body for kind, body in re.findall(fence, page, re.M | re.S) if kind in SHELLS]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    text = re.sub(fence, "", page, flags=re.M | re.S)
    lines += [code for _, code in re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", text, re.S)]
    parts = [part for line in lines for part in re.sub(r"(^|\s)#.*", "", line).split(" && ")]
    words = [part.strip().removeprefix("$ ").split() for part in parts]
    return [
        " ".join(each)
        for each in words
        if len(each) > 1 and each[0] in PROGRAMS and "..." not in each
    ]


SHELLS = ("", "sh", "bash", "console")
DOCUMENTED = [line for page in PAGES for line in commands(page.read_text())]


def matches(line):
    """Return the entries of NOT_RUN that a command matches."""
    return [each for group in NOT_RUN.values() for each in group if re.fullmatch(each, line)]


def shorter(line):
    """Return a command with all replacements, and the replacements that changed it."""
    used = []
    for pattern, replacement in SHORTER.items():
        line, count = re.subn(pattern, replacement, line)
        used += [pattern] * bool(count)
    return line, used


TO_RUN = [line for line in DOCUMENTED if not matches(line)]
FAST = {shorter(line)[0] for line in commands(PAGES[0].read_text())}  # those of the README
CASES = [
    pytest.param(
        line,
        marks=() if line in FAST and not re.fullmatch(SLOW, line) else pytest.mark.slow,
        id=line,
    )
    for line in dict.fromkeys(shorter(line)[0] for line in TO_RUN)
]

MY_FILE = """
from rank0rl.algos.reinforce import Reinforce

class MyAgent(Reinforce):
    pass
"""
MY_MODULE = """
import importlib
import gymnasium as gym

Corridor = importlib.import_module("examples.02_environment").Corridor

class MyEnv(Corridor):
    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "success": True, "distance": 1.0, "cost": 2.0, "force": 3.0}

def make(place=None):
    return MyEnv()

make_env = MyEnv
gym.register("MyEnv-v0", MyEnv)
"""
STUDY = {
    "predicted.csv": "experiment,nprocs,speedup\nsame,2,1.9\nsame,64,40\n",
    "speedup.csv": "nprocs,speedup\n1,1\n2,1.8\n",
}


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A copy of the checkout, with the files of a reader who has done what the pages say."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("algos", "benchmarks", "configs", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("train.py", "Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    pages = {"policies": "MyPPO", "python": "MLflow", "change-ppo": "Huber"}
    own = [block(f"{page}.md", f"class {name}") for page, name in pages.items()]
    (folder / "my_file.py").write_text("\n".join([*own, MY_FILE]))
    (folder / "mlflow.py").write_text(
        "log_params = log_metrics = end_run = lambda *_, **__: None\n"
    )
    (folder / "my_module.py").write_text(MY_MODULE)
    shutil.copy(folder / "algos" / "a2c.py", folder / "mine.py")
    shutil.copy(folder / "examples" / "03_agent.py", folder / "my_agent.py")
    (folder / "my_study.toml").write_text('envs = ["CartPole"]\nseeds = "0:1"\n')
    (folder / "STUDY").mkdir()
    for name, text in STUDY.items():
        (folder / "STUDY" / name).write_text(text)
    done = "Walker2d --run-dir runs/done --keep-batches batches --stop-after-iterations 1"
    run(f"python train.py {done}", folder)
    return folder


def block(page, text):
    """Return the block of Python on a page of docs/ that has a text."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.M | re.S)
    [found] = [each for each in blocks if text in each]
    return found


def run(line, folder):
    """Run a command: in a fork that has imported torch, if it is Python in one process."""
    env = {
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "MINARI_DATASETS_PATH": str(folder / "minari"),
    }
    program, *words = shlex.split(line)
    if program != "python" or re.fullmatch(SLOW, line):
        return typed(line, cwd=folder, env=env)
    done = forks.run(*words, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.fast(4)
@pytest.mark.parametrize("line", CASES)
def test_a_documented_command_runs(line, checkout):
    run(line, checkout)


def test_every_entry_of_the_tables_is_of_use():
    """A command that no page has any more needs no entry, and none has two."""
    found = [matches(line) for line in DOCUMENTED]
    assert [line for line, each in zip(DOCUMENTED, found, strict=True) if len(each) > 1] == []
    assert {each for group in NOT_RUN.values() for each in group} == {
        each for group in found for each in group
    }
    assert {*SHORTER} == {each for line in TO_RUN for each in shorter(line)[1]}


def test_what_is_a_command_on_a_page():
    page = """Text has `python a.py --x`, `python -m rank0rl ...`, `make`, `lr = 1` and `make
    test`.

    ```sh
    $ python b.py \\
        --y        # why
    cd c && pip install "d[e]"
    printed
    ```
    ```diff
    python f.py
    ```
    """
    expected = ["python b.py --y", "cd c", 'pip install "d[e]"', "python a.py --x", "make test"]
    assert commands(page) == expected


def test_every_extra_that_a_page_installs_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"-e \"\.\[(.*?)\]\"", "\n".join(DOCUMENTED))
    extras = {extra for names in named for extra in names.split(",")}
    assert extras
    assert extras - {*project["optional-dependencies"]} == set()


SCRIPTS = [
    path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text()
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_a_benchmark_starts_in_any_folder(script, tmp_path):
    done = forks.run(str(script), "--help", env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    assert list(tmp_path.iterdir()) == []
