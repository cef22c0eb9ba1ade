"""PPO in one file on n ranks: cleanrl_style.py after the eight edits, each marked with its step.

    python examples/cleanrl_style_ranks.py --env-id CartPole-v1 --nprocs 2
    python examples/cleanrl_style_ranks.py --env-id Walker2d-v5 --total-timesteps 1000000 --nprocs 4

TensorBoard shows what it writes to runs/. Source: Schulman et al. 2017, arXiv:1707.06347.
"""

import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import rank0rl  # edit 2


@dataclass
class Args:
    """Options of the command line."""

    env_id: str = "CartPole-v1"  # any with box observations, and box or discrete actions
    seed: int = 1
    nprocs: int = 1  # a divisor of num_envs
    cuda: bool = False
    total_timesteps: int = 200_000
    learning_rate: float = 3e-4
    num_envs: int = 8
    num_steps: int = 256  # of each environment in a batch
    num_minibatches: int = 32
    update_epochs: int = 10
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5


def make_env(args):
    """Return a function that makes an environment with scaled observations and rewards."""

    def make():
        env = gym.wrappers.FlattenObservation(gym.make(args.env_id))
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if isinstance(env.action_space, gym.spaces.Box):
            env = gym.wrappers.ClipAction(env)
        env = gym.wrappers.NormalizeObservation(env)
        return gym.wrappers.NormalizeReward(env, gamma=args.gamma)

    return make


def network(n_in, n_out, std):
    """Return two tanh layers and a linear one, with orthogonal weights."""
    layers = [nn.Linear(n_in, 64), nn.Linear(64, 64), nn.Linear(64, n_out)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, std), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """Policy and value function."""

    def __init__(self, envs):
        super().__init__()
        space, n_obs = envs.single_action_space, envs.single_observation_space.shape[0]
        self.discrete = isinstance(space, gym.spaces.Discrete)
        n_act = int(space.n) if self.discrete else space.shape[0]
        self.critic = network(n_obs, 1, 1.0)
        self.actor = network(n_obs, n_act, 0.01)
        self.logstd = nn.Parameter(torch.zeros(n_act))

    def get_value(self, obs):
        """Return the expected discounted returns of observations."""
        return self.critic(obs).squeeze(-1)

    def get_action_and_value(self, obs, action=None):
        """Return actions, drawn unless they are given, their log-probability, entropy, and value."""
        out = self.actor(obs)
        if self.discrete:
            policy = torch.distributions.Categorical(logits=out)
        else:
            normal = torch.distributions.Normal(out, self.logstd.exp().expand_as(out))
            policy = torch.distributions.Independent(normal, 1)
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), policy.entropy(), self.get_value(obs)


if __name__ == "__main__":
    args = tyro.cli(Args)
    if rank0rl.mpi_fork(args.nprocs) == "parent":  # edit 3
        raise SystemExit
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    run_name = f"{args.env_id}__{args.seed}__{int(time.time())}"

    rank0rl.set_global_seeds(args.seed)  # edit 4
    torch.set_num_threads(1)  # more threads do not help networks this small
    torch.distributions.Distribution.set_default_validate_args(False)  # checks slow down sampling
    device = rank0rl.tf_config if args.cuda else torch.device("cpu")  # edit 1
    writer = SummaryWriter(f"runs/{run_name}") if rank0rl.rank == 0 else None  # edit 5

    make = [make_env(args)] * (args.num_envs // rank0rl.nworkers)
    envs = gym.vector.SyncVectorEnv(make, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    envs.set_attr("obs_rms", obs_rms := rank0rl.RunningNorm(envs.single_observation_space.shape))
    envs.set_attr("return_rms", return_rms := rank0rl.RunningNorm())
    agent = Agent(envs).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    shape = (args.num_steps, envs.num_envs)
    obs = torch.zeros((*shape, *envs.single_observation_space.shape), device=device)
    actions = torch.zeros((*shape, *envs.single_action_space.shape), device=device)
    logprobs, rewards, values, goes_on = torch.zeros((4, *shape), device=device)

    global_step, start_time = 0, time.time()
    next_obs, _ = envs.reset(seed=int(torch.randint(2**31, ())))  # edit 4
    for iteration in range(num_iterations):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / num_iterations)
        rank0rl.rank0_bcast_wts(agent)  # edit 8: before the first rollout, and after each update
        episodes = []

        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step] = torch.as_tensor(next_obs)
            with torch.no_grad():
                action, logprobs[step], _, values[step] = agent.get_action_and_value(obs[step])
            actions[step] = action
            next_obs, reward, terminated, truncated, infos = envs.step(action.cpu().numpy())
            rewards[step] = torch.as_tensor(reward)
            goes_on[step] = torch.as_tensor(~(terminated | truncated))
            for i in np.flatnonzero(terminated | truncated):
                if not terminated[i]:  # it was cut off, and could have gone on: its end has a value
                    end = torch.as_tensor(infos["final_obs"][i], device=device)
                    rewards[step, i] += args.gamma * agent.get_value(end).detach()
                episodic_return = float(infos["final_info"]["episode"]["r"][i])
                episodes.append((episodic_return, global_step))

        with torch.no_grad():  # arXiv:1506.02438, eq. 16
            next_value = agent.get_value(torch.as_tensor(next_obs, device=device))
            advantages, after = torch.zeros_like(rewards), 0
            for t in reversed(range(args.num_steps)):
                delta = rewards[t] + args.gamma * goes_on[t] * next_value - values[t]
                after = delta + args.gamma * args.gae_lambda * goes_on[t] * after
                advantages[t], next_value = after, values[t]
            returns = advantages + values

        batch = {"obs": obs, "actions": actions, "logprobs": logprobs}
        batch |= {"advantages": advantages, "returns": returns}
        batch = {name: x.flatten(0, 1) for name, x in batch.items()}
        batch = rank0rl.rank0_accum_batches({**batch, "episodes": episodes})  # edit 6
        rank0rl.RunningNorm.merge(obs_rms, return_rms)
        if rank0rl.rank > 0:  # edit 7: all that follows is rank 0's
            continue
        for episodic_return, at in batch["episodes"]:
            writer.add_scalar("charts/episodic_return", episodic_return, at)

        for _ in range(args.update_epochs):
            for rows in torch.randperm(batch_size, device=device).split(minibatch_size):
                _, logprob, entropy, value = agent.get_action_and_value(
                    batch["obs"][rows], batch["actions"][rows]
                )
                ratio = (logprob - batch["logprobs"][rows]).exp()
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                adv = batch["advantages"][rows]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)  # 1e-8: all may be equal
                policy_loss = -torch.min(ratio * adv, clipped * adv).mean()
                value_loss = 0.5 * (value - batch["returns"][rows]).square().mean()
                loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        sps = int(global_step / (time.time() - start_time))
        writer.add_scalar("losses/policy_loss", policy_loss.item(), global_step)
        writer.add_scalar("losses/value_loss", value_loss.item(), global_step)
        writer.add_scalar("charts/SPS", sps, global_step)
        writer.flush()
        print(f"step {global_step}  steps/s {sps}", flush=True)
