"""Ports of a job: none is open to the network if all its ranks are on this host."""

import json
import shutil
import socket
import sys

import pytest
from helpers.ranks import HERE, run

from rank0rl.launch.mpiexec import stay_on_loopback


@pytest.mark.parametrize(
    ("env", "alone"),
    [
        ({}, False),
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2"}, True),
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "4"}, False),
        ({"PMI_SIZE": "2"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "2"}, False),
    ],
)
def test_only_ranks_that_are_all_here_do_without_the_network(env, alone):
    of_rank = {**env, "FI_PROVIDER": "mine"}
    stay_on_loopback(of_rank)
    assert of_rank["FI_PROVIDER"] == "mine"  # the user has set it
    assert of_rank.get("UCX_TLS") == ("^tcp" if alone else None)


def test_ports_that_are_the_ranks_own_stay_open():
    """Even if programs that the rank starts may have them, as the ports that MPI has opened."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.set_inheritable(True)
        stay_on_loopback({"PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"})
        socket.create_connection(server.getsockname()).close()


SCRIPT = """
import json, os, subprocess, sys, rank0rl
from helpers import jobs
if rank0rl.mpi_fork(2) == "parent": sys.exit()
from rank0rl.launch import job
from rank0rl.mpi import comm
comm.allgather_obj(comm.rank, "all are connected")
if comm.rank == 0:
    of_job = jobs.processes(f"{job.FOLDER}={os.environ[job.FOLDER]}")
    found = subprocess.check_output(["ss", "-Hltnp"], text=True).splitlines()
    mine = [line for line in found if any(f"pid={process_id}," in line for process_id in of_job)]
    print(json.dumps([line.split()[3] for line in mine if '"prterun"' not in line]))
    print(sum(f"pid={os.getpid()}," in line for line in mine))
comm.barrier()
"""


@pytest.mark.skipif(not shutil.which("ss"), reason="needs ss")
@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
def test_a_job_of_this_host_listens_on_loopback_alone(tmp_path, netmod):
    """But for prterun, Open MPI's launcher, which knows no setting for it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {"PYTHONPATH": f"{HERE.parent}:{HERE}", "MPIR_CVAR_CH4_NETMOD": netmod}
    done = run([sys.executable, str(tmp_path / "script.py")], env=env)
    assert done.returncode == 0, done.stderr
    addresses, of_rank = done.stdout.splitlines()
    local = [at for at in json.loads(addresses) if at.startswith("127.") or "%lo:" in at]
    assert local == json.loads(addresses)
    assert int(of_rank) == 0
