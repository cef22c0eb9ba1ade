"""Hosts to start ranks on, for links.py and tests: namespaces of this machine, each with sshd and a name.

A host is a process tree with its own network, process ids, name, $TMPDIR, /dev/shm and so on. It shares
the project's folder and the virtual environment with this machine. Commands that come by ssh have their own
folder for temporary files too, because Open MPI names its files after process ids. Nothing has to be cleaned
up: all of it belongs to one process per host, and goes with that process.

Links between hosts are as fast as the machine, or have the rate and the delay that they are given.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

BURST = 72 * 1024
"""Bytes that a limited link lets through at once: a frame of 64 KB of segments, as the kernel hands it over."""
_RELAY = str(Path(__file__).with_name("relay.py"))
_NEEDS = ("ip", "ssh", "ssh-keygen", "/usr/sbin/sshd", "unshare", "nsenter", "setpriv")
_SWITCH = "ip link add switch type bridge; ip link set switch up && echo up && exec sleep infinity"
# Defaults of Linux, whatever the settings of this machine.
_TCP = """
ip route change 10.77.0.0/24 dev eth0 congctl cubic
echo 4096 131072 6291456 > /proc/sys/net/ipv4/tcp_rmem
echo 4096 16384 4194304 > /proc/sys/net/ipv4/tcp_wmem
echo {slow_start} > /proc/sys/net/ipv4/tcp_slow_start_after_idle
"""
_HOST = """
set -e
hostname {name}
mount -t tmpfs local {local}
mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run
mkdir /run/sshd
mount --bind {folder}/hosts /etc/hosts
ip link set lo up
echo up
read plugged
ip link set eth0 up
ip address add {address}/24 dev eth0
{link}
exec /usr/sbin/sshd -D -f {folder}/sshd_config
"""
_SSHD = """
ListenAddress 0.0.0.0
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
SetEnv TMPDIR={folder}/local
"""
_SSH = """
IdentityFile {folder}/key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile none
"""


def missing(limited: bool = False) -> str:
    """Return why such hosts, or hosts with limited links, cannot be made here; "" if they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "namespaces as hosts need root"
    absent = [name for name in (*_NEEDS, *["tc"] * limited) if not shutil.which(name)]
    if absent:
        return f"namespaces as hosts need {', '.join(absent)}"
    may = subprocess.run(["unshare", "--net", "--pid", "--fork", "--uts", "true"], check=False)
    if may.returncode:
        return "namespaces may not be made here"
    limit = ["unshare", "--net", "sh", "-c", _limit("lo", 1)] if limited else ["true"]
    may = subprocess.run(limit, capture_output=True, check=False)
    return "no rate can be given to a link here" if may.returncode else ""


@dataclass(frozen=True)
class Host:
    """One host."""

    name: str
    process: int
    """Id of its first process on this machine. All other processes of the host end with it."""
    env: dict[str, str]
    """Environment variables of a command that runs there and reaches the other hosts."""

    def on(self, command: list[str]) -> list[str]:
        """Return a command that runs this command on the host."""
        enter = ["nsenter", "--target", str(self.process), "--net", "--pid", "--uts", "--ipc"]
        return [*enter, "--mount", "--wd=.", *command]

    def path(self, path: Path) -> Path:
        """Return the path by which this machine sees a file of the host's own."""
        return Path(f"/proc/{self.process}/root{path}")

    def ranks(self) -> list[str]:
        """Return the command lines of the Python processes that run on the host."""
        found = subprocess.run(self.on(["ps", "-eo", "args"]), capture_output=True, check=True)
        lines = found.stdout.decode().splitlines()  # in brackets: a process that ends or has ended
        return [line for line in lines if "python" in line and not line.startswith("[")]

    def left(self) -> list[str]:
        """Return the command lines of what runs there besides sshd, and the files in the host's own folders."""
        found = subprocess.run(self.on(["ps", "-eo", "args="]), capture_output=True, check=True)
        lines = found.stdout.decode().splitlines()
        own = self.path(Path("/dev/shm")), self.path(Path(self.env["TMPDIR"]))
        files = [str(file) for folder in own for file in folder.iterdir()]
        return [line for line in lines if not line.startswith(("[", "sshd", "ps -eo"))] + files

    def lives(self) -> bool:
        """Return True if the host has not died."""
        return Path(f"/proc/{self.process}").exists()

    def dies(self) -> None:
        """Kill the host, as when its power fails. But the kernel closes its connections."""
        os.kill(self.process, signal.SIGKILL)

    def falls_silent(self) -> None:
        """Cut the host off, as when its cable is pulled: nothing is closed, and nothing arrives any more."""
        subprocess.run(self.on(["ip", "link", "set", "eth0", "down"]), check=True)


