"""What all of reproduce/ shares: the paper's tasks and algorithms, and curves, kept and published.

A kept run is results/runs/TASK__LABEL__SEED.csv, some columns of its progress.csv, and .json, its config.json. LABEL is
an algorithm or a named run of studies.py.
"""

import argparse
import csv
import gzip
import importlib
import io
import json
import os
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
# For the scripts: one thread, and the files beside them even where another clone is installed
PATHS = os.pathsep.join(filter(None, (str(ROOT), os.getenv("PYTHONPATH"))))
ONE_THREAD = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONPATH=PATHS)


class Task(NamedTuple):
    cost_limit: float  # cost an episode may spend
    iterations: int  # of the published runs


TASKS = {
    "SafetyBallCircle-v0": Task(25, 500),
    "SafetyBallRun-v0": Task(25, 100),
    "SafetyBallGather-v0": Task(0.2, 500),
    "SafetyBallReach-v0": Task(10, 500),
    "CartSafe-v0": Task(1, 150),
}
FAST = {  # of --fast: iterations, and steps in each
    "SafetyBallCircle-v0": (400, 8192),
    "SafetyBallRun-v0": (80, 8192),
    "CartSafe-v0": (120, 8192),
}
ALGOS = {  # name: script; on CartSafe the script is scpo_discrete.py
    "SCPO": "scpo_continuous.py",
    "TRPO": "baselines/trpo.py",
    "TRPO-L": "baselines/trpo_lagrangian.py",
    "CPO": "baselines/cpo.py",
    "PCPO": "baselines/pcpo.py",
    "PDO": "baselines/pdo.py",
    "PPO": "scpo_discrete.py",
}
UNCONSTRAINED = ("TRPO", "PPO")
COLUMNS = (
    "iteration global_step episodic_return episodic_cost episodic_cost_std episodic_length safe_episode_rate episodes "
    "seconds".split()
)
# Entries of config.json that concern only the process, or say who made the run. All others are the run's settings
NOT_SETTINGS = (
    "runs_dir resume device compile step_timeout iteration_timeout min_safe_rate track wandb_project_name wandb_entity "
    "num_workers exp_name num_iterations revision revisions python torch numpy gymnasium".split()
)


class BadFile(ValueError):
    """A file that can't be used; its message says which and why."""


def algos_of(task):
    """The algorithms that the paper has on a task: its figure has no PPO, its CartSafe no other baseline."""
    return ["SCPO", "PPO"] if task == "CartSafe-v0" else [algo for algo in ALGOS if algo != "PPO"]


