"""Games: what steps together, a PettingZoo parallel environment. Each agent is an environment of the run.

An agent is used as a `gymnasium.Env`. Its steps answer what the game has answered to the actions of all
agents, which `GameBlock` hands over first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from rank0rl.env_spaces import spaces_in_words
from rank0rl.env_wrappers import Around
from rank0rl.vector_games import VectorGame, is_vector

Env: TypeAlias = "gym.Env[Any, Any]"


class Game:
    """A parallel environment, and the latest answers to each of its agents.

    Args:
        parallel: the parallel environment.
        name: of the environment, for messages.
    """

    def __init__(self, parallel: Any, name: str) -> None:
        """Begin before the first reset."""
        self.parallel, self.name = parallel, name
        self.agents: list[Env] = []
        """Each agent's environment, in order of possible_agents; `agents_of` fills it."""
        self.answers: dict[Any, Any] = {}
        """Agent -> what its environment answers next; the last answers of those that are gone."""
        self.look: Callable[[], None] = lambda: None
        """Is called after every reset and every step."""

    def reset(self, **kwargs: Any) -> None:
        """Begin a game.

        Raises:
            ValueError: if an agent is missing.
        """
        answer = self.parallel.reset(**kwargs)
        names = self.parallel.possible_agents
        try:
            obs, infos = answer
            self.answers = {agent: (obs[agent], infos.get(agent, {})) for agent in names}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(
                f"reset of {self.name} must return observations and infos, a dict each, with a key for "
                f"each of possible_agents {names}: got {_short(answer)}; an agent may leave a game, but "
                f"not come later"
            ) from None
        self.look()

    def step(self, actions: Mapping[Any, Any]) -> None:
        """Step the game with the actions of the agents that are not gone.

        Raises:
            ValueError: if it does not answer one of them.
        """
        answer = self.parallel.step(actions)
        try:
            obs, rew, terminated, truncated, infos = answer
            for agent in actions:
                flags = terminated[agent], truncated[agent]
                self.answers[agent] = obs[agent], rew[agent], *flags, infos.get(agent, {})
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(
                f"step of {self.name} must return observations, rewards, terminated, truncated and "
                f"infos, a dict each, with a key for each agent that acted, here {[*actions]}: got "
                f"{_short(answer)}; an agent leaves by terminated or truncated"
            ) from None
        self.look()

    def idle(self, agent: Any) -> None:
        """Let an agent that is gone answer its last observation, without a reward, from now on."""
        obs, _, _, _, info = self.answers[agent]
        self.answers[agent] = obs, 0.0, False, False, info


class AgentEnv(gym.Env[Any, Any]):
    """One agent of a game. The reset of the first agent resets the game.

    Args:
        game: the game.
        agent: the agent's name in it.
    """

    def __init__(self, game: Game, agent: Any) -> None:
        """Take the agent's spaces."""
        self.game, self.agent = game, agent
        self.observation_space = game.parallel.observation_space(agent)
        self.action_space = game.parallel.action_space(agent)
        self.metadata = getattr(game.parallel, "metadata", {})
        self.render_mode = getattr(game.parallel, "render_mode", None)
        self.spec = EnvSpec(re.sub(r"[^\w.:-]", "_", f"{game.name}:{agent}"))
        self._is_first = agent == game.parallel.possible_agents[0]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Return the agent's answer to the game's reset."""
        if self._is_first:
            self.game.reset(seed=seed, **({} if options is None else {"options": options}))
        return self.game.answers[self.agent]

    def step(self, action: Any) -> Any:
        """Return the agent's answer to the game's last step.

        Raises:
            RuntimeError: if there has been none.
        """
        answer = self.game.answers[self.agent]
        if len(answer) == 2:
            raise RuntimeError(f"{self.game.name}: an agent of a game cannot step by itself")
        return answer

    def render(self) -> Any:
        """Return the game's picture."""
        return self.game.parallel.render()

    def get_wrapper_attr(self, name: str) -> Any:
        """Return what the game has under a name."""
        return getattr(self.game.parallel, name)

    def close(self) -> None:
        """Close the game, once."""
        if self._is_first:
            self.game.parallel.close()


def as_parallel(env: Any, name: str) -> Any:
    """Return a parallel environment of PettingZoo as it is, and a vector environment as one; None for others."""
    if is_vector(env):
        return VectorGame(env, name)
    has_agents = hasattr(env, "possible_agents") and not hasattr(env, "agent_iter")
    return env if has_agents and not isinstance(env, gym.Env) else None


def first_agent(parallel: Any, name: str, flatten: Callable[[Env], Env]) -> Env:
    """Return the environment of the first agent of a game, which stands for the game.

    Args:
        parallel: the parallel environment.
        name: of the environment, for messages.
        flatten: makes rows of numbers of an environment's observations and actions.

    Raises:
        ValueError: if there are no agents, or they have not all the same spaces.
    """
    if not parallel.possible_agents:
        raise ValueError(f"{name} must name its agents in possible_agents: got none")
    game = Game(parallel, name)
    game.agents = [flatten(AgentEnv(game, agent)) for agent in parallel.possible_agents]
    first, *others = [spaces_in_words(env) for env in game.agents]
    for agent, its in zip(parallel.possible_agents[1:], others, strict=True):
        if its != first:
            raise ValueError(
                f"all agents of a game must have the same spaces, because they share one policy: in "
                f"{name}, {parallel.possible_agents[0]} has {first}; {agent} has {its}; make them equal "
                f"in the function that makes the game, such as with pad_observations_v0 and "
                f"pad_action_space_v0 of SuperSuit"
            )
    return game.agents[0]


def agents_of(env: Any) -> list[Any]:
    """Return the environments of all agents of a game, in order.

    Args:
        env: the environment of the first agent; or one that is no game's, which is returned alone.
    """
    own = getattr(env, "unwrapped", env)
    if not isinstance(own, AgentEnv):
        return [env]
    others = own.game.agents[1:]
    return [env, *(map(env.beside, others) if isinstance(env, Around) else others)]


def _short(value: Any) -> str:
    return " ".join(f"{value!r:.200}".split())
