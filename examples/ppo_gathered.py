"""PPO in one file on n ranks, with gathered rows. Comments mark the eight edits to a serial script.

    python examples/ppo_gathered.py --env CartPole-v1 --nprocs 2
    python examples/ppo_gathered.py --env Walker2d-v5 --iterations 500 --nprocs 8

Each iteration collects a batch of steps, estimates advantages, gathers the rows to rank 0, and makes
some epochs of clipped gradient steps there. ppo_averaged.py is the same with averaged gradients.
Source: Schulman et al. 2017, arXiv:1707.06347.
"""

import argparse
import sys
import time

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import rank0rl  # edit 2


def parse():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1", help="any with box or discrete actions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--steps-per-batch", type=int, default=2048)
    parser.add_argument("--minibatch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--lam", type=float, default=0.95)
    parser.add_argument("--clip-ratio", type=float, default=0.2)
    parser.add_argument("--nprocs", type=int, default=1)
    parser.add_argument("--gpu-pct", type=float, default=0.0, help="share of the GPU per rank")
    return parser.parse_args()


class Scale(nn.Module):
    """Mean and variance of all rows so far, as buffers, which are saved with the weights."""

    def __init__(self, n):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(n))
        self.register_buffer("var", torch.ones(n))

    def merge(self, x):
        """Add rows (N, n) to the statistics."""
        share = len(x) / (self.count + len(x))  # of the new rows
        delta = x.mean(0) - self.mean
        var = x.var(0, correction=0)
        self.var.copy_((1 - share) * self.var + share * var + share * (1 - share) * delta**2)
        self.mean.add_(share * delta)
        self.count.add_(len(x))

    def std(self):
        """Return standard deviations (n,), at least 1e-8: some inputs never change."""
        return self.var.sqrt().clamp(min=1e-8)


class ActorCritic(nn.Module):
    """Policy and value function: two networks, each with two layers of 64 units."""

    def __init__(self, env):
        super().__init__()
        (n_obs,) = env.observation_space.shape
        self.discrete = isinstance(env.action_space, gym.spaces.Discrete)
        if self.discrete:
            n_act, self.first = int(env.action_space.n), int(env.action_space.start)
        else:
            (n_act,) = env.action_space.shape
        self.obs, self.ret = Scale(n_obs), Scale(1)
        self.actor = network(n_obs, n_act, 0.01)  # 0.01: at first no action is preferred
        self.critic = network(n_obs, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(n_act))

    def scaled(self, obs):
        """Scale observations to mean 0 and standard deviation 1, and clip outliers to +-10."""
        return ((obs - self.obs.mean) / self.obs.std()).clamp(-10, 10)

    def policy(self, obs):
        """Return the distribution of actions for observations (N, n_obs) or (n_obs,)."""
        out = self.actor(self.scaled(obs))
        if self.discrete:
            return torch.distributions.Categorical(logits=out)
        normal = torch.distributions.Normal(out, self.log_std.exp().expand_as(out))
        return torch.distributions.Independent(normal, 1)

    def action(self, act):
        """Convert one action (n_act,) or () of the policy to what env.step takes."""
        return self.first + act.item() if self.discrete else act.cpu().numpy()

    def value(self, obs):
        """Return the expected discounted returns (N,) of observations (N, n_obs)."""
        return self.critic(self.scaled(obs))[:, 0] * self.ret.std() + self.ret.mean


