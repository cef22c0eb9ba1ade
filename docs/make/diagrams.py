"""Draw docs/loop.svg, fragments.svg and simulator.svg: python docs/make/diagrams.py."""

from __future__ import annotations

from theme import arrow, box, save_diagram, write

from rank0rl.envs.block import envs_of

# What screen readers say.
LOOP = (
    "One iteration on three ranks. Every rank collects steps of its own envs and processes them "
    "to rows. The rows of all ranks are gathered on rank 0 in order of fragment ids. Rank 0 "
    "updates while the other ranks sleep. The new weights are broadcast to all ranks."
)
FRAGMENTS = (
    "What one env collects in one iteration is a fragment; its fragment id is the env's index. "
    "Six envs are spread over 1, 2 or 3 ranks. The batch has the rows of all six fragments in "
    "order of fragment ids, so it is the same batch each time, bit for bit."
)
SIMULATOR = (
    "Two ranks, each with a simulator that runs on three processes. The policy acts on the first process of "
    "each group. All three compute the step together and exchange data in their own communicator. "
    "Rank 0 learns from the rows of both."
)


def main() -> None:
    loop()
    fragments()
    simulator()


def loop() -> None:
    """Draw one iteration on three ranks."""
    x, width, rows = (108, 242, 376), 120, (44, 100, 168, 236, 304)
    mid = [left + width / 2 for left in x]
    made = []
    for rank, left in enumerate(x):
        made.append(write(mid[rank], 28, f"rank {rank}", "middle bold"))
        mine = envs_of(rank, len(x), 8)
        made.append(box(left, rows[0], width, 36, f"envs {', '.join(map(str, mine))}", "c0"))
        made.append(arrow((mid[rank], rows[0] + 36), (mid[rank], rows[1])))
        made.append(box(left, rows[1], width, 36, "rows", "c0"))
    for rank, y in ((1, rows[2] + 12), (2, rows[2] + 24)):
        made.append(arrow((mid[rank], rows[1] + 36), (mid[rank], y), (x[0] + width, y)))
    made.append(arrow((mid[0], rows[1] + 36), (mid[0], rows[2])))
    made.append(box(x[0], rows[2], width, 36, "batch", "c1"))
    made.append(write(mid[1] + 10, rows[2] + 46, "in order of fragment ids", "small muted"))
    made.append(arrow((mid[0], rows[2] + 36), (mid[0], rows[3])))
    made.append(box(x[0], rows[3], width, 36, "update", "c1"))
    made += [box(left, rows[3], width, 36, "sleep", "idle") for left in x[1:]]
    made.append(arrow((mid[0], rows[3] + 36), (mid[0], rows[4])))
    made += [box(left, rows[4], width, 36, "new weights", "c2") for left in x]
    below = rows[4] + 36
    made += [
        arrow((mid[0], below), (mid[0], below + 18), (to, below + 18), (to, below))
        for to in mid[1:]
    ]
    end = x[2] + width
    low, high = rows[4] + 18, rows[0] + 18
    made.append(arrow((end, low), (end + 24, low), (end + 24, high), (end, high)))
    made.append(
        f'<g transform="translate({end + 44} {rows[2] + 18}) rotate(-90)">'
        f"{write(0, 0, 'next iteration', 'middle small muted')}</g>\n"
    )
    phases = ("collect", "process", "gather", "update", "broadcast")
    made += [write(14, y + 23, phase, "bold") for phase, y in zip(phases, rows, strict=True)]
    save_diagram("loop", 372, LOOP, *made)


def fragments() -> None:
    """Draw how 1, 2 and 3 ranks make the same batch of 6 envs."""
    size, gap, left = 44, 6, 88
    made = [write(14, 30, "Env 2 in one iteration:")]
    steps = [f"step {i}" for i in (1, 2, 3)] + ["...", "step T"]
    edges = (14, 82, 150, 218, 262)
    for at, step in zip(edges, steps, strict=True):
        made.append(box(at, 42, 44 if step == "..." else 68, 32, step, "c2"))
    made.append(write(346, 54, "= one fragment"))
    made.append(write(346, 73, "fragment id 2, T steps", "muted"))
    y = 92
    for nworkers in (1, 2, 3):
        made.append(write(14, y + 48, f"{nworkers} rank{'s' * (nworkers > 1)}", "bold"))
        at = left
        for rank in range(nworkers):
            mine = envs_of(rank, nworkers, 6)
            width = len(mine) * (size + gap) + gap
            made.append(box(at, y + 4, width, size + 32, "", "idle"))
            made.append(write(at + 8, y + 21, f"rank {rank}", "small muted"))
            made += [chip(at + gap + i * (size + gap), y + 30, env) for i, env in enumerate(mine)]
            at += width + 18
        y += 92
    made.append(arrow((left + 6 * (size + gap) / 2, y), (left + 6 * (size + gap) / 2, y + 30)))
    made.append(write(left + 172, y + 20, "gather, in order of fragment ids", "muted"))
    y += 38
    made.append(write(14, y + 28, "batch", "bold"))
    made += [chip(left + gap + env * (size + gap), y, env) for env in range(6)]
    made.append(write(left + 318, y + 20, "always the same,"))
    made.append(write(left + 318, y + 39, "bit for bit"))
    save_diagram("fragments", y + size + 20, FRAGMENTS, *made)


def simulator() -> None:
    """Draw two ranks with --ranks-per-env 3."""
    made = []
    for rank, left in enumerate((106, 338)):
        first = left + 48
        made.append(write(left + 101, 30, f"rank {rank}", "middle bold"))
        made.append(box(left, 42, 96, 36, "policy", "c0"))
        made.append(arrow((first, 78), (first, 128)))
        made.append(write(first + 10, 108, "action", "small muted"))
        made.append(box(left - 6, 120, 214, 92, "", "idle"))
        for i in range(3):
            made.append(box(left + i * 69, 130, 64, 36, f"{3 * rank + i}", "c2"))
        made.append(write(left + 101, 190, "place.comm: one simulation", "middle small muted"))
        made.append(arrow((first, 212), (first, 244)))
        made.append(box(left, 246, 96, 36, "rows", "c0"))
    made.append(arrow((386, 282), (386, 324), (202, 324)))
    made.append(arrow((154, 282), (154, 304)))
    made.append(box(106, 306, 96, 36, "update", "c1"))
    for y, words in ((65, "act"), (153, "step"), (269, "process"), (329, "learn")):
        made.append(write(14, y, words, "bold"))
    made.append(write(14, 173, "processes", "small muted"))
    save_diagram("simulator", 360, SIMULATOR, *made)


def chip(x: float, y: float, env: int) -> str:
    """Return the box of a fragment, in its env's color."""
    return box(x, y, 44, 44, str(env), f"c{env}")


if __name__ == "__main__":
    main()
