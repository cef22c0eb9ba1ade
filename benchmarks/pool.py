"""EnvPool as the vector environment that stable-baselines3 takes, for benchmarks/others.py."""

from __future__ import annotations

from typing import Any

import envpool
import numpy as np
from stable_baselines3.common.vec_env import VecEnv


class Pool(VecEnv):
    """Environments of EnvPool. Those whose episode has ended begin another one at once."""

    def __init__(self, env_id: str, envs: int) -> None:
        self.pool = envpool.make(env_id, env_type="gymnasium", num_envs=envs)
        super().__init__(envs, self.pool.observation_space, self.pool.action_space)

    def reset(self) -> Any:
        return self.pool.reset()[0]

    def step_async(self, actions: Any) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        obs, rew, terminated, truncated, _ = self.pool.step(self.actions)
        over = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in over]
        for i in (ended := np.flatnonzero(over)):
            cut = truncated[i] and not terminated[i]
            infos[i] = {"terminal_observation": obs[i].copy(), "TimeLimit.truncated": cut}
        if len(ended):
            obs[ended] = self.pool.reset(ended.astype(np.int32))[0]
        return obs, rew, over, infos

    def close(self) -> None:
        self.pool.close()

    def get_attr(self, name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs

    def set_attr(self, name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError
