"""Try the commands of the README on fresh systems: python benchmarks/machines.py bookworm trixie --folder machines.

A system is a minimal Debian from debootstrap, with Python, git and make. A user of it, not root, clones this
checkout, trains, and runs the tests, all from empty caches. It needs root, debootstrap and unshare. Each
system is left in its folder; whatever was mounted there is gone with the process.

    python benchmarks/machines.py trixie --folder machines --packages newest    # not those of constraints.txt
    python benchmarks/machines.py trixie --folder machines --containerfile      # the steps of Containerfile

Where pip or apt have settings of their own: --pip-config FILE, --mirror URL, and --bind for folders that they name.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks" / "results" / "machines.csv"
PROGRAMS = "ca-certificates,git,make,python3,python3-venv"
HOME, USER = "/home/user", 1001  # 1000 is that of Containerfile
TRAIN = (
    'make train ENV=Walker2d NPROCS=2 ARGS="--config benchmarks/ppo-64x64.toml --total-steps 40960"'
)
SHOWN = ("numpy", "torch", "numba", "gymnasium", "mujoco", "mpi4py", "mpich")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="+", help="of Debian, such as trixie")
    parser.add_argument("--folder", type=Path, required=True, help="gets a folder for each system")
    parser.add_argument("--packages", choices=("locked", "oldest", "newest"), default="locked")
    parser.add_argument("--containerfile", action="store_true", help="carry out its steps instead")
    parser.add_argument("--no-tests", action="store_true", help="train only")
    parser.add_argument("--mirror", default="", help="archive of Debian")
    parser.add_argument("--pip-config", type=Path, help="becomes /etc/pip.conf")
    parser.add_argument("--bind", type=Path, nargs="*", default=[], help="folders to show there")
    args = parser.parse_args()
    for suite in args.suites:
        system = System(args.folder.resolve() / suite, suite, args)
        if args.containerfile:
            carry_out(system)
        else:
            record(system, args)


class System:
    """A Debian in a folder."""

    def __init__(self, root: Path, suite: str, args: argparse.Namespace) -> None:
        self.root, self.suite, self.binds = root, suite, args.bind
        if not (root / "etc" / "passwd").exists():
            command = ["debootstrap", "--variant=minbase", f"--include={PROGRAMS}", suite, root]
            subprocess.run([*map(str, command), *filter(None, [args.mirror])], check=True)
            self.run(f"useradd --create-home --home-dir {HOME} --uid {USER} user", user=0)
        (root / "etc" / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n")
        if args.pip_config:
            shutil.copy(args.pip_config, root / "etc" / "pip.conf")

    def run(
        self, command: str, user: int = USER, check: bool = False, capture_output: bool = False
    ) -> subprocess.CompletedProcess:
        """Run a command of the shell there, in the user's home and with no other environment."""
        mounts = []
        for source in (*map(Path, ("/proc", "/sys", "/dev")), *self.binds):
            there = self.root / str(source.resolve()).lstrip("/")
            there.mkdir(parents=True, exist_ok=True)
            mounts.append(f"mount --rbind {shlex.quote(str(source))} {shlex.quote(str(there))}")
        home = HOME if user else "/root"
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        words = ["chroot", f"--userspec={user}:{user}", str(self.root), "env", "-i"]
        words += [
            f"HOME={home}",
            f"PATH={path}",
            "LANG=C.UTF-8",
            "sh",
            "-c",
            f"cd {home} && {command}",
        ]
        script = " && ".join([*mounts, f"exec {shlex.join(words)}"])
        command = ["unshare", "--mount", "sh", "-c", script]
        return subprocess.run(command, check=check, capture_output=capture_output, text=True)


def record(system: System, args: argparse.Namespace) -> None:
    """Clone, train and test there, and add a row to the table."""
    checkout = system.root / HOME.lstrip("/") / "rank0rl"
    shutil.rmtree(checkout, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--no-local", ROOT, checkout], check=True)
    variables = ""
    if args.packages != "locked":
        chosen = checkout.with_name("chosen.txt")  # outside: tests call make in other folders too
        chosen.write_text(oldest() if args.packages == "oldest" else "")
        variables = f" CONSTRAINTS={HOME}/chosen.txt"
    system.run(f"chown -R user:user {HOME} && rm -rf {HOME}/.cache", user=0, check=True)
    row = {"system": described(system), "packages": args.packages}
    begun = time.monotonic()
    trained = system.run(f"cd rank0rl && {TRAIN}{variables} 2>&1", capture_output=True)
    row["train_s"] = f"{time.monotonic() - begun:.0f}"
    found = re.search(r"^weights\s+(\w{16})", trained.stdout, re.M)
    row["weights"] = found[1] if found else f"error {trained.returncode}"
    print(trained.stdout[-2000:], flush=True)
    if not args.no_tests:
        begun = time.monotonic()
        tested = system.run(f"cd rank0rl && make test{variables} 2>&1", capture_output=True)
        row["test_s"] = f"{time.monotonic() - begun:.0f}"
        ends = re.findall(r"^\d+ (?:passed|failed).*? in ", tested.stdout, re.M)
        row["tests"] = ends[-1].removesuffix(" in ") if ends else f"error {tested.returncode}"
        print(tested.stdout[-6000:], flush=True)
    installed = system.run("cd rank0rl && .venv/bin/pip freeze", capture_output=True).stdout
    versions = dict(line.split("==") for line in installed.splitlines() if "==" in line)
    row["versions"] = " ".join(f"{name} {versions.get(name, '-')}" for name in SHOWN)
    row["date"] = time.strftime("%Y-%m-%d")
    print(row)
    new = not TABLE.exists()
    with TABLE.open("a", newline="") as file:
        names = ("system", "packages", "weights", "train_s", "tests", "test_s", "versions", "date")
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def described(system: System) -> str:
    """Return the names and versions of a system, its Python and its C library."""
    code = "import platform as p; print('Python', p.python_version(), *p.libc_ver())"
    found = system.run(
        f'. /etc/os-release; echo "$PRETTY_NAME"; python3 -c "{code}"', capture_output=True
    )
    return ", ".join(found.stdout.split("\n")[:2])


def oldest() -> str:
    """Return constraints with the lower bounds of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    bounds = {}
    for requirement in (each for group in groups for each in group):
        name, _, version = requirement.partition(">=")
        bounds.setdefault(re.sub(r"\[.*?\]", "", name), version)
    return "".join(f"{name}=={version}\n" for name, version in bounds.items())


def carry_out(system: System) -> None:
    """Carry out the steps of Containerfile there, as far as they do not need a container."""
    (system.root / "src").mkdir(exist_ok=True)
    subprocess.run(
        f"git -C {shlex.quote(str(ROOT))} archive HEAD | tar -x -C {shlex.quote(str(system.root / 'src'))}",
        shell=True,
        check=True,
    )
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        step, _, command = line.partition(" ")
        if step == "RUN":
            print(line, flush=True)
            system.run(command, user=0, check=True)
    done = system.run(
        "/opt/rank0rl/bin/rank0rl train CartPole --nprocs 2 --total-steps 8192", capture_output=True
    )
    print(done.stdout[-600:], done.stderr[-600:])


if __name__ == "__main__":
    if os.getuid():
        raise SystemExit("error: mounts and chroot need root: try sudo")
    main()
