"""Short trainings of every kind of agent, and the hash of what they learn: python -m helpers.golden NAME ...

All run in one process, so that an emulated CPU loads the libraries once. `golden.json` has the hashes that
every x86-64 CPU gives with the versions of constraints.txt. --write puts this machine's there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden.json")

_WORLD = "same_curve_envs:World --env-kwargs"
_SHORT = "--num-envs 4 --steps-per-batch 256 --total-steps 768 --minibatch-size 64 --hidden 16 16"
RUNS = {
    "ppo CartPole": f"CartPole {_SHORT}",
    "ppo Hopper": f"Hopper {_SHORT}",
    "ppo Walker2d": f"Walker2d {_SHORT}",
    "ppo Humanoid": f"Humanoid {_SHORT}",
    "trpo": "Hopper --algo trpo --num-envs 4 --steps-per-batch 256 --total-steps 768",
    "klppo": "Pendulum --algo klppo --num-envs 4 --steps-per-batch 256 --total-steps 768",
    "a2c": "CartPole --algo a2c --num-envs 4 --steps-per-batch 64 --total-steps 256",
    "reinforce": "CartPole --algo reinforce --num-envs 4 --episodes-per-batch 8 --total-steps 600",
    "es": "CartPole --algo es --num-envs 4 --episodes-per-batch 16 --total-steps 600",
    "cmaes": "CartPole --algo cmaes --num-envs 4 --episodes-per-batch 16 --total-steps 600",
    "cem": "CartPole --algo cem --population 16 --num-envs 4 --episodes-per-batch 16 --total-steps 600",
    "bc": "CartPole --algo bc --data {folder}/data.npz --num-envs 4 --steps-per-batch 64 --total-steps 192",
    "gru": f"CartPole --recurrent gru {_SHORT}",
    "lstm": f"CartPole --recurrent lstm {_SHORT}",
    "beta": f"Pendulum --actions beta {_SHORT}",
    "squashed": f"Pendulum --actions squashed --entropy-coef 0.01 {_SHORT}",
    "state-std": f"Pendulum --state-std {_SHORT}",
    "images": f"{_WORLD} obs=image {_SHORT}".replace("--hidden 16 16", "--hidden 16"),
    "masks": f"{_WORLD} masked=true {_SHORT}",
    "tanh": f"CartPole --activation tanh --no-layer-norm {_SHORT}",
    "elu": f"Pendulum --activation elu {_SHORT}",
    "gelu": f"Pendulum --activation gelu --layer-norm {_SHORT}",
    "own loss": f"Pendulum --algo {ROOT}/examples/kl_penalty.py --normalize minibatch {_SHORT}",
    "own network": f"CartPole --algo {ROOT}/examples/04_network.py:MyPPO {_SHORT}",
}


def train(name: str) -> str:
    """Train in this process; return the hash of the weights."""
    from rank0rl import algos, start
    from rank0rl.run.launch_options import Words

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if name == "bc":
            import numpy as np

            rng = np.random.default_rng(0)
            obs, act = rng.standard_normal((300, 4), dtype="f"), rng.integers(0, 2, 300)
            np.savez(folder / "data.npz", obs=obs, act=act)
        words = [word.replace("{folder}", temporary) for word in RUNS[name].split()]
        words += ["--run-dir", str(folder / "run"), "--quiet", "--trust", "--seed", "0"]
        code = start.start(Words.read(words), algos.CONFIGS, lambda _: None, lambda *_: ())
        assert code == 0, name
        return str(json.loads((folder / "run/summary.json").read_text())["weights_sha256"])


def main() -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # this clone's code, whatever is installed
    from rank0rl.run.launch_options import limit_cpu

    limit_cpu("portable")
    names = [word for word in sys.argv[1:] if word != "--write"] or [*RUNS]
    found = {name: train(name) for name in names}
    if "--write" in sys.argv:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
