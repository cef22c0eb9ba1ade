"""Train a reference agent: python train.py Walker2d --nprocs 8."""

from pathlib import Path

from rank0rl.cli import main

if __name__ == "__main__":
    main(configs=Path(__file__).parent / "configs")
