"""The command line before tyro reads it: how ranks are started, which run goes on, what --cpu allows.

The process that starts ranks reads it with the standard library alone.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rank0rl.launch import job
from rank0rl.launch.hosts import count_ranks, read_hosts
from rank0rl.options import CheckedOptions, facts, flag, names, read_some, setting
from rank0rl.run.files import read_toml

_AUTO = "auto"  # in place of the folder of --resume

# NumPy's names before and after 2.4; it passes over those that it does not know.
_NUMPY = "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL"
_PORTABLE = {
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": _NUMPY,
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "",
}
"""Environment variables of --cpu portable, which libraries read when they are loaded."""
_ANEW = "RANK0RL_BEGAN_ANEW"
_BEGAN_ANEW = bool(os.environ.pop(_ANEW, ""))
_CANNOT_BEGIN_ANEW = {"mpi4py.MPI", "ipykernel", "pytest"}  # modules of programs that would be lost

# How ranks are started is part of one start of a run. It never changes the curve.
_launch = partial(setting, changes_curve=False, resume=True, in_file=False, launch=True)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(CheckedOptions):
    """Options that are known early: how ranks are started, what bounds their number, where settings come from."""

    nprocs: int | None = _launch(None, "[1, inf)")
    """Number of ranks. It changes how long a run takes, and nothing else. None: the number that a launcher started, else one per slot of the hosts, else 1."""
    hosts: str | None = _launch(None)
    """Hosts and their numbers of slots, such as a:8,b:8. Ranks on other hosts are started with ssh; this host comes first. None: this host only."""
    hostfile: str | None = _launch(None)
    """File of the hosts, in place of --hosts. Each line is a:8 or a slots=8."""
    pass_env: str | None = _launch(None)
    """Environment variables that ranks on other hosts get besides the usual ones, such as A,B_*. None: the usual ones, see docs/several-machines.md. Ranks on this host have all of them."""
    mpiexec: str | None = _launch(None)
    """Command line of your own launcher. It is given -n, the number of ranks and their command. None: the launcher of this Python environment."""
    ranks_per_env: int = _launch(1, "[1, inf)")
    """MPI ranks of each environment that is a parallel program, so that nprocs times as many processes start: see docs/simulators.md."""
    mpmd: bool = _launch(False)
    """Take part in a job of several programs, as the first one: a launcher has started --nprocs ranks of this one, and then one solver for each environment: see docs/simulators.md."""
    bind_to_core: bool = _launch(False)
    """Bind every rank to one core. Rank 0's update then has one core too."""
    collective_timeout: float | None = _launch(None, "(0, inf)")
    """Seconds that a rank may wait for the others. None: no limit."""
    start_timeout: float = _launch(300.0, "(0, inf)")
    """Seconds that a rank may take to start after others have, or the launcher until it starts one. Making an environment in a process of its own may take as long."""
    max_restarts: int = _launch(0, "[0, inf)")
    """Number of times that a job with a failed rank is started again, from its last checkpoint."""
    num_envs: int = setting(32, "[1, inf)", changes_curve=True, resume=False)
    """Environments over all ranks, at least one per rank. The number is part of the experiment: nprocs never changes it."""
    cpu: str = setting("portable", changes_curve=True, resume=True)
    """Instructions that libraries use. portable: those that give the same bits on every x86-64 CPU with AVX2. native: the best of this CPU."""
    config: str | None = setting(None, changes_curve=True, resume=False, in_file=False)
    """TOML file of settings; or a name, such as ppo: the file in configs/ of that agent for this environment, else for all. None: the same for the agent of --algo, if configs/ has one."""
    resume: str | None = setting(None, changes_curve=False, resume=True, in_file=False)
    """Folder of a run to continue, with its own settings. auto: go on in --run-dir if it holds a run of the same settings, else begin one there."""
    shorter_record: bool = setting(False, changes_curve=False, resume=True, in_file=False)
    """With --resume: go on although progress.csv has lost rows that no checkpoint can make again."""
    run_dir: str | None = setting(None, changes_curve=False, resume=False, in_file=False)
    """Folder of the run's files. None: a new one under runs/."""

    algo: str = setting("ppo", changes_curve=True, resume=False)
    """Agent: a name in algos/, file.py:Class, or package.module:Class."""
    steps_per_batch: int | None = setting(None, "[1, inf)", changes_curve=True, resume=False)
    """Steps per iteration over all environments, a multiple of --num-envs. None: 64 per environment."""
    episodes_per_batch: int | None = setting(None, "[1, inf)", changes_curve=True, resume=False)
    """Episodes per iteration, in place of --steps-per-batch: batches of whole episodes, at least one episode per rank."""
    stop_after_iterations: int | None = setting(
        None, "[1, inf)", changes_curve=False, resume=True, in_file=False
    )
    """Stop early, when the run has made this many iterations, earlier starts included. Schedules stay those of --total-steps."""
    stop_after_seconds: float | None = setting(
        None, "(0, inf)", changes_curve=False, resume=True, in_file=False
    )
    """Stop early, at the end of the iteration in which this many seconds have passed since this start or restart."""
    keep_batches: str | None = setting(None, changes_curve=False, resume=True, in_file=False)
    """Folder for the rows of every batch, one .npz file for each iteration: what the agent's process returned, and "fragment_id". Name it again to resume."""
    env_folders: str | None = setting(None, changes_curve=False, resume=True, in_file=False)
    """Folder in which every environment gets an empty folder of its own, for the files of a simulator: `place.folder` of the function that makes it. It is removed with the environment, but kept after an error. Name it again to resume."""
    phases: bool = setting(False, changes_curve=False, resume=True, in_file=False)
    """Print the share of time that each phase of an iteration takes, too."""
    quiet: bool = setting(False, changes_curve=False, resume=True, in_file=False)
    """Print errors only."""
    trust: bool = setting(False, changes_curve=False, resume=True, in_file=False)
    """Import all code that is named by the run to resume, or by the file of settings. Without it, code that is not part of Gymnasium or rank0rl is only imported for runs of your own."""

    def how(self) -> dict[str, Any]:
        """Return the arguments of `mpi_fork` besides the number of ranks."""
        launch = names(LaunchOptions, launch=True) - {"nprocs"}
        return {name: getattr(self, name) for name in launch}


