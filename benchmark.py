"""Makes the runs of the paper's figure and of CartSafe: what benchmark.sh calls once its environment is there.

Every (algorithm, task, seed) has a folder runs/benchmark/TASK__ALGO__SEED. A run that has all its iterations is skipped, one
that was interrupted is resumed from its last checkpoint, also after a reboot; finished curves are copied to results/runs/.
Ctrl-C lets each run finish its iteration and save.
"""

import argparse
import csv
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import studies

ROOT = Path(__file__).parent
TASKS = ("SafetyBallCircle-v0", "SafetyBallRun-v0", "SafetyBallGather-v0", "SafetyBallReach-v0", "CartSafe-v0")
SCRIPTS = {
    "SCPO": "scpo_continuous.py",
    "TRPO": "baselines/trpo.py",
    "TRPO-L": "baselines/trpo_lagrangian.py",
    "CPO": "baselines/cpo.py",
    "PCPO": "baselines/pcpo.py",
    "PDO": "baselines/pdo.py",
    "PPO": "scpo_discrete.py",
}
ON_CARTSAFE = ("SCPO", "PPO")  # as in the paper; its figure has no PPO, its CartSafe no other baseline
LENGTHS = {"SafetyBallRun-v0": 100, "CartSafe-v0": 150}  # iterations of the published runs, 500 for the others
LIMITS = {
    "SafetyBallCircle-v0": 25,
    "SafetyBallRun-v0": 25,
    "SafetyBallGather-v0": 0.2,
    "SafetyBallReach-v0": 10,
    "CartSafe-v0": 1,
}


def fail(message):
    """Answers bad input: one line, exit status 2."""
    print(f"benchmark.sh: {message}", file=sys.stderr)
    raise SystemExit(2)


class Run:
    """One (algorithm, task, seed) and the folder that its attempts share."""

    def __init__(self, algo, task, seed, iterations, runs_dir):
        self.name = f"{task}__{algo}__{seed}"
        self.algo, self.task, self.seed = algo, task, seed
        self.script = "scpo_discrete.py" if task == "CartSafe-v0" else SCRIPTS[algo]
        self.length = LENGTHS.get(task, 500)
        self.iterations = min(iterations or self.length, self.length)
        self.batch = 32768 if algo in ("SCPO", "PPO") else 32000
        self.folder = Path(runs_dir) / self.name

    def attempt(self):
        """The folder of the attempt that got farthest, None if there is none."""
        return max((path.parent for path in self.folder.glob("*/last.pt")), key=lambda path: len(rows(path)), default=None)

    def done(self):
        attempt = self.attempt()
        return len(rows(attempt)) if attempt else 0

    def new_words(self):
        return ["--env-id", self.task, "--seed", self.seed, *(["--k", 0, "--beta", 0] if self.algo == "PPO" else [])]

    def command(self):
        attempt = self.attempt()
        words = ["--resume", attempt] if attempt else [*self.new_words(), "--runs-dir", self.folder]
        return [sys.executable, ROOT / self.script, *words, "--total-timesteps", self.length * self.batch]


def rows(attempt):
    try:
        with open(attempt / "progress.csv") as file:
            return list(csv.DictReader(file))
    except OSError:
        return []


def chosen(args):
    """Returns the runs asked for, seed by seed: half a campaign then still has every curve."""
    runs = []
    for seed in args.seeds:
        for task in args.tasks:
            for algo in args.algos:
                if algo in ON_CARTSAFE if task == "CartSafe-v0" else algo != "PPO":
                    runs.append(Run(algo, task, seed, args.iterations, args.runs_dir))
    return runs


def measured_seconds(runs):
    """Returns {run name: (seconds to start, seconds an iteration)}, from two iterations on Run and 1,000 steps of each task."""
    import gymnasium as gym

    import scpo_envs  # noqa: F401

    step_seconds = {}
    for task in {run.task for run in runs} | {"SafetyBallRun-v0"}:
        env = gym.make(task, disable_env_checker=True)
        env.reset(seed=0)
        env.action_space.seed(0)
        start = time.perf_counter()
        for _ in range(1000):
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        step_seconds[task] = (time.perf_counter() - start) / 1000
    startup, base = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for algo in {"SCPO" if run.algo in ("SCPO", "PPO") else "CPO" for run in runs}:
            command = [sys.executable, ROOT / SCRIPTS[algo], "--env-id", "SafetyBallRun-v0", "--runs-dir", folder]
            command += ["--total-timesteps", 65536 if algo == "SCPO" else 64000]
            start = time.perf_counter()
            result = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=one_thread())
            if result.returncode:
                fail(f"the measurement failed: {' '.join(result.stderr.split())[-300:]}")
            attempt = next(Path(folder).glob(f"*{Path(SCRIPTS[algo]).stem}*"))
            seconds = [float(row["seconds"]) for row in rows(attempt)]
            startup[algo] = time.perf_counter() - start - seconds[1]
            base[algo] = seconds[1] - seconds[0]
    measured = {}
    for run in runs:
        algo = "SCPO" if run.algo in ("SCPO", "PPO") else "CPO"
        stepping = run.batch * (step_seconds[run.task] - step_seconds["SafetyBallRun-v0"])
        measured[run.name] = startup[algo], base[algo] + stepping
    return measured


