"""Cut the power of small jobs: python benchmarks/power_cuts.py --cuts 20 --seed 0.

A job writes to a file system of its own, on a loop device. After a time that is drawn, its processes are stopped, and
what has reached the device by then is copied: the file system writes nothing by itself but what it is told to flush.
The copy is mounted elsewhere, as after a power cut, and the job is started again there. By turns the job is

train   two ranks, with a checkpoint every second iteration: `--resume auto` goes on to the hash of an undisturbed run
study   two runs at once: the same command goes on, and each run has the hash of an undisturbed one
record  a policy's episodes as a dataset of Minari: it is absent, or complete and that of an undisturbed job

Linux only, as root. It needs a loop device and mkfs.ext4.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGSTOP

from job_processes import Job, send

SMALL = "--num-envs 4 --steps-per-batch 64 --minibatch-size 32 --checkpoint-every 2"
TRAIN = f"train.py CartPole {SMALL} --total-steps 15360 --quiet --nprocs 2 --resume auto --run-dir"
STUDY = f"-m rank0rl study CartPole --seeds 0:2 {SMALL} --total-steps 7680 --out"
RECORD = "-m rank0rl record {run} --minari cuts/ppo-v0 --episodes 1000 --trust"
LIMIT_S = 300.0


@contextlib.contextmanager
def disk(image: Path, where: Path) -> Iterator[Path]:
    """Mount the file system in an image, a new one if there is none."""
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(1 << 27)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    where.mkdir(exist_ok=True)
    # Nothing is flushed within five minutes but what a process flushes.
    subprocess.run(["mount", "-o", "loop,commit=300", str(image), str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


class Cuts:
    """Undisturbed jobs, to which those after a cut are compared.

    Args:
        folder: folder of the jobs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._policy = folder / "policy"
        made = folder / "made"
        self._run(Job(made, [*TRAIN.split(), str(self._policy)]), made)
        self._whole: dict[str, dict[str, str]] = {}
        self._duration_s: dict[str, float] = {}
        for kind in ("train", "study", "record"):
            here = folder / f"undisturbed-{kind}"
            begin = time.monotonic()
            log = folder / f"log-{kind}"
            self._run(self._start(kind, here, log), log)
            self._duration_s[kind] = time.monotonic() - begin
            self._whole[kind] = self._found(kind, here)

    def _command(self, kind: str, where: Path) -> list[str]:
        if kind == "record":
            return RECORD.format(run=self._policy).split()
        return [*(TRAIN if kind == "train" else STUDY).split(), str(where / "out")]

    def _start(self, kind: str, where: Path, log: Path) -> Job:
        return Job(log, self._command(kind, where), MINARI_DATASETS_PATH=str(where / "sets"))

    def _run(self, job: Job, log: Path) -> None:
        code = job.wait(LIMIT_S)
        if code != 0:
            job.kill_survivors()
            raise ValueError(f"code {code}: {(log / 'log').read_text()[-2000:]}")

    def _found(self, kind: str, where: Path) -> dict[str, str]:
        """Return the last hash of weights of each run, or what is in the dataset."""
        if kind == "record":
            code = _READ.format(where / "sets")
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=False
            )
            return {"dataset": done.stdout or done.stderr[-300:]}
        tables = sorted((where / "out").rglob("progress.csv"))
        return {
            table.parent.name: [*csv.DictReader(table.open())][-1]["weights_sha256"]
            for table in tables
        }

    def cut(self, seed: int) -> dict[str, object]:
        """Cut the power of a job; return what was done, and the verdict: "ok", or what was wrong."""
        rng, kind = random.Random(seed), ("train", "study", "record")[seed % 3]
        folder = self._folder / str(seed)
        folder.mkdir()
        at_s = rng.random() * self._duration_s[kind]
        image, after = folder / "disk", folder / "after"
        with disk(image, folder / "mnt") as there:
            job = self._start(kind, there, folder / "log")
            time.sleep(at_s)
            for process in job.processes():
                send(process, SIGSTOP)
            time.sleep(0.1)  # a flush that is under way comes to its end
            shutil.copyfile(image, after)
            job.kill_survivors()
        row: dict[str, object] = {"seed": seed, "job": kind, "cut at": f"{at_s:.1f} s"}
        with disk(after, folder / "mnt") as there:
            row["there"] = ", ".join(sorted(str(f.relative_to(there)) for f in there.rglob("*.pt")))
            try:
                if kind != "record" or not (there / "sets" / "cuts" / "ppo-v0").exists():
                    log = folder / "log"
                    self._run(self._start(kind, there, log), log)
                found = self._found(kind, there)
            except (ValueError, OSError) as error:
                return {**row, "verdict": str(error)}
            return {**row, "verdict": "ok" if found == self._whole[kind] else f"{found}"}


_READ = """
import os
os.environ["MINARI_DATASETS_PATH"] = "{}"
import hashlib, minari
data = minari.load_dataset("cuts/ppo-v0")
digest = hashlib.sha256()
for episode in data:
    digest.update(episode.observations.tobytes() + episode.actions.tobytes() + episode.rewards.tobytes())
print(len(data), digest.hexdigest())
"""


def main() -> int:
    """Cut the power as often as the command line says; return 1 if a job did not go on rightly."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first cut")
    parser.add_argument("--folder", type=Path, help="kept; by default a temporary one")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        cuts = Cuts(folder.resolve())
        wrong = 0
        for seed in range(given.seed, given.seed + given.cuts):
            row = cuts.cut(seed)
            wrong += row["verdict"] != "ok"
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    print(f"{given.cuts - wrong} of {given.cuts} jobs went on as if nothing had happened")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
