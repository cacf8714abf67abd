"""Makes the runs of the paper's figure and of CartSafe, or of a study. benchmark.sh calls it once .venv is there.

Every (algorithm, task, seed) has a folder runs/benchmark/TASK__ALGO__SEED. A run that has all its iterations is
skipped. One that was interrupted is resumed from its last checkpoint, also after a reboot. Finished curves are kept in
results/runs/, where a shorter one never replaces one of the paper's length. Ctrl-C lets each run finish its iteration
and save; a second Ctrl-C ends it at once.
"""

import argparse
import fcntl
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from reproduce import clusters, curves
from reproduce.curves import ALGOS, FAST, ROOT, TASKS, algos_of, say
from reproduce.studies import SETTINGS, STUDIES

ALGORITHM_CODE = ("scpo_*.py", "baselines", "scpo_envs")


PROGRAM = "benchmark.sh"  # who answers; field.py puts its name here


def fail(message):
    curves.fail(PROGRAM, message)


class Run:
    """One (task, label, seed) and the folder of its attempts. A label is an algorithm or a named run of studies.py."""

    def __init__(self, task, label, seed, iterations, runs_dir, length=None):
        self.name, self.seed = f"{task}__{label}__{seed}", seed
        self.script = "scpo_discrete.py" if task == "CartSafe-v0" else ALGOS.get(label, "scpo_continuous.py")
        self.batch = 32768 if self.script.startswith("scpo_") else 32000
        self.length = length or TASKS[task].iterations
        if label == "fast":
            self.length, self.batch = FAST[task]
        self.iterations = min(iterations or self.length, self.length)
        self.task, self.group, self.folder = task, f"{task}__{label}", Path(runs_dir) / self.name
        self.settings = dict(env_id=task, seed=seed, total_timesteps=self.length * self.batch)
        self.settings.update(SETTINGS.get(label, {}))

    def attempt(self):
        """The folder of the attempt that got farthest, None if there is none."""
        attempts = [path.parent for path in self.folder.glob("*/last.pt")]
        return max(attempts, key=lambda attempt: curves.length(attempt / "progress.csv"), default=None)

    def done(self):
        attempt = self.attempt()
        return curves.length(attempt / "progress.csv") if attempt else 0

    def flags(self):
        """Its settings as words of a command line."""
        words = []
        for name, value in self.settings.items():
            flag = name.replace("_", "-")
            values = [] if isinstance(value, bool) else value if isinstance(value, list) else [value]
            words += [f"--no-{flag}" if value is False else f"--{flag}", *map(str, values)]
        return words

    def command(self):
        attempt = self.attempt()
        words = ["--resume", str(attempt)] if attempt else [*self.flags(), "--runs-dir", str(self.folder)]
        return [sys.executable, str(ROOT / self.script), *words]


def chosen(args):
    """Returns the runs asked for, seed by seed: half a campaign then still has every curve."""
    if args.study == "fast":
        iterations, pairs = args.iterations, [(task, "fast", None) for task in FAST]
    elif args.study:
        study = STUDIES[args.study]
        iterations = min(args.iterations or study.iterations, study.iterations)
        pairs = [(study.task, label, None if label in ALGOS else study.iterations) for label in study.labels]
    else:
        iterations = args.iterations
        pairs = [(task, algo, None) for task in args.tasks for algo in args.algos if algo in algos_of(task)]
    return [
        Run(task, label, seed, iterations, args.runs_dir, length)
        for seed in args.seeds
        for task, label, length in pairs
    ]


def git(*words):
    """Returns git's status and answer in the project's folder, a status above 1 where there is no git."""
    try:
        done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    except FileNotFoundError:
        return 127, ""
    return done.returncode, done.stdout.strip()


def same_code(revision, other):
    """Whether the algorithms are the same at two revisions, as git tells."""
    return revision == other or git("diff", "--quiet", revision, other, "--", *ALGORITHM_CODE)[0] == 0