def estimate(runs, measured, jobs):
    """Returns how long the runs will take, in words."""
    seconds = sum(measured[run.name][0] + measured[run.name][1] * (run.iterations - run.done()) for run in runs) / jobs
    return f"{seconds / 3600:.1f} hours" if seconds > 3600 else f"{max(1, math.ceil(seconds / 60))} minutes"


def one_thread():
    return dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")


def execute(run, stop):
    """Runs or resumes one run in a process of its own until it has its iterations; returns its exit status."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with open(run.folder / "log.txt", "a") as log:
        command = list(map(str, run.command()))
        process = subprocess.Popen(command, stdout=log, stderr=log, env=one_thread(), start_new_session=True)
        asked = False
        while process.poll() is None:
            time.sleep(0.5)
            if not asked and (stop.is_set() or (run.iterations < run.length and run.done() >= run.iterations)):
                process.send_signal(signal.SIGTERM)  # it finishes its iteration, saves and leaves
                asked = True
    return 0 if asked else process.returncode


def run_locally(runs, args):
    """`--jobs` runs at a time. Returns the runs that failed."""
    waiting, failed, stop = queue.Queue(), [], threading.Event()
    for run in runs:
        waiting.put(run)

    def work():
        while not stop.is_set():
            try:
                run = waiting.get_nowait()
            except queue.Empty:
                return
            print(f"{time.strftime('%H:%M:%S')} {run.name}: from iteration {run.done()} to {run.iterations}", flush=True)
            status = execute(run, stop)
            if status:
                last = (run.folder / "log.txt").read_text().strip().splitlines()[-1:]
                print(f"{time.strftime('%H:%M:%S')} {run.name} FAILED, status {status}: {' '.join(last)[-300:]}", flush=True)
                failed.append(run)
            elif run.done():
                studies.keep(run.attempt(), run.name, args.results)

    workers = [threading.Thread(target=work) for _ in range(args.jobs)]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if stop.is_set():
        raise SystemExit("Stopped; the same command goes on where it was")
    return failed


SLURM = """#!/bin/bash
#SBATCH --job-name=scpo
#SBATCH --array=0-{last}
#SBATCH --cpus-per-task=1
#SBATCH --mem=4G
#SBATCH --time={hours}:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --output={runs_dir}/slurm-%A_%a.log
# Made by: benchmark.sh --engine slurm. A task is one run, which saves on SIGTERM and is resumed when it is submitted again.
cd {root}
runs=(
{runs}
)
set -- ${{runs[$SLURM_ARRAY_TASK_ID]}}
{python} benchmark.py --tasks $1 --algos $2 --seeds $3 --jobs 1 --runs-dir {runs_dir} {more} --one &
trap "kill -TERM $!; wait $!" TERM
wait $!
"""


def submit_to_slurm(runs, args):
    """Writes an array job, a run a task, and submits it; with --dry-run prints it."""
    words = "\n".join(f'"{run.task} {run.algo} {run.seed}"' for run in runs)
    more = f"--iterations {args.iterations}" if args.iterations else ""
    places = dict(
        root=shlex.quote(str(ROOT)),
        python=shlex.quote(sys.executable),
        runs_dir=shlex.quote(str(Path(args.runs_dir).resolve())),
    )
    script = SLURM.format(last=len(runs) - 1, hours=24, runs=words, more=more, **places)
    if args.dry_run:
        return print(script)
    path = Path(args.runs_dir) / "slurm.sh"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    try:
        subprocess.run(["sbatch", path], check=True)
    except FileNotFoundError:
        fail("--engine slurm: there is no sbatch here")
    print("When the jobs have ended, the same command without --engine collects what is complete and draws the figures.")


def on_a_worker(script, words, length, iterations, files):
    """Runs on a Ray worker, in a copy of the project: makes or resumes a run, and yields its files whenever it has saved.

    files: {name: bytes} of the attempt to go on with, {} for a new one. Yields (attempt's name, files, None), last the status.
    """
    with tempfile.TemporaryDirectory() as folder:
        if files:
            attempt = Path(folder) / files.pop("attempt")
            attempt.mkdir()
            for name, content in files.items():
                (attempt / name).write_bytes(content)
            words = ["--resume", str(attempt)]
        command = [sys.executable, script, *words, "--total-timesteps", str(length)]
        command += [] if files else ["--runs-dir", folder]
        saved, asked = None, False
        with open(Path(folder) / "log.txt", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=one_thread())
        while True:
            status = process.poll()
            for last in Path(folder).glob("*/last.pt"):
                if last.stat().st_mtime_ns != saved:
                    saved = last.stat().st_mtime_ns
                    paths = [last, *(path for path in last.parent.iterdir() if path.is_file() and path != last)]
                    # last.pt first: the logs may be longer than it knows, never shorter
                    yield last.parent.name, {path.name: path.read_bytes() for path in paths if path.suffix != ".partial"}, None
                if not asked and iterations and len(rows(last.parent)) >= iterations:
                    process.send_signal(signal.SIGTERM)
                    asked = True
            if status is not None:
                said = (Path(folder) / "log.txt").read_text().strip().splitlines()[-1:]
                yield "", {}, (0 if asked else status, " ".join(said)[-300:])
                return
            time.sleep(0.5)


def run_on_ray(runs, args):
    """Sends the runs to a Ray cluster, collects their files as they save, and sends them again where a worker died."""
    try:
        import ray
    except ImportError:
        fail("--engine ray needs Ray: pip install 'ray[default]'")
    code = {"working_dir": str(ROOT), "excludes": ["runs", ".git", ".venv*", "results", "tests"]}
    try:
        ray.init(address=args.ray_address, runtime_env=code, log_to_driver=False, logging_level="error")
    except Exception as error:
        fail(f"--ray-address {args.ray_address}: no cluster there ({' '.join(str(error).split())[:200]})")
    remote = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(on_a_worker)
    failed = []

    def follow(run):
        for _ in range(20):
            attempt, files = run.attempt(), {}
            if attempt:
                files = {path.name: path.read_bytes() for path in attempt.iterdir() if path.is_file()} | {
                    "attempt": attempt.name
                }
            words = [str(word) for word in run.new_words()]
            print(f"{time.strftime('%H:%M:%S')} {run.name}: sent, from iteration {run.done()} to {run.iterations}", flush=True)
            stop_at = run.iterations if run.iterations < run.length else None
            try:
                for reference in remote.remote(run.script, words, run.length * run.batch, stop_at, files):
                    name, content, status = ray.get(reference)
                    if status is None:
                        store(run.folder / name, content)
                    elif status[0]:
                        print(f"{time.strftime('%H:%M:%S')} {run.name} FAILED, status {status[0]}: {status[1]}", flush=True)
                        return failed.append(run)
                return
            except ray.exceptions.RayError as error:
                print(
                    f"{time.strftime('%H:%M:%S')} {run.name}: its worker is gone ({type(error).__name__}); sent again",
                    flush=True,
                )
                time.sleep(1)
        failed.append(run)

    workers = [threading.Thread(target=follow, args=(run,), daemon=True) for run in runs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ray.shutdown()
    return failed


def store(attempt, files):
    """Writes an attempt's files, each as a whole; last.pt last, so that what is there can always be resumed."""
    attempt.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name == "last.pt"):
        partial = attempt / f"{name}.partial"
        partial.write_bytes(files[name])
        os.replace(partial, attempt / name)


