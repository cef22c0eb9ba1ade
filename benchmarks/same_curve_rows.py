"""The rows of `same_curve.py`: which runs two checkouts must make alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

CLASSES = {
    "ppo": "PPO",
    "trpo": "TRPO",
    "klppo": "KLPPO",
    "reinforce": "Reinforce",
    "cem": "CEM",
    "a2c": "A2C",
    "es": "ES",
    "cmaes": "CMAES",
    "bc": "BC",
}  # file in algos/ -> class
SMALL = "--hidden 16 --activation tanh --no-layer-norm"  # layers that are the same in every agent

# In all options, {folder} is the folder of the runs, {env} the name of the environment, and WORLDS
# the module same_curve_envs. For words of WORDS, a checkout gets its own.
AGENTS = {
    **{name: name for name in ("ppo", "trpo", "klppo", "reinforce", "a2c", "es")},
    "cem": "cem --population 12",
    "cmaes": "cmaes --population 12",
    "bc": "bc --data {folder}/{env}.npz --steps 20 --minibatch-size 64",
    "bc-small": f"bc --data {{folder}}/{{env}}.npz --steps 20 --minibatch-size 64 {SMALL}",
    "gru": "ppo --recurrent gru --memory-size 16 --chunk-steps 8",
    "lstm": "ppo --recurrent lstm --memory-size 16 --chunk-steps 8",
    "gru-beta": "ppo --recurrent gru --memory-size 16 --actions beta --normalize minibatch",
    "lstm-state-std": "ppo --recurrent lstm --memory-size 16 --state-std",
    "squashed": "ppo --actions squashed",
    "beta": "ppo --actions beta",
    "state-std": "ppo --state-std --log-std -0.5",
    "squashed-state-std": "ppo --actions squashed --state-std",
    "minibatch": "ppo --normalize minibatch --target-kl 0.01 --minibatch-size 48 --max-grad-norm 0.1",
    "schedules": "ppo --lr cosine:1e-3:1e-4 --clip-ratio linear:0.3:0.1 --entropy-coef linear:0.01:0",
    "relu": "ppo --activation relu --value-hidden 32 16 --entropy-coef 0.01",
    "layer-norm": "ppo --layer-norm --activation elu",
    "tanh": "ppo --activation tanh --no-layer-norm",
    "keys": "ppo --policy-obs a --critic-obs b",
    "trpo-squashed": "trpo --actions squashed",
    "trpo-beta": "trpo --actions beta",
    "trpo-state-std": "trpo --state-std",
    "trpo-relu": "trpo --activation relu --backtracks 0 --fisher-stride 1",
    "trpo-schedules": "trpo --target-kl linear:0.02:0.01 --value-lr cosine:1e-3:1e-4",
    "klppo-squashed": "klppo --actions squashed",
    "klppo-beta": "klppo --actions beta",
    "es-hidden": "es --hidden 8 --lr linear:0.05:0.01",
}  # name -> file in algos/, options
ENVS = {
    "Hopper": "Hopper",
    "CartPole": "CartPole",
    "world": "WORLDS:World --info place sum:place",
    "mask": "WORLDS:World --env-kwargs masked=true",
    "masks": "WORLDS:World --env-kwargs act=multi masked=true",
    "image": "WORLDS:World --env-kwargs obs=image",
    "image-box": "WORLDS:World --env-kwargs obs=image act=box",
    "dict": "WORLDS:World --env-kwargs obs=dict act=choices",
    "tuple": "WORLDS:World --env-kwargs obs=tuple act=floats",
    "binary": "WORLDS:World --env-kwargs obs=discrete act=binary",
    "kwargs-of": "WORLDS:World --env-kwargs-of WORLDS:kwargs_of",
    "game": "WORLDS:game",
    "game-mask": "WORLDS:game --env-kwargs masked=true",
    "vector": "WORLDS:vector",
    "vector-same-step": "WORLDS:vector --env-kwargs mode=SameStep",
    "frames": "CartPole --wrappers TimeAwareObservation FrameStackObservation(stack_size=2)",
    "broken": "CartPole --wrappers WORLDS:Broken --env-retries 1 --on-env-error truncate",
}  # name -> environment, options
ITERATIONS = 3  # at least: a game of which agents leave needs more, because its batches are smaller
BATCHES = {
    "fixed": f"--num-envs 6 --steps-per-batch 192 --total-steps {ITERATIONS * 192}",
    "episodes": f"--num-envs 6 --episodes-per-batch 12 --num-episodes {ITERATIONS * 12}",
}


class Variant(NamedTuple):
    """One way to make a run."""

    options: str = ""
    """Options of its first start."""
    stop: int = 0
    """Iterations after which it stops and is resumed. 0: it does not stop."""
    curve: str = "plain"
    """Variant whose curve it must have."""
    before: str = ""
    """Key of AGENTS: a run before it, in {folder}/before. {agent}: of the same agent."""


TUNE, LENGTHS = "{callback}", "--curriculum WORLDS:lengths"
VARIANTS = {
    "plain": Variant(),
    "resume": Variant(stop=1),
    "overlap": Variant("--overlap", curve="overlap"),
    "overlap+resume": Variant("--overlap", stop=2, curve="overlap"),
    "parts+evaluation": Variant("--gather-parts 3 --eval-every 1 --eval-episodes 3"),
    "evaluation": Variant("--eval-every 1 --eval-episodes 3 --no-eval-deterministic"),
    "shares": Variant("--rank0-envs 1 --learner-threads 2"),
    "retries": Variant("--wrappers WORLDS:Flaky --env-retries 2"),
    "retries+resume": Variant("--wrappers WORLDS:Flaky --env-retries 2", stop=1),
    "processes": Variant("--env-processes"),
    "processes+resume": Variant("--env-processes", stop=1),
    "no-replay": Variant("--max-replay-steps 0", stop=1, curve="no-replay"),
    "curriculum": Variant(LENGTHS, curve="curriculum"),
    "curriculum+resume": Variant(LENGTHS, stop=1, curve="curriculum"),
    "curriculum-method": Variant(f"{LENGTHS} --curriculum-method set_task", curve="curriculum"),
    "curriculum+overlap": Variant(f"{LENGTHS} --overlap", curve="curriculum+overlap"),
    "callback": Variant(TUNE, curve="callback"),
    "callback+resume": Variant(TUNE, stop=1, curve="callback"),
    "callback+overlap": Variant(f"{TUNE} --overlap", curve="callback+overlap"),
    "init-from": Variant("--init-from {folder}/before", curve="init-from", before="{agent}"),
    "init-from+resume": Variant("--init-from {folder}/before", 1, "init-from", "{agent}"),
    "after-bc": Variant(
        f"--init-from {{folder}}/before {SMALL}", curve="after-bc", before="bc-small"
    ),
}
WORDS = {
    "{callback}": ("--hook", "--callback WORLDS:tune", "--hook {folder}/same_curve_hook.py:Tune"),
}  # word in options -> option by which a new checkout is known, words for old ones, for new ones

BOTH, ON_TWO, ON_THREE = "fixed episodes", (1, 2), (1, 2, 3)
TABLE = (
    ("ppo trpo klppo reinforce", "Hopper CartPole", BOTH, "plain resume overlap", ON_THREE),
    ("cem", "Hopper CartPole", "episodes", "plain resume overlap", ON_THREE),
    ("ppo reinforce", "Hopper CartPole", BOTH, "overlap+resume", ON_THREE),
    ("ppo", "Hopper CartPole", BOTH, "parts+evaluation", ON_THREE),
    ("ppo trpo", "Hopper", BOTH, "shares", (2, 3)),
    ("a2c", "Hopper CartPole", "fixed", "plain resume overlap", ON_TWO),
    ("a2c", "CartPole", "episodes", "plain", ON_TWO),
    ("es cmaes", "Hopper CartPole", "episodes", "plain resume parts+evaluation", ON_TWO),
    ("es-hidden", "mask", "episodes", "plain resume evaluation", ON_TWO),
    ("bc", "Hopper CartPole", "fixed", "plain resume", ON_TWO),
    ("bc", "CartPole", "episodes", "overlap", ON_TWO),
    ("gru lstm", "CartPole Hopper", "fixed", "plain resume overlap evaluation", ON_TWO),
    ("gru lstm", "CartPole", "episodes", "plain resume parts+evaluation", ON_TWO),
    ("gru-beta lstm-state-std", "Hopper", "fixed", "plain resume", ON_TWO),
    ("squashed beta state-std squashed-state-std", "Hopper", "fixed", "plain resume", ON_TWO),
    ("squashed beta", "Hopper", "episodes", "parts+evaluation", ON_TWO),
    (
        "minibatch schedules relu layer-norm tanh",
        "Hopper CartPole",
        "fixed",
        "plain resume",
        ON_TWO,
    ),
    ("trpo-squashed trpo-beta trpo-state-std", "Hopper", "fixed", "plain resume", ON_TWO),
    ("trpo-relu trpo-schedules", "Hopper CartPole", "fixed", "plain resume", ON_TWO),
    ("klppo-squashed klppo-beta", "Hopper", "episodes", "plain resume", ON_TWO),
    ("ppo", "mask masks", BOTH, "plain resume parts+evaluation", ON_TWO),
    ("trpo klppo gru", "mask masks", "fixed", "plain resume", ON_TWO),
    ("ppo", "image", BOTH, "plain resume overlap parts+evaluation", ON_TWO),
    ("trpo a2c", "image image-box", "fixed", "plain resume", ON_TWO),
    ("keys", "dict", "fixed", "plain resume evaluation", ON_TWO),
    ("ppo trpo", "dict tuple binary frames", "fixed", "plain resume", ON_TWO),
    ("reinforce", "dict tuple binary", "episodes", "plain", ON_TWO),
    ("ppo", "kwargs-of broken", "fixed", "plain resume evaluation", ON_TWO),
    ("ppo", "broken", "episodes", "plain", ON_TWO),
    ("ppo gru", "game game-mask", BOTH, "plain resume", ON_TWO),
    ("ppo", "game", BOTH, "overlap evaluation", ON_TWO),
    ("ppo gru", "vector vector-same-step", BOTH, "plain resume", ON_TWO),
    ("ppo", "vector", "fixed", "overlap evaluation", ON_TWO),
    ("ppo", "CartPole", BOTH, "retries retries+resume processes", ON_TWO),
    ("ppo", "Hopper CartPole", "fixed", "no-replay", ON_THREE),
    ("gru", "CartPole", "fixed", "retries processes+resume", ON_TWO),
    ("ppo", "world", BOTH, "plain parts+evaluation curriculum curriculum+resume", ON_TWO),
    ("ppo", "world", "fixed", "curriculum-method curriculum+overlap", ON_TWO),
    ("gru", "world", "episodes", "curriculum curriculum+resume", ON_TWO),
    ("ppo", "CartPole", BOTH, "callback callback+resume", ON_TWO),
    ("ppo", "CartPole", "fixed", "callback+overlap", ON_TWO),
    ("a2c bc gru", "CartPole", "fixed", "callback callback+resume", ON_TWO),
    ("ppo trpo gru", "Hopper", "fixed", "init-from init-from+resume", ON_TWO),
    ("es cmaes cem", "CartPole", "episodes", "init-from", ON_TWO),
    ("ppo trpo", "CartPole Hopper", "fixed", "after-bc", ON_TWO),
)  # agents, environments, batches, variants, numbers of ranks: a row for each of their combinations


@dataclass(frozen=True)
class Case:
    """One row of the table: what is trained, and how."""

    agent: str
    """Key of AGENTS."""
    env: str
    """Key of ENVS."""
    batches: str
    """Key of BATCHES."""
    variant: str
    """Key of VARIANTS."""
    nprocs: tuple[int, ...]
    """Numbers of ranks."""

    @property
    def curve(self) -> tuple[str, ...]:
        """The curve it belongs to: resume, parts and evaluation must not change one."""
        return self.agent, self.env, self.batches, VARIANTS[self.variant].curve

    @property
    def commands(self) -> list[tuple[str, str, str]]:
        """Each start: the run's folder, its file in algos/, and options. `--resume` alone goes on."""
        options, stop, _, before = VARIANTS[self.variant]
        starts = [
            ("run", self.agent, f"{options} --stop-after-iterations {stop}" if stop else options)
        ]
        if before:
            starts.insert(0, ("before", before.replace("{agent}", self.agent), ""))
        found = []
        for folder, name, more in starts:
            agent, _, its = AGENTS[name].partition(" ")
            words = f"{ENVS[self.env]} {BATCHES[self.batches]} {its} {more}"
            found.append((folder, agent, words.replace("{env}", self.env)))
        return [*found, ("run", "", "--resume")] if stop else found

    def __str__(self) -> str:
        """Return its place in the table, which `--only` searches."""
        return "/".join((self.agent, self.env, self.batches, self.variant))


def cases() -> Iterator[Case]:
    """Yield the rows of the table.

    Outside the core of the table, only 2 ranks stop and resume. Their curve must be that of the run that
    did not stop, which 1 rank makes too.
    """
    for *columns, nprocs in TABLE:
        for agent, env, batches, variant in itertools.product(*(c.split() for c in columns)):
            only_two = nprocs == ON_TWO and VARIANTS[variant].stop
            yield Case(agent, env, batches, variant, (2,) if only_two else nprocs)


def covering(rows: Sequence[Case]) -> list[Case]:
    """Return few rows in which every agent, environment and variant of these rows occurs."""
    kinds = {case: {("agent", case.agent), ("env", case.env), case.variant} for case in rows}
    left = set().union(*kinds.values())
    chosen = []
    while left:
        chosen.append(max(rows, key=lambda case: len(kinds[case] & left)))  # the first one of these
        left -= kinds[chosen[-1]]
    return [case for case in rows if case in chosen]
