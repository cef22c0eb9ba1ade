"""One run on several machines: check the hosts first, then train on all of them.

    python examples/09_several_machines.py                       # this host alone, to try it
    python examples/09_several_machines.py --hosts a:8,b:8       # 8 ranks on a, 8 on b, over ssh

Type it on the first host. docs/several-machines.md says what the other hosts need.
"""

import argparse
import socket
import subprocess
import sys

import rank0rl


def main() -> None:
    """Run the doctor, then train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", default=f"{socket.gethostname()}:2", help="such as a:8,b:8")
    hosts = parser.parse_args().hosts
    doctor = [sys.executable, "-m", "rank0rl", "doctor", "--hosts", hosts]
    subprocess.run(doctor, check=True)  # it says what is missing, and then this raises an error
    rank0rl.train("CartPole", hosts=hosts, num_envs=32, total_steps=20_000)


if __name__ == "__main__":
    main()