def main():
    parser = argparse.ArgumentParser(
        prog="benchmark.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: fail(message.replace("argument ", ""))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--algos", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), metavar="ALGO", help=", ".join(SCRIPTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument(
        "--iterations", type=int, help="stop each run there; a later call without goes on to the paper's length"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="runs at a time, one thread each (default: a core a run)"
    )
    parser.add_argument("--quick", action="store_true", help="every script on every task, two iterations, into runs/quick")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and do nothing")
    parser.add_argument("--engine", choices=("local", "ray", "slurm"), default="local", help="where the runs are made")
    parser.add_argument(
        "--ray-address", default="auto", help="of the Ray cluster (default: auto, the one this machine is part of)"
    )
    parser.add_argument("--runs-dir")
    parser.add_argument("--results", type=Path, help="folder for curves, figures and table (default: results)")
    parser.add_argument(
        "--one", action="store_true", help=argparse.SUPPRESS
    )  # a task of the array job: no measurement, no figure
    args = parser.parse_args()
    for name in ("iterations", "jobs"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            fail(f"--{name} is {getattr(args, name)}, but must be at least 1")
    args.results = args.results or ROOT / ("runs/quick/results" if args.quick else "results")
    if args.quick:
        args.seeds, args.iterations = args.seeds[:1], args.iterations or 2
    args.runs_dir = args.runs_dir or ROOT / "runs" / ("quick" if args.quick else "benchmark")
    runs = chosen(args)
    if not runs:
        fail("--tasks and --algos leave no run: PPO is made on CartSafe-v0 alone, the baselines on all other tasks")
    todo = [run for run in runs if run.done() < run.iterations]
    if args.engine == "slurm":
        return submit_to_slurm(todo, args) if todo else print("All runs are complete")
    if args.dry_run:
        print("\n".join(shlex.join(map(str, run.command())) for run in todo))
        return
    print(f"{len(runs)} runs, {len(runs) - len(todo)} of them complete, {args.jobs} at a time.", flush=True)
    if todo and not args.one and args.engine == "local":
        print("Measuring this machine ...", flush=True)
        length = estimate(todo, measured_seconds(todo), args.jobs)
        print(f"About {length}. Fewer: --tasks, --algos, --seeds, --iterations, --quick; see --help.", flush=True)
    failed = (run_on_ray if args.engine == "ray" else run_locally)(todo, args)
    for run in set(runs) - set(failed):
        if run.done():
            studies.keep(run.attempt(), run.name, args.results)
    if not args.one:
        subprocess.run([sys.executable, ROOT / "plot.py", "--results", args.results], check=True)
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {', '.join(run.name for run in failed)}")


if __name__ == "__main__":
    main()
