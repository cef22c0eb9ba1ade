"""Train PPO on CartPole, on two ranks, and look at what it has learned.

    python examples/01_train.py

Another number of ranks gives the same numbers, bit for bit.
"""

import rank0rl


def main() -> None:
    """Train, read the record, use the policy."""
    run = rank0rl.train("CartPole", nprocs=2, total_steps=40_000)

    record = run.progress  # a row for each iteration
    for steps, mean in zip(record["steps"], record["return_mean"], strict=True):
        print(f"{steps} steps: mean return {mean:.0f}")

    policy = rank0rl.load(run.folder)
    obs, _ = policy.make_env().reset(seed=0)
    print("the action for a first observation:", policy(obs, deterministic=True))

    episodes = rank0rl.evaluate(policy, episodes=10, deterministic=True)
    print(f"mean return of 10 new episodes: {episodes['return'].mean():.0f}")


if __name__ == "__main__":  # ranks import this file
    main()