def network(n_in, n_out, gain):
    """Return two tanh layers and a linear one, with orthogonal weights."""
    layers = [nn.Linear(n_in, 64), nn.Linear(64, 64), nn.Linear(64, n_out)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def make_env(name):
    """Make an environment that returns vectors and clips actions to its bounds."""
    env = gym.wrappers.FlattenObservation(gym.make(name))
    if not isinstance(env.action_space, gym.spaces.Discrete):
        env = gym.wrappers.ClipAction(env)
    return gym.wrappers.RecordEpisodeStatistics(env)


@torch.no_grad()
def collect(env, net, now, T, args):
    """Make T steps from the observation `now`. Return their rows and the next observation."""
    device = net.log_std.device
    obs, next_obs = np.zeros((2, T, *env.observation_space.shape), np.float32)
    rew = np.zeros(T, np.float32)
    terminated, end = np.zeros((2, T), bool)  # end: terminated or cut off
    act, returns = [], []
    for t in range(T):
        obs[t] = now
        act.append(net.policy(torch.as_tensor(obs[t], device=device)).sample())
        now, rew[t], terminated[t], truncated, info = env.step(net.action(act[t]))
        next_obs[t] = now
        end[t] = terminated[t] or truncated
        if end[t]:
            returns.append(info["episode"]["r"])
            now, _ = env.reset()
    seen, act = torch.as_tensor(obs, device=device), torch.stack(act)
    val = net.value(seen).cpu().numpy()
    # An episode that was cut off could have gone on: its end has a value. A terminal state has 0.
    next_val = net.value(torch.as_tensor(next_obs, device=device)).cpu().numpy() * ~terminated
    adv = gae(rew, val, next_val, end, args.gamma, args.lam)
    logp = net.policy(seen).log_prob(act)
    rows = {"obs": obs, "act": act.cpu().numpy(), "logp": logp.cpu().numpy()}
    return rows | {"adv": adv, "ret": adv + val, "returns": np.array(returns, np.float32)}, now


def gae(rew, val, next_val, end, gamma, lam):
    """Return generalized advantage estimates (T,). arXiv:1506.02438, eq. 16."""
    delta = rew + gamma * next_val - val
    adv, after = np.zeros_like(delta), 0.0
    for t in reversed(range(len(delta))):
        adv[t] = after = delta[t] + gamma * lam * after * (not end[t])
    return adv


def update(net, adam, batch, args):
    """Make epochs of minibatch gradient steps on the clipped objective and the value error."""
    device = net.log_std.device
    keys = ("obs", "act", "logp", "adv", "ret")
    obs, act, logp, adv, ret = (torch.as_tensor(batch[key], device=device) for key in keys)
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)  # 1e-8: all advantages may be equal
    net.ret.merge(ret[:, None])
    for _ in range(args.epochs):
        for i in torch.randperm(len(obs), device=device).split(args.minibatch_size):
            ratio = (net.policy(obs[i]).log_prob(act[i]) - logp[i]).exp()
            clipped = ratio.clamp(1 - args.clip_ratio, 1 + args.clip_ratio)
            gain = torch.min(ratio * adv[i], clipped * adv[i]).mean()
            error = ((net.value(obs[i]) - ret[i]) / net.ret.std()).square().mean()
            adam.zero_grad()
            (0.5 * error - gain).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            adam.step()
    net.obs.merge(obs)  # last, because logp was computed with the scales before


def main():
    """Train."""
    args = parse()
    if rank0rl.mpi_fork(args.nprocs, gpu_pct=args.gpu_pct) == "parent":  # edit 3
        sys.exit()
    device = rank0rl.tf_config  # edit 1
    torch.set_num_threads(1)  # more threads do not help networks this small
    torch.distributions.Distribution.set_default_validate_args(False)  # checks slow down sampling
    rank0rl.set_global_seeds(args.seed)  # edit 4
    env = make_env(args.env)
    now, _ = env.reset(seed=int(torch.randint(2**31, ())))  # edit 4: drawn on each rank
    net = ActorCritic(env).to(device)
    adam = torch.optim.Adam(net.parameters(), lr=args.lr, eps=1e-5)
    rank0rl.rank0_bcast_wts(net)  # edit 8: also before the first rollout
    steps = args.steps_per_batch // rank0rl.nworkers

    for iteration in range(args.iterations):
        start = time.perf_counter()
        adam.param_groups[0]["lr"] = args.lr * (1 - iteration / args.iterations)
        batch, now = collect(env, net, now, steps, args)
        batch = rank0rl.rank0_accum_batches(batch)  # edit 6
        if rank0rl.rank == 0:  # edit 7
            update(net, adam, batch, args)
        rank0rl.rank0_bcast_wts(net)  # edit 8
        ended = batch["returns"]
        rate = len(batch["obs"]) / (time.perf_counter() - start)
        mean = ended.mean() if len(ended) else np.nan
        text = f"iteration {iteration}  return {mean:.1f}  steps/s {rate:.0f}"
        rank0rl.print0(text, flush=True)  # edit 5


if __name__ == "__main__":
    main()
