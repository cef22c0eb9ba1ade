"""Network switch with long cables, for hosts.py: python benchmarks/relay.py DELAY_S INTERFACE...

Every frame reaches its host, or all others, DELAY_S after it was sent. This is for kernels whose traffic control can
limit a rate but cannot delay. Frames keep the header that tells what the kernel has put off, checksums and
segments, so a frame of 64 KB passes as one.
"""

import argparse
import contextlib
import os
import select
import socket
import time
from collections import deque

_ALL = 3  # ETH_P_ALL
_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23
_SEND_ROOM, _RECEIVE_ROOM = 32, 33  # SO_SNDBUFFORCE, SO_RCVBUFFORCE
_ROOM = 1 << 26  # bytes: frames are lost in a queue of the link, never here
_HEADER = 10  # bytes before a frame


def main(delay_s: float, names: list[str]) -> None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # no cable waits for a core
    ports = [_port(name) for name in names]
    at: dict[bytes, socket.socket] = {}  # a host's hardware address -> its port
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    print("up", flush=True)
    while True:
        rest_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for port in select.select(ports, [], [], rest_s)[0]:
            with contextlib.suppress(OSError):  # no more are there, or its host is gone
                while True:
                    frame = port.recv(1 << 17)
                    under_way.append((time.monotonic() + delay_s, port, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, port, frame = under_way.popleft()
            to, sender = frame[_HEADER:][:6], frame[_HEADER:][6:12]
            at[sender] = port
            for other in [at[to]] if to in at else ports:
                if other is not port:
                    with contextlib.suppress(OSError):  # its queue is full: lost, as in a switch
                        other.send(frame)


def _port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
    port.setsockopt(_PACKET, _VNET_HDR, 1)
    port.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, _SEND_ROOM, _ROOM)
    port.setsockopt(socket.SOL_SOCKET, _RECEIVE_ROOM, _ROOM)
    port.setblocking(False)
    port.bind((name, _ALL))
    return port


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("delay_s", type=float)
    parser.add_argument("interfaces", nargs="*")
    args = parser.parse_args()
    main(args.delay_s, args.interfaces)
