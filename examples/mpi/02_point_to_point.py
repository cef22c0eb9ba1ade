"""Point to point: one rank sends, another one receives.

    mpiexec -n 9 python examples/mpi/02_point_to_point.py

Expected output, in any order:

    rank 0 sends 10000000 to rank 4
    rank 1 sends 'hello' to rank 8
    rank 4 received 10000000 from rank 0
    rank 8 received 'hello' from rank 1
    rank 0 was told by all: ['4 has 10000000', '8 has hello']
"""

from mpi4py import MPI

import rank0rl

comm = MPI.COMM_WORLD
rank = comm.Get_rank()
messages = {0: (4, 10_000_000), 1: (8, "hello")}  # sender -> receiver, message

if rank in messages:
    to, what = messages[rank]
    print(f"rank {rank} sends {what!r} to rank {to}")
    comm.send(what, dest=to)
got = []
for source, (to, _) in messages.items():
    if rank == to:
        what = comm.recv(source=source)
        print(f"rank {rank} received {what!r} from rank {source}")
        got.append(f"{rank} has {what}")

# rank0rl has no send and no receive: a rank would wait forever for a message that nobody sends.
# What some ranks have reaches rank 0 by a call that every rank makes. A rank with nothing to send
# passes {}.
d = rank0rl.rank0_accum_batches({"got": got} if got else {})
rank0rl.print0("rank 0 was told by all:", d["got"])
