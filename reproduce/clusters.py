"""benchmark.sh past one machine: an array job for Slurm, and runs on a Ray cluster that survive a worker's death."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reproduce import curves
from reproduce.curves import ROOT, say

SLURM = """#!/bin/bash
#SBATCH --job-name=scpo
#SBATCH --array={indices}
#SBATCH --cpus-per-task=1
#SBATCH --mem=4G
#SBATCH --time={hours}:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --output="{runs_dir}/slurm-%A_%a.log"
# Made by benchmark.sh --engine slurm. A task is one run, which saves on SIGTERM and is resumed when submitted again.
cd {root}
exec {command} --one "$SLURM_ARRAY_TASK_ID"
"""


def submit_to_slurm(runs, args, argv):
    """Writes an array job, a task for each run that isn't complete, and submits it; with --dry-run prints it."""
    words = [word for word in argv if word != "--dry-run"]  # what comes later counts
    words += ["--engine", "local", "--jobs", 1, "--runs-dir", args.runs_dir, "--results", args.results]
    script = SLURM.format(
        indices=",".join(str(i) for i, run in enumerate(runs) if run.done() < run.iterations),
        hours=args.hours,
        runs_dir=args.runs_dir,
        root=shlex.quote(str(ROOT)),
        command=shlex.join(map(str, [sys.executable, "-m", "reproduce.benchmark", *words])),
    )
    if args.dry_run:
        return say(script)
    path = args.runs_dir / "slurm.sh"
    curves.write(path, script)
    try:
        status = subprocess.run(["sbatch", path]).returncode
    except FileNotFoundError:
        curves.fail("benchmark.sh", "--engine slurm: there is no sbatch here")
    if status:
        raise SystemExit(status)
    say("When the jobs have ended, the same command without --engine collects what is complete and draws the figures.")


def on_a_worker(script, words, attempt, files, iterations):
    """Makes or resumes a run on a Ray worker, in a copy of the project, and yields its files whenever it has saved.

    attempt, files: the name of the attempt to go on with and its {name: bytes}; "" and {} for a new one. iterations:
    where to stop, None at the run's end. Yields (attempt's name, files, None), at last ("", {}, (status, last words)).
    """
    with tempfile.TemporaryDirectory() as folder:
        store(Path(folder) / attempt, files)
        words = ["--resume", f"{folder}/{attempt}"] if attempt else [*words, "--runs-dir", folder]
        saved, asked = None, False
        with open(f"{folder}/log.txt", "w") as log:
            process = subprocess.Popen([sys.executable, script, *words], stdout=log, stderr=log, env=curves.ONE_THREAD)
        while True:
            status = process.poll()
            for last in Path(folder).glob("*/last.pt"):
                if last.stat().st_mtime_ns != saved:
                    saved = last.stat().st_mtime_ns
                    paths = [last, *(path for path in last.parent.iterdir() if path.is_file() and path != last)]
                    # last.pt first: the logs may be longer than it knows, never shorter
                    yield (
                        last.parent.name,
                        {path.name: path.read_bytes() for path in paths if path.suffix != ".partial"},
                        None,
                    )
                if not asked and iterations and curves.length(last.parent / "progress.csv") >= iterations:
                    process.send_signal(signal.SIGTERM)
                    asked = True
            if status is not None:
                yield "", {}, (0 if asked else status, curves.last_line(folder))
                return
            time.sleep(0.5)


def store(attempt, files):
    """Writes an attempt's files, each as a whole; last.pt last, so that what is there can always be resumed."""
    attempt.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name == "last.pt"):
        partial = attempt / f"{name}.partial"
        partial.write_bytes(files[name])
        os.replace(partial, attempt / name)


def connect_to_ray(address, revision):
    """Returns follow(run, stop, lock), which makes a run on a Ray cluster and sends it again where its worker died."""
    try:
        import ray
    except ImportError:
        curves.fail("benchmark.sh", "--engine ray needs Ray: pip install 'ray[default]'")
    code = {"working_dir": str(ROOT), "excludes": ["runs", ".git", ".venv*", "results", "tests"]}
    code["env_vars"] = {"SCPO_REVISION": revision}  # since there is no .git to ask
    try:
        ray.init(address=address, runtime_env=code, log_to_driver=False, logging_level="error")
    except Exception as error:
        curves.fail("benchmark.sh", f"--ray-address {address}: no cluster there ({' '.join(str(error).split())[:200]})")
    remote = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(on_a_worker)

    def follow(run, stop, lock):
        for _ in range(20):
            attempt, iterations = run.attempt(), run.iterations if run.iterations < run.length else None
            files = {path.name: path.read_bytes() for path in attempt.iterdir() if path.is_file()} if attempt else {}
            answers = remote.remote(run.script, run.flags(), attempt.name if attempt else "", files, iterations)
            try:
                while not stop:
                    if ray.wait([answers], timeout=1)[0]:
                        name, files, end = ray.get(next(answers))
                        if end:
                            return end
                        store(run.folder / name, files)
                return 0, ""
            except ray.exceptions.RayError as error:
                say(f"{run.name}: its worker is gone ({type(error).__name__}), sent again from iteration {run.done()}")
                time.sleep(1)
        return 1, "its workers died 20 times"

    return follow