def say(*lines):
    """Prints. Escapes characters that the terminal lacks, and goes on if the terminal is gone."""
    try:
        sys.stdout.reconfigure(errors="backslashreplace")
        print(*lines, sep="\n", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def fail(program, message, status=2):
    """Ends with one line and an exit status, 2 for bad input."""
    print(f"{program}: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(status)


@contextmanager
def interruptible(program):
    """Decorates a main, which Ctrl-C then ends with one line."""
    try:
        yield
    except KeyboardInterrupt:
        fail(program, "interrupted", 130)


def parser(program, about):
    """Returns a reader of flags that takes no abbreviations, and answers bad input with one line."""
    wide = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog=program, description=about, formatter_class=wide, allow_abbrev=False)
    made.error = lambda message: fail(program, message.replace("argument ", ""))
    return made


def write(path, content):
    """Writes text or bytes as a whole or not at all: beside the file, then in place."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # there after an error alone


def read(path):
    """Returns {column: array} of a CSV file of numbers, without a last line that was cut off."""
    try:
        lines = Path(path).read_text().splitlines(keepends=True)
        head, *rows = list(csv.reader(line for line in lines if line.endswith("\n"))) or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise BadFile(f"{path} can't be read ({getattr(error, 'strerror', 'not a text file')})")
    if not rows:
        raise BadFile(f"{path} has no complete row")
    try:
        values = np.array(rows, dtype=float).T
        if len(values) != len(head):
            raise ValueError("a row has as many cells as the head")
        return dict(zip(head, values))
    except ValueError:
        raise BadFile(f"{path} isn't a table of numbers")


def length(path):
    """How many iterations a progress.csv or a kept curve has, 0 where there is none."""
    try:
        return len(read(path)["iteration"])
    except (ValueError, KeyError):
        return 0


def last_line(folder):
    """What the process that logs into a folder said last."""
    return " ".join(Path(folder, "log.txt").read_text(errors="replace").strip().splitlines()[-1:])[-300:]


def config(path):
    """Returns the settings of a run from its config.json."""
    try:
        settings = dict(json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError):
        raise BadFile(f"{path} is missing or not a run's settings")
    estimator = settings.pop("safety_estimator", None)  # of runs from before --safety-lambdas
    if estimator is not None:
        named = {"mc": [1.0], "one-step": [0.0], "mean": [0.0, 1.0]}
        settings["safety_lambdas"] = named[estimator] if estimator in named else [float(estimator)]
    return settings


def revisions(settings):
    """All revisions of the code that took part in a run."""
    return settings.get("revisions") or [settings.get("revision", "")]


@cache
def defaults(script):
    """Returns the defaults of a script's flags, which an older run lacks; none of a script that isn't here."""
    places = {Path(place).name: place for place in ALGOS.values()}
    if script not in places:
        return {}
    from scpo_run import RunArgs  # only now, since both import torch

    module = importlib.import_module(places[script].removesuffix(".py").replace("/", "."))
    return {**vars(module.Args()), **vars(RunArgs())}


def plain(value):
    """Returns a setting as numbers where it is some: 0 and 0.0 are the same, and so are a list and a tuple."""
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def differences(ours, theirs, but=()):
    """Says in words which settings of two runs differ. A flag that came after a run had its default there."""
    left_out = {*NOT_SETTINGS, *but}
    if "script" in ours and "script" in theirs and (ours.keys() ^ theirs.keys()) - left_out:
        ours, theirs = ({**defaults(run["script"]), **run} for run in (ours, theirs))
    names = [name for name in ours if name in theirs and name not in left_out]
    names = [name for name in names if plain(ours[name]) != plain(theirs[name])]
    return ", ".join(f"{name} {ours[name]}, not {theirs[name]}" for name in names)


def keep(attempt, name, results, replace=False):
    """Copies a run to results/runs/NAME.csv and .json, each as a whole. Returns what there is to say about it.

    A shorter curve never replaces a kept one of the paper's length. `replace` is needed to replace any other longer
    curve, or one of other settings. A longer run of the same settings replaces a kept one by itself.
    """
    progress, settings = read(attempt / "progress.csv"), config(attempt / "config.json")
    path = results / "runs" / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = [column for column in COLUMNS if column in progress]
    rows = [",".join(columns)]
    for row in zip(*(progress[column] for column in columns)):
        rows.append(",".join(f"{value:.5g}" if value < 1e5 else f"{value:.0f}" for value in row))
    files = {path: "\n".join(rows) + "\n", path.with_suffix(".json"): json.dumps(settings, indent=2) + "\n"}
    same = path.exists() and path.read_bytes() == files[path].encode()
    said, had, have = "", 0 if same else length(path), len(progress["iteration"])
    if had:
        old = config(path.with_suffix(".json"))
        other = differences(settings, old, but=["total_timesteps"] if have > had else ())
        said = f"{had} iterations of {'+'.join(revisions(old))}" + (f", other settings: {other}" if other else "")
        full = TASKS.get(name.split("__")[0], Task(0, float("inf"))).iterations
        if had > have and (had >= full or not replace):
            return f"{name}: its {have} iterations are not kept, {path} has {said}"
        if other and not replace:
            return f"{name}: not kept without --replace, {path} has {said}"
        said = f"{name}: replaces {said}"
    for target, text in files.items():
        write(target, text)
    return said


def load(results, task, label, iterations):
    """Returns the kept runs of a label that have `iterations`, and {seed: length} of those that don't.

    The runs: {column: (seeds, iterations)}, "seed" and "revision": (seeds,); {} if there are none. Raises BadFile if
    their settings differ.
    """
    runs, short, first = [], {}, None
    paths = {path.stem.split("__")[2]: path for path in (results / "runs").glob(f"{task}__{label}__*.csv")}
    for seed in sorted((seed for seed in paths if seed.isdecimal()), key=int):
        run = read(paths[seed])
        missing = [column for column in COLUMNS[:-1] if column not in run]
        if missing:
            raise BadFile(f"{paths[seed]} has no column {missing[0]}")
        if len(run["iteration"]) < iterations:
            short[int(seed)] = len(run["iteration"])
            continue
        settings = config(paths[seed].with_suffix(".json")) if paths[seed].with_suffix(".json").exists() else {}
        if settings.get("seed", int(seed)) != int(seed):
            raise BadFile(f"{paths[seed]} is a run of seed {settings['seed']}, not of {seed}")
        first = first or settings
        other = differences(settings, first, but=["seed"])
        if other:
            raise BadFile(f"{paths[seed]} can't be averaged with the first seed's run, it has other settings: {other}")
        made_by = "+".join(revisions(settings)) if settings else "unknown"
        runs.append(
            dict({column: run[column][:iterations] for column in COLUMNS[:-1]}, seed=int(seed), revision=made_by)
        )
    return {name: np.array([run[name] for run in runs]) for name in runs[0]} if runs else {}, short


def load_published():
    """Returns {(task, algorithm, metric): (iterations, values)}, read off the paper's figures."""
    points = {}
    with gzip.open(RESULTS / "published_curves.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            point = int(row["iteration"]), float(row["value"])
            points.setdefault((row["env_id"], row["algo"], row["metric"]), []).append(point)
    return {key: tuple(map(np.array, zip(*sorted(curve)))) for key, curve in points.items()}


def last_tenth(values):
    """Mean of the last tenth of the last axis."""
    return values[..., -max(1, values.shape[-1] // 10) :].mean(-1)


def rows_of(path):
    """Returns the rows of a CSV file as dicts of strings, none where there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path, rows):
    """Writes dicts as CSV, a value with its range as three columns."""
    flat = []
    for row in rows:
        flat.append({})
        for name, x in row.items():
            parts = zip((name, f"{name} low", f"{name} high"), x if isinstance(x, tuple) else (x,))
            flat[-1].update({part: f"{x:.6g}" if isinstance(x, float) else x for part, x in parts})
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(name for row in flat for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write(path, file.getvalue())
