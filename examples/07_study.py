"""A study: several settings and seeds on all cores, and one table of them.

    python examples/07_study.py

The same from the command line:

    python -m rank0rl study CartPole --algo reinforce --grid lr=3e-3,3e-2 --seeds 0:2 --total-steps 20000
"""

import subprocess
import sys

STUDY = "CartPole --algo reinforce --grid lr=3e-3,3e-2 --seeds 0:2 --total-steps 20000"


if __name__ == "__main__":
    # Its folder is named at the end. Run this again, and nothing is trained twice.
    subprocess.run([sys.executable, "-m", "rank0rl", "study", *STUDY.split()], check=True)