_ELSEWHERE = {  # what mpi_util, stable-baselines3, CleanRL and rank0rl's own tools call options, with underscores
    "--gpu_pct": "leave it out: only rank 0 updates, and ppo takes --device cuda",
    "-g": "--gamma",
    **dict.fromkeys(("-l", "--lambda", "--gae_lambda"), "--lam"),
    **dict.fromkeys(("-k", "--kl_targ"), "--target-kl"),
    "-b": "--episodes-per-batch",
    "--batch_size": "--minibatch-size for rows, --episodes-per-batch for episodes",
    "--total_timesteps": "--total-steps",
    **dict.fromkeys(("--n_steps", "--num_steps"), "--steps-per-batch, of all environments"),
    "--n_envs": "--num-envs",
    "--learning_rate": "--lr",
    "--num_minibatches": "--minibatch-size, in rows",
    **dict.fromkeys(("--n_epochs", "--update_epochs"), "--epochs"),
    **dict.fromkeys(("--clip_range", "--clip_coef"), "--clip-ratio"),
    "--ent_coef": "--entropy-coef",
    "--vf_coef": "--value-coef, half of CleanRL's",
    **dict.fromkeys(
        ("-m", "--hid1_mult", "--policy_hid_list"), "--hidden, the units of each layer"
    ),
    "--valfunc_hid_list": "--value-hidden, the units of each layer",
    **dict.fromkeys(("--out", "--folder", "--logdir", "--log_dir", "--output_dir"), "--run-dir"),
    **dict.fromkeys(("-v", "--policy_logvar"), "--log-std, which is half of it"),
}


