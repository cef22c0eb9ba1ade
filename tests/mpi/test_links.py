"""Links between hosts that are namespaces: they have the rate and the delay that they are given."""

import json
import subprocess
import sys

import pytest
from on_ranks import run

from benchmarks import hosts as namespaces

reason = namespaces.missing(limited=True)
SENT = 2_000_000
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
connect_s, sent_s = [], []
for _ in range(3):
    start = time.perf_counter()
    connection = socket.create_connection(("two", 5000))
    connect_s.append(time.perf_counter() - start)
    for _ in range(2):  # TCP has to find out first what the link carries
        start = time.perf_counter()
        connection.sendall(bytes({SENT}))
        connection.recv(1)
        sent_s.append(time.perf_counter() - start)
print(json.dumps([min(connect_s), min(sent_s)]))
"""


@pytest.mark.skipif(bool(reason), reason=reason)
@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_a_link_has_its_rate_and_its_delay(delay_s, tmp_path):
    """Never faster than it was said to be; slower where the machine is busy."""
    limits = {"rate_mbit": 100, "delay_s": delay_s, "slow_start": False}
    with namespaces.hosts(tmp_path, "one", "two", **limits) as (one, two):
        taking = two.on([sys.executable, "-c", TAKE])
        with subprocess.Popen(taking, stdout=subprocess.PIPE) as taker:
            taker.stdout.readline()
            done = run(one.on([sys.executable, "-c", SEND]))
            taker.kill()
    round_trip_s, sent_s = json.loads(done.stdout)
    alone_s = SENT * 8 / 100e6
    assert 2 * delay_s < round_trip_s < 2 * delay_s + 0.02
    assert 0.98 * alone_s < sent_s - 2 * delay_s < 1.5 * alone_s  # a burst of 72 kB goes at once
