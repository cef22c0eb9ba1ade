"""Measure PPO of other projects in one process: python benchmarks/others.py stable-baselines3 Walker2d 8 2048 64 4.

It prints steps per second, for benchmarks/train.py. The arguments are which one, the task, environments, steps a batch,
rows a minibatch, and iterations, before which two more are not timed. All have two tanh networks and one torch thread:

- `stable-baselines3`: on Gymnasium's environments, one after the other;
- `sbx`: stable-baselines3 in JAX, on the same;
- `sbx-envpool`: the same on EnvPool, which steps environments in as many C++ threads as there are cores;
- `sb3-contrib`: stable-baselines3 with an LSTM of 64 units that policy and value function share;
- `single-file`: a loop in the style of the one-file implementations: torch modules, Gymnasium's vector environment,
  autograd and torch's Adam.

Those of SBX need `pip install sbx-rl envpool "gymnasium[mujoco]"` in an environment of their own. JAX takes the threads that it
wants. Pong and the LSTM have four epochs, the others ten.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

ENVS = {"Walker2d": "Walker2d-v5", "CartPole": "CartPole-v1", "Pong": "ALE/Pong-v5"}
FEW_EPOCHS, EPOCHS = 4, 10  # few for images and with memory


def main() -> None:
    ways = {
        "stable-baselines3": stable_baselines,
        "sb3-contrib": recurrent,
        "sbx": partial(sbx, pool=False),
        "sbx-envpool": partial(sbx, pool=True),
        "single-file": single_file,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=ways)
    parser.add_argument("task", choices=ENVS)
    for name in ("envs", "batch", "minibatch", "iterations"):
        parser.add_argument(name, type=int)
    parser.add_argument("--units", type=int, default=64, help="of both hidden layers")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = args.envs, args.batch, args.minibatch, args.iterations + 2, args.units
    begins = ways[args.which](args.task, *sizes)[2:]  # JAX compiles in the first iterations
    each = (begins[-1] - begins[0]) / (len(begins) - 1)
    print(args.batch / each)


def stable_baselines(
    task: str, envs: int, batch: int, minibatch: int, iterations: int, units: int
) -> list[float]:
    """Train with stable-baselines3; return the times at which iterations began."""
    from stable_baselines3 import PPO

    env = vector(task, envs)
    if task == "Pong":
        return learn(PPO, "CnnPolicy", env, batch, minibatch, iterations, FEW_EPOCHS, {})
    return learn(PPO, "MlpPolicy", env, batch, minibatch, iterations, EPOCHS, layers(units))


def recurrent(
    task: str, envs: int, batch: int, minibatch: int, iterations: int, units: int
) -> list[float]:
    """Train an LSTM with sb3-contrib; return the times at which iterations began."""
    from sb3_contrib import RecurrentPPO

    memory = {"lstm_hidden_size": 64, "shared_lstm": True, "enable_critic_lstm": False}
    networks = layers(units) | memory
    of_lstm = "MlpLstmPolicy", vector(task, envs), batch, minibatch, iterations, FEW_EPOCHS
    return learn(RecurrentPPO, *of_lstm, networks)


def sbx(
    task: str, envs: int, batch: int, minibatch: int, iterations: int, units: int, pool: bool
) -> list[float]:
    """Train with stable-baselines3 in JAX; return the times at which iterations began."""
    from sbx import PPO

    if pool:
        from pool import Pool

        env: Any = Pool(ENVS[task], envs)
    else:
        env = vector(task, envs)
    return learn(PPO, "MlpPolicy", env, batch, minibatch, iterations, EPOCHS, layers(units))


def vector(task: str, envs: int) -> Any:
    """Return environments for stable-baselines3, one after the other."""
    from stable_baselines3.common.env_util import make_vec_env

    return make_vec_env(make_pong if task == "Pong" else ENVS[task], envs)


def layers(units: int) -> dict[str, Any]:
    return {"net_arch": [units, units]}


def learn(
    PPO: Any,
    policy: str,
    env: Any,
    batch: int,
    minibatch: int,
    iterations: int,
    epochs: int,
    networks: dict[str, Any],
) -> list[float]:
    """Train with any form of stable-baselines3; return the times at which iterations began."""
    from stable_baselines3.common.callbacks import BaseCallback

    begins: list[float] = []

    class Times(BaseCallback):
        def _on_rollout_start(self) -> None:
            begins.append(time.perf_counter())

        def _on_step(self) -> bool:
            return True

    model = PPO(
        policy,
        env,
        n_steps=batch // env.num_envs,
        batch_size=minibatch,
        n_epochs=epochs,
        policy_kwargs=networks,
        device="cpu",
    )
    model.learn(batch * iterations, callback=Times())
    return begins


def make_pong() -> gym.Env:
    """Make Pong with the wrappers of configs/ppo-ALE-Pong.toml."""
    import ale_py

    gym.register_envs(ale_py)
    env = gym.wrappers.AtariPreprocessing(gym.make("ALE/Pong-v5", frameskip=1))
    return gym.wrappers.FrameStackObservation(gym.wrappers.ClipReward(env, -1, 1), 4)


def single_file(
    task: str, envs: int, batch: int, minibatch: int, iterations: int, units: int
) -> list[float]:
    """Train floats with a loop in one function; return the times at which iterations began, and the end."""
    vec = gym.vector.SyncVectorEnv([lambda: gym.make(ENVS[task]) for _ in range(envs)])
    n_obs, n_act = vec.single_observation_space.shape[0], vec.single_action_space.shape[0]
    mean, value = network(n_obs, n_act, units), network(n_obs, 1, units)
    log_std = nn.Parameter(torch.zeros(1, n_act))
    params = [*mean.parameters(), *value.parameters(), log_std]
    adam = torch.optim.Adam(params, lr=3e-4, eps=1e-5)
    T = batch // envs
    obs_, act_ = torch.zeros(T, envs, n_obs), torch.zeros(T, envs, n_act)
    logp_, rew_, over_, val_ = (torch.zeros(T, envs) for _ in range(4))

    def policy(x: Tensor) -> torch.distributions.Normal:
        mu = mean(x)
        return torch.distributions.Normal(mu, log_std.exp().expand_as(mu))

    next_obs, over = torch.as_tensor(vec.reset(seed=0)[0]).float(), torch.zeros(envs)
    begins = []
    for _ in range(iterations):
        begins.append(time.perf_counter())
        for t in range(T):
            obs_[t], over_[t] = next_obs, over
            with torch.no_grad():
                pi = policy(next_obs)
                act_[t] = pi.sample()
                logp_[t] = pi.log_prob(act_[t]).sum(1)
                val_[t] = value(next_obs).flatten()
            x, rew, terminated, truncated, _ = vec.step(act_[t].numpy())
            rew_[t] = torch.as_tensor(rew)
            next_obs = torch.as_tensor(x).float()
            over = torch.as_tensor(terminated | truncated).float()
        with torch.no_grad():
            adv_, last, next_val, next_over = torch.zeros_like(rew_), 0, value(next_obs)[:, 0], over
            for t in reversed(range(T)):
                delta = rew_[t] + 0.99 * next_val * (1 - next_over) - val_[t]
                adv_[t] = last = delta + 0.99 * 0.95 * (1 - next_over) * last
                next_val, next_over = val_[t], over_[t]
        rows = [x.reshape(batch, -1) for x in (obs_, act_, logp_, adv_, adv_ + val_)]
        index = np.arange(batch)
        for _ in range(EPOCHS):
            np.random.shuffle(index)  # noqa: NPY002 - as those files do
            for start in range(0, batch, minibatch):
                obs, act, logp, adv, ret = (x[index[start : start + minibatch]] for x in rows)
                pi = policy(obs)
                ratio = (pi.log_prob(act).sum(1) - logp[:, 0]).exp()
                adv = (adv[:, 0] - adv.mean()) / (adv.std() + 1e-8)
                gain = torch.min(adv * ratio, adv * ratio.clamp(0.8, 1.2)).mean()
                loss = 0.5 * (value(obs) - ret).square().mean() - gain
                adam.zero_grad()
                (loss - 0.0 * pi.entropy().sum(1).mean()).backward()
                nn.utils.clip_grad_norm_(params, 0.5)
                adam.step()
    return [*begins, time.perf_counter()]


def network(inputs: int, outputs: int, units: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(inputs, units), nn.Tanh(), nn.Linear(units, units), nn.Tanh()),
        nn.Linear(units, outputs),
    )


if __name__ == "__main__":
    main()