@dataclass(frozen=True)
class Words:
    """The words of a command line, and the `LaunchOptions` among them."""

    argv: Sequence[str]
    """All words, without the program's name."""
    given: Mapping[str, Any]
    """Option of `LaunchOptions` -> value, for the options that the command line gives."""
    run: Path | None = None
    """Folder of the run to go on with; None if a new run begins."""

    @classmethod
    def read(cls, argv: Sequence[str]) -> Words:
        """Read a command line.

        Raises:
            ValueError: if a value is not of its option's type, or --resume auto comes without --run-dir.
        """
        given = read_some(argv, LaunchOptions, names(LaunchOptions))
        run = given.get("resume")
        if run == _AUTO:
            if not (run := given.get("run_dir")):
                raise ValueError(
                    "--resume auto goes on with the run in --run-dir, or begins one there: got no "
                    "--run-dir; name the run's folder"
                )
            if not any(Path(run).glob("checkpoints/*.pt")):
                run = None
        return cls([*argv], given, Path(run) if run else None)

    @property
    def is_help(self) -> bool:
        """True if the command line asks for help."""
        return not {"-h", "--help"}.isdisjoint(self.argv)

    @property
    def is_auto(self) -> bool:
        """True if the command line may begin a run or resume one."""
        return self.given.get("resume") == _AUTO

    def launch_options(self, configs: Path) -> LaunchOptions:
        """Return the options by which the ranks are started; one rank for --help.

        Args:
            configs: folder of TOML files. `find_config` chooses one of them.

        Raises:
            ValueError: if there would be a rank without an environment, or a host is wrong.
        """
        if self.is_help:
            return LaunchOptions(nprocs=1)
        given = {**self.given}
        named = given.get("config") or (str(self.run / "config.toml") if self.run else None)
        files: set[Path | None] = {Path(named)} if named else set()
        if named is None or is_settings_name(named):
            files = self._config_files(configs, given)
        if "cpu" not in given:  # rank 0 knows which word is the environment
            cpus = {cpu for file in files if isinstance(cpu := _setting(file, "cpu"), str)}
            given |= {"cpu": cpus.pop()} if len(cpus) == 1 else {}
        options = LaunchOptions(**given)
        if job.world_size() is not None:  # the ranks are there, and a host file may not be
            return options
        nprocs = count_ranks(
            options.nprocs, read_hosts(options.hosts, options.hostfile), options.ranks_per_env
        )
        if nprocs == 1:
            return options
        most = options.num_envs
        if "num_envs" not in given:
            numbers = [_setting(file, "num_envs") for file in files]
            most = max((n if isinstance(n, int) else most for n in numbers), default=most)
        if nprocs > most:
            raise ValueError(too_many_ranks(nprocs, most))
        return options

    def _config_files(self, configs: Path, given: Mapping[str, Any]) -> set[Path | None]:
        """Return what `find_config` would return, if any of the words is the environment.

        The settings of an agent of one's own are those that its class names, which may be any.
        """
        algo = given.get("algo", LaunchOptions.algo)
        where = algo.partition(":")[0]
        names = {Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]}
        if "config" in given:
            names = {given["config"]}
        elif where.endswith(".py") or ":" in algo:
            names |= {file.stem.partition("-")[0] for file in configs.glob("*.toml")}
        bases = {re.sub(r"-v\d+$", "", word.rpartition(":")[2]) for word in self.argv}
        return {find_config(configs, name, base) for name in names for base in bases}

    def flags(self) -> set[str]:
        """Return the names of all options that the command line gives, those of the agent too."""
        flags = (word[2:].partition("=")[0] for word in self.argv if word.startswith("--"))
        named = {flag.replace("-", "_") for flag in flags}
        named |= {"num_episodes"} if "-n" in self.argv else set()
        return named | {name.removeprefix("no_") for name in named}

    def check_names(self, known: Mapping[str, str]) -> None:
        """Check the names of options: name -> type.

        Raises:
            ValueError: for one that is called otherwise here than in other libraries, or one of several values that
                comes twice, because only the last would count.
        """
        given = [word.partition("=")[0] for word in self.argv]
        alike = {name: name[:2] + name[2:].replace("-", "_") for name in given}
        number = Counter(alike[name] for name in given)
        for name, kind in known.items():
            if ("tuple" in kind or kind == "Pairs") and number[f"--{name}"] > 1:
                raise ValueError(f"name all values after one {flag(name)}: {flag(name)} A B")
        theirs = [name for name, it in alike.items() if it in _ELSEWHERE and it[2:] not in known]
        if theirs:
            said = "; ".join(f"{name}: {_ELSEWHERE[alike[name]]}" for name in theirs)
            raise ValueError(f"these options have other names here ({said})")

    @classmethod
    def to_go_on(cls, run: Path, given: Mapping[str, Any]) -> Words:
        """Return the command line that goes on with a run, and trusts it. It repeats the options that no checkpoint holds.

        Args:
            run: the run's folder.
            given: options of the start before.
        """
        kept = {"resume": str(run), **{n: given[n] for n in _OF_A_START if n in given}}
        argv: list[str] = []
        for name, value in kept.items():
            if value is not None and value is not False:
                argv += [flag(name)] if value is True else [flag(name), str(value)]
        return cls(argv, {**kept, "trust": True}, run)


