"""Games: PettingZoo parallel environments and vector environments, whose agents step together.

Each agent is used as a `gymnasium.Env`. An `EnvBlock` of games first passes the actions of all agents to the game; then
the step of each agent returns the game's answer to it.

In a vector environment, an environment whose episode has ended waits until all episodes have ended, as an
agent that has left a game does. The vector environment resets it before that, but without a seed of its own:
the steps after such a reset are left out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from rank0rl.envs.spaces import flatten, in_one_line, spaces_in_words
from rank0rl.envs.wrappers import Around, refuse_running_statistics

Env: TypeAlias = "gym.Env[Any, Any]"


class Game:
    """A parallel environment with a name for messages, and its latest answer to each of its agents."""

    def __init__(self, parallel: Any, name: str) -> None:
        self.parallel, self.name = parallel, name
        self.agents: list[Env] = []
        """Environment of each agent, in the order of possible_agents; `first_agent` fills the list."""
        self.answers: dict[Any, Any] = {}
        """Agent -> the next answer of its environment; the last one, if the agent has left the game."""
        self.look: Callable[[], None] = lambda: None
        """Function that is called after every reset and every step."""

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
                f"each of possible_agents {names}: got {in_one_line(answer)}; an agent may leave a game, but "
                f"not come later"
            ) from None
        self.look()

    def step(self, actions: Mapping[Any, Any]) -> None:
        """Step the game with the actions of the agents that have not left it.

        Raises:
            ValueError: if the game does not answer one of these agents.
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
                f"{in_one_line(answer)}; an agent leaves by terminated or truncated"
            ) from None
        self.look()

    def idle(self, agent: Any) -> None:
        """Let an agent that has left answer its last observation and no reward from now on."""
        obs, _, _, _, info = self.answers[agent]
        self.answers[agent] = obs, 0.0, False, False, info


class AgentEnv(gym.Env[Any, Any]):
    """One agent of a game, by its name there. The reset of the first agent resets the game."""

    def __init__(self, game: Game, agent: Any) -> None:
        self.game, self.agent = game, agent
        is_game = not isinstance(game.parallel, _VectorGame)
        self.rank0rl_agents = tuple(map(str, game.parallel.possible_agents)) if is_game else ()
        """Names of all agents of the game; () for the environments of a vector environment."""
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
            RuntimeError: if the game has not been stepped since its reset.
        """
        answer = self.game.answers[self.agent]
        if len(answer) == 2:
            raise RuntimeError(f"{self.game.name}: an agent of a game cannot step by itself")
        return answer

    def render(self) -> Any:
        """Return the game's picture."""
        return self.game.parallel.render()

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of the game."""
        return getattr(self.game.parallel, name)

    def close(self) -> None:
        """Close the game, once."""
        if self._is_first and hasattr(self.game.parallel, "close"):
            self.game.parallel.close()


def first_agent(env: Any, name: str) -> Env | None:
    """Return the environment of the first agent of a game, flattened, which stands for the game.

    Args:
        env: a PettingZoo parallel environment or a vector environment. None is returned for others.
        name: name of the environment, for messages.

    Raises:
        ValueError: if there are no agents, or they have not all the same spaces; or if a vector
            environment does not reset by itself, or ignores the seed of a reset.
    """
    is_vector = isinstance(env, gym.vector.VectorEnv)
    has_agents = hasattr(env, "possible_agents") and not hasattr(env, "agent_iter")
    if not is_vector and (isinstance(env, gym.Env) or not has_agents):
        return None
    parallel = _VectorGame(env, name) if is_vector else env
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
    """Return the environments of all agents of a game, in order, given that of the first agent.

    An environment that is not part of a game is returned alone.
    """
    own = getattr(env, "unwrapped", env)
    if not isinstance(own, AgentEnv):
        return [env]
    others = own.game.agents[1:]
    return [env, *(map(env.beside, others) if isinstance(env, Around) else others)]


class _VectorGame:
    """A vector environment with the methods of a PettingZoo parallel environment."""

    def __init__(self, env: Any, name: str) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise ValueError(
                f"a vector environment must reset by itself, at the next step or at the same: {name} has "
                f'metadata["autoreset_mode"] {mode}; make it with autoreset_mode="NextStep"'
            )
        refuse_running_statistics(env)
        begun, infos = copy.deepcopy(env.reset(seed=1))
        if "action_mask" in infos:
            raise ValueError(
                f"action masks need single environments, because a vector environment also steps those that wait: "
                f"{name} gives masks; name its single gymnasium.Env, and --num-envs says how many there are"
            )
        if not data_equivalence(begun, env.reset(seed=1)[0], exact=True):
            raise ValueError(
                f"a vector environment must begin the same episodes after two resets with the same seed, "
                f"or no run could be resumed: those of {name} differ (EnvPool ignores the seed of a "
                f"reset); name the single gymnasium.Env, and --num-envs says how many there are"
            )
        self._env, self._is_same_step = env, mode is AutoresetMode.SAME_STEP
        self.possible_agents = list(range(env.num_envs))
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self._actions: dict[int, Any] = {}

    def observation_space(self, agent: int) -> Any:
        return self._env.single_observation_space

    def action_space(self, agent: int) -> Any:
        return self._env.single_action_space

    def reset(self, **kwargs: Any) -> Any:
        obs, infos = self._env.reset(**kwargs)
        of = self.possible_agents
        return dict(zip(of, self._each(obs), strict=True)), {i: _info(infos, i) for i in of}

    def step(self, actions: Mapping[int, Any]) -> Any:
        """Step all environments; those that are not in `actions` take their last one again."""
        self._actions |= actions
        space = self._env.single_action_space
        both = [self._actions[i] for i in self.possible_agents]
        act: Any = create_empty_array(space, len(both))
        act = concatenate(space, both, act)
        all_obs, rew, terminated, truncated, all_infos = self._env.step(act)
        each = self._each(all_obs)
        obs = {i: each[i] for i in actions}
        infos = {i: _info(all_infos, i) for i in actions}
        if self._is_same_step:
            for i in actions:
                if terminated[i] or truncated[i]:
                    obs[i] = all_infos["final_obs"][i]
                    infos[i] = _info(all_infos.get("final_info", {}), i)
        return obs, rew, terminated, truncated, infos

    def render(self) -> Any:
        return self._env.render()[0]

    def close(self) -> None:
        self._env.close()

    def _each(self, obs: Any) -> list[Any]:
        return list(iterate(self._env.observation_space, obs))


def _info(infos: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Return the items of one environment in the infos of a vector environment: those that "_name" marks."""
    found = {}
    for name, values in infos.items():
        own = infos.get(f"_{name}")
        if not name.startswith("_") and (own is None or own[i]):
            found[name] = _info(values, i) if isinstance(values, Mapping) else np.asarray(values)[i]
    return found
