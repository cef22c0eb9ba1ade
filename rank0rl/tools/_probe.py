"""What `doctor` starts on another host: it tells what it finds there, and then the time, as often as asked."""

from __future__ import annotations

import json
import sys
import time

from rank0rl.run import provenance


def main() -> None:
    """Answer each line of stdin with the time, after a first line about this host."""
    print(json.dumps(provenance.machine()), flush=True)
    for _ in sys.stdin:
        print(time.time(), flush=True)


if __name__ == "__main__":
    main()