@contextmanager
def hosts(
    folder: Path,
    *names: str,
    rate_mbit: float | None = None,
    delay_s: float = 0.0,
    slow_start: bool = True,
) -> Iterator[list[Host]]:
    """Make hosts with these names and the addresses 10.77.0.1 and on, beside one switch.

    Each host has a `folder / "local"` of its own.

    Args:
        folder: an empty folder for keys, settings and so on.
        names: names of the hosts.
        rate_mbit: rate of each host's link, each way, in Mbit/s, with headers. None: no limit.
        delay_s: delay from one host to another, one way. A round trip takes twice as long.
        slow_start: True if TCP starts slowly again after idle time, on links with a rate or a delay.
    """
    _keys(folder, names)
    (folder / "local").mkdir()
    env = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "TMPDIR": str(folder / "local"),
    }
    with ExitStack() as stack:
        switch = stack.enter_context(_namespaces(_SWITCH, "--net"))
        within = ["nsenter", "--target", str(switch.pid), "--net"]
        link = _limit("eth0", rate_mbit) + _TCP.format(slow_start=int(slow_start))
        made = []
        for i, name in enumerate(names, 1):
            script = _HOST.format(
                name=name,
                folder=folder,
                local=folder / "local",
                address=f"10.77.0.{i}",
                link=link if rate_mbit or delay_s else "",
            )
            kinds = ("--net", "--pid", "--mount-proc", "--uts", "--ipc", "--mount")
            outer = stack.enter_context(_namespaces(script, *kinds))
            first = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0]
            port = f"ip link add port{i} type veth peer name eth0 netns {first}"
            port += f" && ip link set port{i} {'' if delay_s else 'master switch'} up"
            port += f" && {_limit(f'port{i}', rate_mbit)}"
            subprocess.run([*within, "sh", "-c", port], check=True)
            assert outer.stdin
            outer.stdin.write(b"plugged\n")
            outer.stdin.flush()
            made.append(Host(name, int(first), env))
        if delay_s:
            ports = [f"port{i}" for i in range(1, len(names) + 1)]
            relay = [sys.executable, _RELAY, str(delay_s), *ports]
            stack.enter_context(_started([*within, *relay]))
        for host in made:
            _wait_for_sshd(made[0], host)
        yield made


def _limit(device: str, rate_mbit: float | None) -> str:
    """Return a command that limits what a device sends, with the queue of a switch."""
    if rate_mbit is None:
        return "true"
    return f"tc qdisc add dev {device} root tbf rate {rate_mbit}mbit burst {BURST} latency 50ms"


def _keys(folder: Path, names: tuple[str, ...]) -> None:
    """Write what ssh needs to go from each host to every other one, and the hosts' names, to one folder."""
    for key in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    public = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"* {public}")
    listed = "".join(f"10.77.0.{i} {name}\n" for i, name in enumerate(names, 1))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{listed}")
    (folder / "sshd_config").write_text(_SSHD.format(folder=folder))
    (folder / "ssh_config").write_text(_SSH.format(folder=folder))
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    ssh.chmod(0o755)


@contextmanager
def _namespaces(script: str, *kinds: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a shell in namespaces of its own; yield it once it has printed "up"."""
    unshare = ["unshare", *kinds, *(["--fork", "--kill-child"] if "--pid" in kinds else [])]
    with _started([*unshare, "sh", "-c", script]) as process:
        yield process


@contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; yield it once it has printed "up". It ends with this process at the latest."""
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def _wait_for_sshd(from_host: Host, host: Host) -> None:
    command = from_host.on(["ssh", "-o", "ConnectTimeout=1", host.name, "true"])
    end = time.monotonic() + 10
    while subprocess.run(command, env={**os.environ, **from_host.env}, check=False).returncode:
        assert time.monotonic() < end, f"no ssh to {host.name}"
        time.sleep(0.1)