def here():
    """What scpo_run.git_revision gives a run; that file can't be imported here, since it imports torch."""
    command = "git rev-parse --short=12 HEAD && git diff HEAD -- ':/*.py' ':!/tests' | git hash-object --stdin"
    told = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True).stdout.split()
    return "-dirty-".join(x[:12] for x in told if x[:7] != "e69de29") or os.getenv("SCPO_REVISION", "unknown")


def refuse_mixtures(runs, args):
    """Ends with one line if a run to count or to resume has other settings, or was made by other code."""
    references, revision = {}, here()
    for run in runs:
        attempt = run.attempt()
        if attempt is None:
            continue
        try:
            settings = curves.config(attempt / "config.json")
            if run.group not in references:
                kept = [
                    path
                    for folder in (args.results, curves.RESULTS)
                    for path in sorted(folder.glob(f"runs/{run.group}__*.json"))
                    if path.stem.rpartition("__")[2].isdecimal()  # 1-40 has other settings, as its name says
                ]
                references[run.group] = curves.config(kept[0]) if kept and not args.replace else settings
        except curves.BadFile as error:
            fail(error)
        other = curves.differences(settings, run.settings)
        other = other or curves.differences(settings, references[run.group], but=["seed", "total_timesteps"])
        if other:
            way = "" if args.replace else ", or keep it in place of others by --replace"
            fail(f"{attempt} has other settings: {other}; move it away{way}")
        for made_by in curves.revisions(settings):
            if not args.any_revision and not same_code(made_by, revision):
                fail(f"{attempt} was made by revision {made_by}, not {revision}; move it, or mix by --any-revision")


def measured_seconds(runs, stop):
    """Returns {run name: (seconds to start, seconds an iteration)}, from two iterations and 1,000 steps a task."""
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
    startup, base = {}, {}  # seconds to start, seconds a step; the baselines are alike
    for script in {measured_by(run) for run in runs}:
        steps = 32000 if script == "baselines/cpo.py" else 32768
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, ROOT / script, "--env-id", "SafetyBallRun-v0", "--runs-dir", folder]
            start = time.perf_counter()
            with open(f"{folder}/log.txt", "w") as log:
                status = watch([*command, "--total-timesteps", 2 * steps], log, stop)
            if status and not stop:
                fail(f"the measurement failed: {curves.last_line(folder)}")
            if stop:
                return {}
            seconds = curves.read(next(Path(folder).glob("*/progress.csv")))["seconds"]
        startup[script] = time.perf_counter() - start - seconds[1]
        base[script] = (seconds[1] - seconds[0]) / steps
    seconds = {}
    for run in runs:
        script = measured_by(run)
        a_step = base[script] + step_seconds[run.task] - step_seconds["SafetyBallRun-v0"]
        seconds[run.name] = startup[script], run.batch * a_step
    return seconds


def measured_by(run):
    return "scpo_continuous.py" if run.script.startswith("scpo_") else "baselines/cpo.py"


def estimate(runs, measured, jobs):
    """Returns how long the runs will take, in words: what is left, but never less than the longest of them."""
    each = [measured[run.name][0] + measured[run.name][1] * (run.iterations - run.done()) for run in runs]
    seconds = max(max(each), sum(each) / jobs)
    return f"{seconds / 3600:.1f} hours" if seconds > 3600 else f"{max(1, math.ceil(seconds / 60))} minutes"


def watch(command, log, stop, has_enough=lambda: False, **options):
    """Runs a command until it ends. Returns its status, 0 if it was asked to leave.

    It is asked to save and leave for each signal in `stop`, and once when it has enough.
    """
    words = list(map(str, command))
    process = subprocess.Popen(words, stdout=log, stderr=log, env=curves.ONE_THREAD, start_new_session=True, **options)
    asked = 0
    while process.poll() is None:
        time.sleep(0.2)
        if asked < len(stop) or (not asked and has_enough()):
            process.send_signal(signal.SIGTERM)  # a first one lets the script finish its iteration and save
            asked += 1
    return 0 if asked else process.returncode


