"""A small batch script on n ranks: 08_script.py after eight edits.

    python examples/08_script_ranks.py --nprocs 2

A comment marks each edit with its number.
"""

import argparse

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import rank0rl  # edit 2


def collect(env, net, steps, device, gamma=0.99):
    """Play whole episodes, at least `steps` steps. Return their rows, and the sum of each one's rewards."""
    obs, act, ret, totals = [], [], [], []
    while len(obs) < steps:
        now, _ = env.reset()
        rew, over = [], False
        while not over:
            with torch.no_grad():
                chances = net(torch.as_tensor(now, device=device)).softmax(-1)
            obs.append(now)
            act.append(torch.multinomial(chances, 1).item())
            now, r, terminated, truncated, _ = env.step(act[-1])
            rew.append(r)
            over = terminated or truncated
        totals.append(sum(rew))
        for t in reversed(range(len(rew) - 1)):
            rew[t] += gamma * rew[t + 1]
        ret += rew
    return {"obs": np.array(obs), "act": np.array(act), "ret": np.array(ret), "totals": totals}


def update(net, adam, batch, device):
    """Make one step along the policy gradient, with the mean return as baseline."""
    obs, act, ret = (torch.as_tensor(batch[k], device=device) for k in ("obs", "act", "ret"))
    adv = (ret - ret.mean()) / (ret.std() + 1e-8)  # 1e-8: all may be equal
    logp = torch.distributions.Categorical(logits=net(obs)).log_prob(act)
    adam.zero_grad()
    (-(logp * adv).mean()).backward()
    adam.step()


def main():
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000, help="steps of a batch")
    parser.add_argument("--nprocs", type=int, default=1)
    args = parser.parse_args()
    if rank0rl.mpi_fork(args.nprocs) == "parent":  # edit 3
        raise SystemExit
    device = rank0rl.tf_config  # edit 1
    rank0rl.set_global_seeds(args.seed)  # edit 4
    env = gym.make("CartPole-v1")
    env.reset(seed=int(torch.randint(2**31, ())))  # edit 4
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)
    adam = torch.optim.Adam(net.parameters(), lr=1e-2)
    rank0rl.print0("training on", device)  # edit 5
    rank0rl.rank0_bcast_wts(net)  # edit 8: before the first rollout too

    for iteration in range(args.iterations):
        batch = collect(env, net, args.steps // rank0rl.nworkers, device)
        batch = rank0rl.rank0_accum_batches(batch)  # edit 6
        if rank0rl.rank == 0:  # edit 7
            update(net, adam, batch, device)
            print(f"iteration {iteration}  return {np.mean(batch['totals']):.1f}", flush=True)
        rank0rl.rank0_bcast_wts(net)  # edit 8


if __name__ == "__main__":
    main()