_OF_ONE_START = {"config", "resume", "run_dir", "shorter_record", "trust"}
_OF_A_START = [
    name
    for name, known in facts(LaunchOptions).items()
    if not known.in_file and name not in _OF_ONE_START
]


def is_settings_name(config: str) -> bool:
    """Return True if a value of --config is a name of settings in configs/, and no file."""
    return not config.endswith(".toml") and os.path.basename(config) == config


def find_config(folder: Path, agent: str, env: str) -> Path | None:
    """Return the TOML file for an agent in an environment, else for the agent alone, else None.

    Args:
        folder: configs/, with <agent>-<environment>.toml and <agent>.toml.
        agent: the agent's name, as `agents.short_name` gives it, or what its class names as `settings`.
        env: the environment's name without module and version.
    """
    names = (f"{agent}-{env.replace('/', '-')}.toml", f"{agent}.toml")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def too_many_ranks(nprocs: int, num_envs: int) -> str:
    """Return the message for a rank without an environment, before the ranks are started or after."""
    return (
        f"num_envs must be at least nprocs so that every rank has an environment: got "
        f"num_envs={num_envs}, nprocs={nprocs}; raise --num-envs or lower --nprocs"
    )


def _setting(file: Path | None, name: str) -> Any:
    """Return a setting of a TOML file; None without it, or if the file is damaged, which rank 0 will report."""
    try:
        return read_toml(file, "config").get(name) if file else None
    except ValueError:
        return None


def limit_cpu(name: str) -> None:
    """Choose the instructions that libraries use in this process, and in those that it starts.

    NumPy, OpenBLAS, torch and compiled updates choose their code by the type of CPU. Sums in another
    order and other approximations have other last bits. Once NumPy is loaded, it is too late: a script that
    has loaded it begins anew.

    Args:
        name: the value of --cpu, portable or native.

    Raises:
        ValueError: for another value, and for portable on an x86-64 CPU without AVX2 and FMA.
    """
    if name not in ("portable", "native"):
        raise ValueError(f"cpu must be portable or native: got {name!r}; set --cpu")
    if name == "portable" and not _has_avx2():
        raise ValueError(
            "--cpu portable, which is the default, needs a CPU with AVX2 and FMA: this one has not; give "
            "--cpu native, whose results may differ from other CPUs'"
        )
    if _is_portable() == (name == "portable"):
        return
    is_late = "numpy" in sys.modules
    can_begin_anew = Path(sys.argv[0]).is_file() and not _BEGAN_ANEW
    if is_late and not (can_begin_anew and _CANNOT_BEGIN_ANEW.isdisjoint(sys.modules)):
        return  # `check_cpu` refuses it
    if name == "portable":
        os.environ.update(_PORTABLE)
    else:
        for variable in _PORTABLE:
            del os.environ[variable]
    if is_late:
        print("NumPy was loaded before --cpu was known: the script begins anew", file=sys.stderr)
        os.environ[_ANEW] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def limit_cpu_as(words: Iterable[str]) -> None:
    """Choose the instructions for a tool, as the first run did that these words name, by its folder or a file in it."""
    paths = [Path(word) for word in words if os.path.exists(word)]  # a word may be no path at all
    files = (folder / "config.toml" for path in paths for folder in (path, *path.parents[:2]))
    found = (_setting(file, "cpu") for file in files if file.is_file())
    name = next((name for name in found if name in ("portable", "native")), "portable")
    limit_cpu(name if _has_avx2() else "native")


def check_cpu(name: str) -> None:
    """Check that libraries use the instructions that --cpu names.

    Raises:
        ValueError: if they were loaded before the value was known.
    """
    if _is_portable() != (name == "portable"):
        raise ValueError(
            f"--cpu {name} must be known before NumPy is loaded: start training by train.py, python -m rank0rl "
            f"train or rank0rl.train, or give --cpu {'native' if name == 'portable' else 'portable'}"
        )


def _is_portable() -> bool:
    return all(os.environ.get(name) == value for name, value in _PORTABLE.items())


def _has_avx2() -> bool:
    """Return False if this is an x86-64 CPU without AVX2 or FMA."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    flags = re.search(r"^flags\s*:(.*)$", text, re.M)
    return not flags or {"avx2", "fma"} <= {*flags[1].split()}


def program() -> list[str]:
    """Return the words with which training is called here: a script, or rank0rl's own command."""
    script = Path(sys.argv[0])
    if script.name in ("__main__.py", "rank0rl"):
        return ["python", "-m", "rank0rl", "train"]
    return ["python", str(script)]
