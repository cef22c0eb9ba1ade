"""Draw the predicted speedup of evolution strategies beside the one that OpenAI measured.

    python -m rank0rl speedup HalfCheetah --algo es --episodes-per-batch 32 --nprocs 1 2 --iterations 3 \
        --predict 18 64 256 1024 1440 --nodes 80 --out STUDY
    python benchmarks/es_scaling.py STUDY

OpenAI's figures: 3D humanoid to a score of 6,000 in 657 minutes on 18 cores and in 10 on 1,440
(Salimans et al. 2017, arXiv:1703.03864, figure 1). Theirs are another task, other machines and a fixed
score; what can be compared is how the time falls with the number of cores.
"""

import argparse
import csv
from pathlib import Path

from rank0rl.tools import figures

OPENAI = {18: 657.0, 1440: 10.0}  # cores -> minutes
OUT = Path(__file__).parent.parent / "docs" / "es-scaling.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, help="folder that speedup --predict wrote")
    study = parser.parse_args().study
    with (study / "predicted.csv").open(newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["experiment"] != "same batch, one env a rank"
        ]
    with (study / "speedup.csv").open(newline="") as file:
        measured = list(csv.DictReader(file))
    with figures.style() as figure_class:
        figure = figure_class(figsize=(6.4, 4.0), layout="constrained")
        axis = figure.add_subplot()
        ranks = [int(row["nprocs"]) for row in rows]
        axis.plot(ranks, ranks, "--", color="C7", linewidth=1, label="linear")
        axis.plot(
            ranks, [float(row["speedup"]) for row in rows], label="predicted, batch of 1 env a rank"
        )
        axis.plot(
            [int(row["nprocs"]) for row in measured],
            [float(row["speedup"]) for row in measured],
            "o",
            label="measured",
        )
        first = min(OPENAI)
        axis.plot(
            [*OPENAI],
            [first * OPENAI[first] / minutes for minutes in OPENAI.values()],
            "s-",
            label="OpenAI 2017, with 18 cores as 18",
        )
        axis.set(xscale="log", yscale="log", xlabel="ranks, or cores", ylabel="speedup")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_formatter(figures.short_numbers())
        axis.legend()
        figure.savefig(OUT, dpi=120)
    print(OUT)


if __name__ == "__main__":
    main()
