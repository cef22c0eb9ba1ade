"""Train on CartPole and draw what its console says, as docs/console.svg: python docs/make/console.py."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from theme import DOCS, save_diagram, write

COMMAND = "python train.py CartPole --nprocs 2 --total-steps 500000 --run-dir runs/CartPole"
ROOT = DOCS.parent
LINE, MARGIN = 19, 16  # pixels


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = [str(ROOT / "train.py"), *COMMAND.split()[2:]]
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, check=True, stdout=subprocess.PIPE, text=True
        )
    said = done.stdout.replace(f"{ROOT}/", "").splitlines()
    lines = [write(MARGIN, MARGIN + 14, f"$ {COMMAND}", "mono bold")]
    lines += [
        write(MARGIN, MARGIN + 14 + LINE * i, line, "mono") for i, line in enumerate(said, start=1)
    ]
    height = 2 * MARGIN + LINE * len(lines)
    save_diagram("console", height, "\n".join([COMMAND, *said]), *lines, width=760)


if __name__ == "__main__":
    main()
