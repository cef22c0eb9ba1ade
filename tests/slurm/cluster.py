"""A Slurm of two nodes that are namespaces of this machine, for tests: its daemons, and commands on the first node.

Nothing has to be cleaned up: every process and every mount belongs to a namespace, and goes with it.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import hosts as namespaces

NODES = "one", "two"
_NEEDS = ("slurmctld", "slurmd", "srun", "munged", "mungekey")
_CONF = """
ClusterName=test
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
# A job that is requeued begins after this time at the earliest.
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/local/spool
TmpFS={folder}/local
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
# Without a cgroup hierarchy of one's own, which a container may not have.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
InactiveLimit=0
KillWait=20
SchedulerParameters=batch_sched_delay=0,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs=8 State=UNKNOWN
PartitionName=low Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=graced Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
_NODE = """
set -e
mount -t tmpfs cgroup /sys/fs/cgroup
mkdir -p /run/munge {folder}/local/spool
{pmix}
munged --force --key-file {folder}/munge.key --pid-file /run/munge/munged.pid \
    --seed-file {folder}/local/munge.seed --log-file {folder}/local/munged.log
{controller}
exec slurmd -f {folder}/slurm.conf -N {name}
"""


def missing() -> str:
    """Return why there can be no such cluster here; "" if there can."""
    absent = [name for name in _NEEDS if not shutil.which(name)]
    if absent:
        return f"Slurm is not installed: {', '.join(absent)} (apt install slurm-wlm munge libpmix2)"
    return namespaces.missing()


class Cluster:
    """A Slurm, seen from its first node.

    Args:
        folder: its settings, logs and state.
        nodes: its nodes, the first one first.
    """

    def __init__(self, folder: Path, nodes: list[namespaces.Host]) -> None:
        self.folder, self.nodes = folder, nodes

    def run(self, *command: str, limit_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Run a command on the first node; return its exit code and its output."""
        return subprocess.run(
            self.nodes[0].on([*command]),
            env={**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def submit(self, script: Path, *switches: str) -> str:
        """Submit a batch script; return the id of its job."""
        done = self.run("sbatch", "--parsable", *switches, str(script))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job, such as JobState, ExitCode and Restarts."""
        done = self.run("scontrol", "show", "job", "--oneliner", job)
        return dict(re.findall(r"(\w+)=(\S*)", done.stdout.partition("\n")[0]))

    def wait(self, job: str, *states: str, limit_s: float = 240) -> dict[str, str]:
        """Wait until a job is in one of these states; return what Slurm knows of it."""
        end = time.monotonic() + limit_s
        while (known := self.job(job)).get("JobState") not in states:
            assert time.monotonic() < end, f"{known}\n{self.logs()}"
            time.sleep(0.2)
        return known

    def ranks(self) -> list[str]:
        """Return the command lines of the Python processes that run on the nodes."""
        return [line for node in self.nodes for line in node.ranks()]

    def logs(self) -> str:
        """Return what the daemons have written last."""
        return "\n".join(
            line for log in self.folder.glob("*.log") for line in log.read_text().splitlines()[-20:]
        )


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start a Slurm of two nodes; end it with all its processes.

    Args:
        folder: an empty folder.
    """
    (folder / "state").mkdir()
    pmix = _with_pmix(folder)
    subprocess.run(["mungekey", "--create", "--keyfile", str(folder / "munge.key")], check=True)
    conf = _CONF.format(first=NODES[0], folder=folder, nodes=",".join(NODES))
    (folder / "slurm.conf").write_text(conf)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    with namespaces.hosts(folder, *NODES) as nodes:
        for i, node in enumerate(nodes):
            controller = f"slurmctld -f {folder}/slurm.conf" if i == 0 else "true"
            script = _NODE.format(folder=folder, name=node.name, controller=controller, pmix=pmix)
            path = "/usr/sbin:/sbin:" + os.environ["PATH"]
            subprocess.run(
                node.on(["sh", "-c", script]), env={**os.environ, "PATH": path}, check=True
            )
        made = Cluster(folder, nodes)
        end = time.monotonic() + 60
        while made.run("sinfo", "-h", "-p", "low", "-o", "%T").stdout.split() != ["idle"]:
            assert time.monotonic() < end, made.run("sinfo").stdout + made.logs()
            time.sleep(0.2)
        yield made


def _with_pmix(folder: Path) -> str:
    """Return a command by which a node's Slurm finds PMIx: Debian has its name without a version in libpmix-dev only."""
    for libraries in Path("/usr/lib").glob("*/pmix2/lib"):
        shutil.copytree(libraries, folder / "pmix", symlinks=True)
        if not (folder / "pmix" / "libpmix.so").exists():
            (folder / "pmix" / "libpmix.so").symlink_to("libpmix.so.2")
        return f"mount --bind {folder}/pmix {libraries}"
    return "true"