def execute(run, stop, lock):
    """Makes or resumes a run in a process of its own, which holds the lock too. Returns status and last words."""

    def has_enough():
        return run.iterations < run.length and run.done() >= run.iterations

    with open(run.folder / "log.txt", "a") as log:
        status = watch(run.command(), log, stop, has_enough, pass_fds=[lock.fileno()])
    return status, curves.last_line(run.folder)


def make_one(run, make, stop):
    """Makes a run unless another process does. Returns what went wrong, "" if nothing did."""
    if stop:
        return ""
    run.folder.mkdir(parents=True, exist_ok=True)
    with open(run.folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{run.name}: another process is at work on it, left to that")
            return ""
        except OSError:
            pass  # a file system without locks
        if run.done() >= run.iterations:  # complete, or made by another process in the meantime
            return ""
        say(f"{time.strftime('%H:%M:%S')} {run.name}: from iteration {run.done()} to {run.iterations}")
        status, last = make(run, stop, lock)
    return f"status {status}: {last}" if status or (run.done() < run.iterations and not stop) else ""


def make_all(runs, make, jobs, stop, args):
    """Makes each run that isn't complete by make(run, stop, lock), `jobs` at a time, and keeps the curves of all.

    Returns the runs that failed. A signal in `stop` ends the process, once each run has saved.
    """
    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(make_one, run, make, stop): run for run in runs}
        for future in as_completed(futures):
            run, error = futures[future], future.exception()
            wrong = f"{type(error).__name__}: {error}" if error else future.result() or keep(run, args)
            if wrong:
                say(f"{time.strftime('%H:%M:%S')} {run.name} FAILED, {' '.join(wrong.split())}")
                failed.append(run)
    if stop:
        say("Stopped; the same command goes on where it was")
        raise SystemExit(128 + stop[0])
    return failed


def keep(run, args):
    """Keeps a run's curve if it is as long as asked for. Returns what went wrong, "" if nothing did."""
    try:
        said = curves.keep(run.attempt(), run.name, args.results, args.replace) if run.done() >= run.iterations else ""
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if said:
        say(said)
    return ""


def signals():
    """Returns a list that gets the signals that ask to stop, from now on."""
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, frame: stop.append(number))
    return stop


def check_seeds(seeds):
    for seed in seeds:
        if not 0 <= seed < 2**31:
            fail(f"--seeds has {seed}, but must be in [0, 2^31)")


def folder(flag, given, default):
    """Returns the folder that a flag names; it needn't be there yet."""
    path = Path(default if given is None else given).absolute()
    try:
        possible = given != "" and all(place.is_dir() or not place.exists() for place in (path, *path.parents))
    except OSError:  # too long a name, no right to look
        possible = False
    if not possible:
        fail(f"{flag} is {given!r}, but must be a folder")
    return path


def make_folders(args):
    """Makes the folders for runs and results, and ends with one line where nothing can be written there."""
    for flag, path in (("--runs-dir", args.runs_dir), ("--results", args.results)):
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path):
                pass
        except OSError as error:
            fail(f"{flag} is '{path}', but nothing can be written there: {error.strerror}")


