"""A script that `doctor` starts on another host: it describes that host, then tells its time on request."""

from __future__ import annotations

import json
import sys
import time

from rank0rl.launch import hosts
from rank0rl.run import machine


def main() -> None:
    """Print a line about this host, then answer each line of stdin with the time."""
    print(json.dumps({**machine.describe(), "free_mb": hosts.free_space()}), flush=True)
    for _ in sys.stdin:
        print(time.time(), flush=True)


if __name__ == "__main__":
    main()
