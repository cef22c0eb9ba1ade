"""Train an agent: python train.py Walker2d --nprocs 8. From anywhere else: python -m rank0rl train."""

from rank0rl.cli import main

if __name__ == "__main__":
    main()