def parse(argv=None):
    """Returns the flags and the runs that they choose."""
    parser = curves.parser("benchmark.sh", __doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    add("--algos", nargs="+", choices=ALGOS, metavar="ALGO", help=", ".join(ALGOS))
    add("--study", choices=(*STUDIES, "fast"), help="the runs of a study instead of the campaign's")
    add("--seeds", nargs="+", type=int, help="default: 1 2 3 4, the study's, or 1 with --quick")
    add("--missing", action="store_true", help="only the runs that --results has no curve of in full length")
    add("--iterations", type=int, help="stop each run there; a later call without goes on to the paper's length")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each (default: a core a run)")
    add("--quick", action="store_true", help="every script on every task, two iterations, into runs/quick")
    add("--dry-run", action="store_true", help="print the commands and do nothing")
    add("--engine", choices=("local", "ray", "slurm"), default="local", help="where the runs are made")
    add("--ray-address", default="auto", help="of the Ray cluster (default: auto, the one this machine is part of)")
    add("--hours", type=int, default=24, help="Slurm's time limit for a run, which is resumed when submitted again")
    add("--runs-dir", help="default: runs/benchmark")
    add("--results", help="folder for curves, figures and tables (default: results)")
    add("--replace", action="store_true", help="let new curves replace kept ones of other settings or lengths")
    add("--any-revision", action="store_true", help="count and resume runs that another revision's code has made")
    add("--one", type=int, help=argparse.SUPPRESS)  # a task of Slurm's array: the run of this index, and no figures
    args = parser.parse_args(argv)
    if args.study and (args.tasks or args.algos or args.quick):
        fail("--study has runs of its own: leave out --tasks, --algos and --quick")
    for name in ("iterations", "jobs", "hours"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            fail(f"--{name} is {getattr(args, name)}, but must be at least 1")
    default = 1 if args.quick else STUDIES[args.study].seeds if args.study in STUDIES else 4
    seeds = args.seeds or range(1, 1 + default)
    check_seeds(seeds)
    args.seeds = list(dict.fromkeys(seeds))
    args.tasks, args.algos = (list(dict.fromkeys(x)) for x in (args.tasks or TASKS, args.algos or ALGOS))
    args.iterations = args.iterations or (2 if args.quick else None)
    scratch = ROOT / "runs" / "quick"
    args.runs_dir = folder("--runs-dir", args.runs_dir, scratch if args.quick else ROOT / "runs" / "benchmark")
    args.results = folder("--results", args.results, scratch / "results" if args.quick else ROOT / "results")
    runs = chosen(args)
    if not runs:
        fail("--tasks and --algos leave no run: PPO is made on CartSafe-v0 alone, the baselines on all other tasks")
    if args.missing and args.engine == "slurm":
        fail("--missing doesn't work with --engine slurm: the tasks of an array count the same runs to its end")
    if args.missing:
        kept = args.results / "runs"
        runs = [run for run in runs if curves.length(kept / f"{run.name}.csv") < run.iterations]
    if args.one is not None and not 0 <= args.one < len(runs):
        fail(f"--one is {args.one}, but there are {len(runs)} runs")
    args.jobs = max(1, min(args.jobs, len(runs)))
    return args, runs


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args, runs = parse(argv)
    if not args.dry_run:
        make_folders(args)
    refuse_mixtures(runs, args)
    runs = runs if args.one is None else [runs[args.one]]
    todo = [run for run in runs if run.done() < run.iterations]
    if args.engine == "slurm":
        return clusters.submit_to_slurm(runs, args, argv) if todo else say("All runs are complete")
    if args.dry_run:
        return say(*(shlex.join(run.command()) for run in todo))
    say(f"{len(runs)} runs, {len(runs) - len(todo)} of them complete, {args.jobs} at a time.")
    stop = signals()
    make, jobs = execute, args.jobs
    if args.engine == "ray":
        make, jobs = clusters.connect_to_ray(args.ray_address, here()), max(1, len(runs))
    elif todo and args.one is None:
        say("Measuring this machine ...")
        measured = measured_seconds(todo, stop)
        if measured:
            say(f"About {estimate(todo, measured, jobs)}. Less: --tasks, --algos, --seeds, --iterations, --quick.")
    failed = make_all(runs, make, jobs, stop, args)
    if args.one is None and list(args.results.glob("runs/*__*__*.csv")):
        command = [sys.executable, "-m", "reproduce.plot", "--results", str(args.results)]
        command += ["--iterations", str(args.iterations)] if args.iterations else []
        if subprocess.run(command, cwd=ROOT).returncode and not failed:
            raise SystemExit(1)
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {', '.join(run.name for run in failed)}")


if __name__ == "__main__":
    main()
