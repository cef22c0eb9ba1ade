"""Send signals to processes of small training jobs: python benchmarks/chaos.py --runs 300 --seed 0.

Each run draws from its seed: 2 or 3 ranks, --overlap, --max-restarts 1, --env-processes, a signal (KILL, STOP or
TERM), a time between the first instant of the job and the end of an undisturbed one, and the process that gets the
signal. The process is uniform over the kinds that live then: supervisor, launcher, proxy, shell, rank, environment
(or its fork server). Afterwards:

- The job has ended in time: `--limit` seconds after the fault (20, times the slowness of a busy machine). A job
  that recovers has the duration of an undisturbed one besides.
- The exit code is one of `right_codes`.
- The weights have the hash of an undisturbed run: at once after exit code 0, else after `--resume` (after the
  same command again, if there was no checkpoint yet).
- No process, no temporary file and no file of MPI in /dev/shm and /tmp is left. After KILL of the supervisor, the
  next start has removed the files.

`--only SEED` repeats a run. The fault comes at the same share of a job's duration, so only about at the same place.
Linux only. What other jobs leave in /dev/shm and /tmp counts too. Where these run, have your own, as root:
unshare --mount sh -c "mount -t tmpfs t /tmp; mount -t tmpfs t /dev/shm; python benchmarks/chaos.py --folder DIR"
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

from job_processes import Job, send, unused_mpi_files

TRAIN = (
    "train.py CartPole --num-envs 4 --steps-per-batch 64 --minibatch-size 32 --total-steps 3840 "
    "--checkpoint-every 2 --quiet"
)
IN_PROCESSES = "--env-processes --step-timeout 3 --start-timeout 15 --env-retries 3"
LIMIT_S = 20.0  # from the fault to the job's end, on an idle machine


class Case:
    """Disturbance of one job, drawn from its seed. Its time is a share of an undisturbed job."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.nprocs = self.rng.choice((2, 3))
        self.overlap = self.rng.random() < 0.25
        self.restarts = int(self.rng.random() < 0.25)
        self.signum = self.rng.choice((SIGKILL, SIGSTOP, SIGTERM))
        self.share = self.rng.random()
        self.stopped_s = self.rng.uniform(1, 4)  # until a stopped supervisor goes on
        self.env_processes = self.rng.random() < 0.25


def right_codes(case: Case, kind: str) -> set[int]:
    """Return the exit codes that are right after the signal of a case to a process of this kind.

    128 + s if signal s ended the supervisor or a rank, or stopped a rank; also 1 for a process between them, and 15
    with which MPICH ends a rank that loses its proxy in MPI_Init. 0 if the job was over already, recovered, or went
    on because only the supervisor was stopped for a while.
    """
    code = 128 + case.signum
    if kind == "supervisor":
        return {0} if case.signum == SIGSTOP else {code}
    if (
        kind == "rank" and case.signum == SIGTERM
    ):  # a rank that trains takes it for a request to end: no restart
        return {0, code}
    if case.restarts or kind in ("", "environment"):
        return {0}
    return {0, code} if kind == "rank" else {0, 1, 15, code}


