"""Measure the rate and the delay of the links that links.py uses: python benchmarks/link_rate.py --rate 100 --delay 10.

It needs root. A link should never be faster than it was asked to be; it is slower where the machine is busy. A
burst of 72 kB goes at once, so that a message of 2 MB at 100 Mbit/s may take 2 % less than 160 ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from hosts import hosts, missing
from table import show

SENT = 2_000_000  # bytes
TAKE = f"""
import socket
with socket.create_server(("", 5000)) as server:
    print("up", flush=True)
    while True:
        connection, _ = server.accept()
        while connection.recv({SENT}, socket.MSG_WAITALL):
            connection.sendall(b"x")
"""
SEND = f"""
import json, socket, time
round_trip_ms, sent_ms = [], []
for _ in range(3):
    start = time.perf_counter()
    connection = socket.create_connection(("two", 5000))
    round_trip_ms.append(1e3 * (time.perf_counter() - start))
    connection.sendall(bytes({SENT}))  # TCP has to find out first what the link carries
    connection.recv(1)
    start = time.perf_counter()
    connection.sendall(bytes({SENT}))
    connection.recv(1)
    sent_ms.append(1e3 * (time.perf_counter() - start))
print(json.dumps([round_trip_ms, sent_ms]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=100, help="rate of the link, Mbit/s")
    parser.add_argument("--delay", type=float, default=0, help="delay one way, ms")
    args = parser.parse_args()
    if reason := missing(limited=True):
        sys.exit(reason)
    limits = {"rate_mbit": args.rate, "delay_s": args.delay / 1e3, "slow_start": False}
    with (
        tempfile.TemporaryDirectory() as folder,
        hosts(Path(folder), "one", "two", **limits) as (one, two),
    ):
        taking = two.on([sys.executable, "-c", TAKE])
        with subprocess.Popen(taking, stdout=subprocess.PIPE) as taker:
            assert taker.stdout is not None
            taker.stdout.readline()
            sending = one.on([sys.executable, "-c", SEND])
            done = subprocess.run(sending, capture_output=True, text=True, check=True)
            taker.kill()
    round_trip_ms, sent_ms = json.loads(done.stdout)
    expected_ms = SENT * 8e-3 / args.rate
    figures = {
        f"round trip, ms; asked: {2 * args.delay:g}": round_trip_ms,
        f"{SENT / 1e6:g} MB without the delay, ms; asked: {expected_ms:g}": [
            ms - 2 * args.delay for ms in sent_ms
        ],
    }
    show(f"a link of {args.rate:g} Mbit/s and {args.delay:g} ms", figures)


if __name__ == "__main__":
    main()
