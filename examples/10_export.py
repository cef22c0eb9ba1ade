"""A policy for elsewhere: train, evaluate, export to ONNX, and run it without rank0rl and torch.

    python examples/10_export.py

It needs: pip install -e ".[onnx]"
"""

import subprocess
import sys

import gymnasium as gym
import numpy as np
import onnxruntime

import rank0rl


def main() -> None:
    """Train, evaluate, export, and play an episode."""
    run = rank0rl.train("CartPole", total_steps=40_000)
    policy = rank0rl.load(run.folder)
    returns = rank0rl.evaluate(policy, episodes=20, deterministic=True)["return"]
    print(f"mean return of 20 episodes: {returns.mean():.0f}")

    file = run.folder / "policy.onnx"
    export = ["-m", "rank0rl", "export", str(run.folder), "--out", str(file)]
    subprocess.run([sys.executable, *export], check=True)
    play(str(file))


def play(file: str) -> None:
    """Play one episode with ONNX Runtime alone."""
    policy = onnxruntime.InferenceSession(file)
    env = gym.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    total, over = 0.0, False
    while not over:
        batch = np.asarray(obs[None], "float32")  # the first axis is the batch: one observation
        [act] = policy.run(None, {"obs": batch})
        obs, rew, terminated, truncated, _ = env.step(int(act[0]))
        total, over = total + float(rew), terminated or truncated
    print(f"return with ONNX Runtime: {total:.0f}")


if __name__ == "__main__":
    main()