class Chaos:
    """Runs cases in a folder.

    Args:
        folder: folder of the runs.
        launcher: options that name a launcher, if it is not the one that is found.
        limit_s: seconds from a fault to the end; None to scale 20 s by the slowness of the machine.
    """

    def __init__(self, folder: Path, launcher: list[str], limit_s: float | None) -> None:
        """Run an undisturbed job with and one without --overlap, for their duration and hashes."""
        self._folder, self._launcher, self._limit_s = folder, launcher, limit_s
        self.duration_s, self._hashes = 0.0, dict[bool, str]()
        for overlap in (False, True):
            whole = folder / f"undisturbed{overlap:d}"
            begin = time.monotonic()
            job = Job(whole, [*self._new_run(whole, overlap), "--nprocs", "3"])
            if job.wait(600) != 0:
                sys.exit(f"an undisturbed job failed {job.kill_survivors()}: see {whole / 'log'}")
            self.duration_s = max(self.duration_s, time.monotonic() - begin)
            self._hashes[overlap] = _weights_hash(whole)

    def run(self, case: Case) -> dict[str, object]:
        """Run a case; return what was done, and the verdict: "ok", or all that was wrong."""
        folder, before = self._folder / str(case.seed), unused_mpi_files()
        limit_s = self._limit_s or LIMIT_S * _slowness()
        at_s = case.share * self.duration_s
        start = ["--nprocs", str(case.nprocs), "--max-restarts", str(case.restarts)]
        start += IN_PROCESSES.split() * case.env_processes
        job = Job(folder, [*self._new_run(folder, case.overlap), *start])
        time.sleep(at_s)
        kind = disturb(job, case)
        begin = time.monotonic()
        code = job.wait(limit_s + self.duration_s)
        seconds = time.monotonic() - begin
        survivors = job.kill_survivors(limit_s if code is not None else 0)
        wrong = [f"{'hang' if code is None else 'orphans'}: {survivors}"] if survivors else []
        if code and seconds > limit_s:
            wrong.append(f"ended after {seconds:.1f} s")
        if code not in (right := right_codes(case, kind)):
            wrong.append(f"exit code {code}, not in {sorted(right)}")
        if not survivors and (case.signum, kind) != (SIGKILL, "supervisor"):
            wrong += _left(folder, before)
        if code != 0:
            wrong += self._go_on(case, folder, limit_s) + _left(folder, before)
        if _weights_hash(folder) != self._hashes[case.overlap]:
            wrong.append("another hash")
        words = f"{case.nprocs} ranks{' overlap' * case.overlap}{' restart' * case.restarts}"
        words += " env processes" * case.env_processes
        fault = f"{case.signum.name} {kind or 'nobody'} at {at_s:.2f} s"
        verdict = "; ".join(dict.fromkeys(wrong)) or "ok"
        row = {"seed": case.seed, "job": words, "fault": fault, "code": code}
        return {**row, "seconds": round(seconds, 1), "verdict": verdict}

    def _go_on(self, case: Case, folder: Path, limit_s: float) -> list[str]:
        """Go on with a run that did not complete; return what was wrong with that."""
        words = ["train.py", "--quiet", "--resume", str(folder / "run"), *self._launcher]
        if not any(folder.glob("run/checkpoints/*.pt")):
            words = self._new_run(folder, case.overlap)
        job = Job(folder, [*words, "--nprocs", str(case.nprocs)])
        code = job.wait(limit_s + self.duration_s)
        survivors = job.kill_survivors()
        return [f"the next start: code {code} {survivors}"] if code != 0 or survivors else []

    def _new_run(self, folder: Path, overlap: bool) -> list[str]:
        options = ["--run-dir", str(folder / "run"), *["--overlap"] * overlap]
        return [*TRAIN.split(), *options, *self._launcher]


def disturb(job: Job, case: Case) -> str:
    """Send the signal of a case; return the kind of process that got it, "" if the job was over."""
    process_id, kind = job.draw(case.rng)
    if kind:
        send(process_id, case.signum)
    if (case.signum, kind) == (SIGSTOP, "supervisor"):
        time.sleep(case.stopped_s)
        send(process_id, SIGCONT)
    return kind


def _left(folder: Path, before: set[str]) -> list[str]:
    """Return a sentence about the files that a job has left, if there are any."""
    files = [*map(str, (folder / "tmp").iterdir()), *sorted(unused_mpi_files() - before)]
    return [f"left: {', '.join(files)}"] if files else []


def _slowness() -> float:
    """Return how many times longer than on an idle machine a process takes now, 1 or more."""
    begin, cpu = time.perf_counter(), time.process_time()
    while (spent_s := time.process_time() - cpu) < 0.2:
        pass
    return max(1.0, (time.perf_counter() - begin) / spent_s)


def _weights_hash(folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads((folder / "run" / "summary.json").read_text())["weights_sha256"])
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--only", type=int, metavar="SEED", help="repeat one run")
    parser.add_argument("--mpiexec", help="command line of a launcher")
    parser.add_argument("--limit", type=float, help="seconds from a fault to the end of the job")
    parser.add_argument("--folder", type=Path, help="where the files of runs that fail stay")
    parser.add_argument("--out", type=Path, help="CSV that gets a row per run")
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.runs) if args.only is None else [args.only]
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=args.folder))
    chaos = Chaos(folder, ["--mpiexec", args.mpiexec] if args.mpiexec else [], args.limit)
    print(f"undisturbed: {chaos.duration_s:.1f} s; what fails stays in {folder}", flush=True)
    rows = []
    for seed in seeds:
        rows.append(row := chaos.run(Case(seed)))
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if row["verdict"] == "ok":
            shutil.rmtree(folder / str(seed))
    if args.out:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    failed = [row["seed"] for row in rows if row["verdict"] != "ok"]
    print(f"{len(rows) - len(failed)} of {len(rows)} runs are right; wrong: {failed or 'none'}")
    if not failed:
        shutil.rmtree(folder)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
