"""Envs that are agents of games: all agents of a game step together, with one reset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rank0rl.env_block import Env, EnvBlock
from rank0rl.envs import nested_actions
from rank0rl.games import AgentEnv, Game, agents_of

Array = npt.NDArray[Any]


class GameBlock(EnvBlock):
    """The envs of one rank, where each is an agent of a game. A group is a game, with all its agents.

    An agent that is gone waits for the end of its game: its env is over, and its steps count 0. It
    still has a row in `step`, of which the game sees nothing.
    """

    def __init__(self, made: Sequence[Sequence[Any]], indices: range, seed: int) -> None:
        """Take the environments. Without indices, close them."""
        super().__init__(made, indices, seed)
        self._nested = nested_actions(made[0][0])

    def begin(self, env: Env, seed: int) -> None:
        """Reset an env's game with this seed."""
        for each in self.group_of(env):
            each.episode = env.episode
            super().begin(each, seed)

    def go_on(self, envs: Iterable[Env]) -> None:
        """Begin the next game of these envs, if it has ended. Else they wait."""
        for env in envs:
            group = self.group_of(env)
            if all(each.over for each in group):
                self.begin_next(group[0])
            elif env.over:
                self.length[env.row], self.ret[env.row] = 0, 0.0
                env.gym.unwrapped.game.idle(env.gym.unwrapped.agent)

    def since_reset(self) -> Array:
        """Return the steps of each env's game, (envs,)."""
        most: Array = np.array(
            [self.length[group[0].row : group[-1].row + 1].max() for group in self.groups]
        )
        return np.repeat(most, len(self.groups[0]))

    def step(
        self, envs: Sequence[Env], rows: Any, act: Array, fully: bool = True
    ) -> tuple[Array, Array, Array, list[tuple[Env, Array]]]:
        """Step the games of these envs, among which are all agents that are not gone; see `EnvBlock`."""
        waiting = [env.row for env in envs if env.over]
        self._play(envs, self.to_env(act))
        answer = super().step(envs, rows, act, fully)
        self.length[waiting] = 0
        if self.mask is not None:
            self.mask[[env.row for env in envs if env.over]] = True  # they act, in vain
        return answer

    def _play(self, envs: Sequence[Env], env_act: Any) -> None:
        """Hand the actions of all agents to their games."""
        acts: dict[Game, dict[Any, Any]] = {}
        firsts: dict[Game, Env] = {}
        for env, action in zip(envs, env_act, strict=True):
            if not env.over:
                agent: AgentEnv = env.gym.unwrapped
                own = self._nested(action) if self._nested else action
                acts.setdefault(agent.game, {})[agent.agent] = own
                firsts.setdefault(agent.game, env)
        for game, actions in acts.items():
            try:
                game.step(actions)
            except Exception:
                self.doing = firsts[game], actions
                raise


def make_block(
    make_env: Callable[..., Any],
    indices: range,
    seed: int,
    kwargs_of: Callable[[int], Mapping[str, Any]] | None = None,
) -> EnvBlock:
    """Make the environments of one rank.

    Args:
        make_env: makes one gymnasium environment; of a game, that of its first agent.
        indices: indices of this rank's environments and games; may be empty.
        seed: the run's seed, which keys the seed of every episode.
        kwargs_of: returns the arguments with which the environment, or the game, of an index is made.
    """
    made = [agents_of(_make(make_env, index, kwargs_of)) for index in indices or [indices.start]]
    is_game = isinstance(getattr(made[0][0], "unwrapped", None), AgentEnv)
    return (GameBlock if is_game else EnvBlock)(made, indices, seed)


def _make(
    make_env: Callable[..., Any],
    index: int,
    kwargs_of: Callable[[int], Mapping[str, Any]] | None,
) -> Any:
    try:
        return make_env(**kwargs_of(index)) if kwargs_of else make_env()
    except Exception as error:
        error.add_note(f"While making the environment of env {index}.")
        raise
