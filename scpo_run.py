"""What a run needs besides its algorithm, for all seven scripts: flags, a folder, logs, checkpoints, --resume, signals.

A script calls `run(train, Args, TASK_SETTINGS)`. Its `train(args, checkpoint=None)` is a generator. It yields a dict
once the task and the networks stand, with "checkpoint" alone, and another one after each iteration:

    checkpoint    tensors and plain values to go on from; "iteration" and "agent", the networks' weights, are among them
    scalars       {"group/name": value} to log
    episodes      a dict for each episode that ended: iteration, global_step, env, return, cost, length, safe
    sampled_from  the weights of the policy that played these episodes

A run leaves runs/<env>__<script>__<seed>__<time>/ with config.json, progress.csv (a row an iteration), episodes.csv (a
row an episode), TensorBoard events, last.pt, from which --resume goes on to the last bit, and best_safe.pt, the policy
that earned most within the limit.
"""

import contextlib
import csv
import faulthandler
import fcntl
import importlib.util
import io
import itertools
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Optional

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class RunArgs:
    runs_dir: str = "runs"  # folder that gets a folder for this run
    resume: Optional[str] = None  # folder of a run to go on with; more --total-timesteps make a complete run longer
    min_safe_rate: float = 0.8  # share of an iteration's episodes that must be safe for best_safe.pt to take its policy
    iteration_timeout: float = 3600.0  # seconds an iteration may take; then the run ends and shows where it hangs
    track: bool = False  # log to Weights & Biases too (pip install wandb)
    wandb_project_name: str = "scpo"  # Weights & Biases project
    wandb_entity: Optional[str] = None  # Weights & Biases team (None: yours)


VERSIONS = dict(
    python=platform.python_version(), torch=str(torch.__version__), numpy=np.__version__, gymnasium=gym.__version__
)
# What --resume may change, for it concerns the process; all other flags define the run
PROCESS_FLAGS = "total_timesteps device compile resume iteration_timeout track wandb_project_name wandb_entity".split()


def parse(cls, argv, **options):
    """Returns tyro's reading of a command line. A wrong flag is a ValueError of one line, where tyro prints a box."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(cls, args=argv, **options)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        lines = [line.strip(" │|") for line in said.getvalue().splitlines()]
        borders = [i for i, line in enumerate(lines) if line[:1] in tuple("╭─╰+-")] + [len(lines)]
        raise ValueError(" ".join(lines[borders[0] + 1 : borders[1]])) from None


def read_flags(Args, task_settings, script, argv=None):
    """Returns the flags of Args and RunArgs, and the checkpoint of --resume or None.

    The defaults are the task's settings or, with --resume, those of the run to go on with.
    """

    @dataclass
    class Flags(RunArgs, Args):
        pass

    given, _ = parse(Flags, argv, add_help=False, return_unknown_args=True)  # --env-id and --resume set the defaults
    checkpoint = None if given.resume is None else load_checkpoint(given.resume, script, Flags)
    settings = task_settings.get(given.env_id, task_settings["any other task"])
    default = Flags(**(checkpoint["args"] if checkpoint else dict(settings, env_id=given.env_id)))
    args = parse(Flags, argv, default=default)
    for name, value in asdict(default).items() if checkpoint else ():
        if name not in PROCESS_FLAGS and getattr(args, name) != value:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is {getattr(args, name)}, but must be {value}, as in the run to go on with")
    for name, is_allowed, allowed in (
        ("runs_dir", args.runs_dir, "the name of a folder"),
        ("min_safe_rate", 0 <= args.min_safe_rate <= 1, "in [0, 1]"),
        ("iteration_timeout", 0 < args.iteration_timeout <= 1e6, "above 0 and at most 1e6"),
        ("track", not args.track or importlib.util.find_spec("wandb"), "off without wandb: pip install wandb"),
    ):
        if not is_allowed:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)!r}, but must be {allowed}")
    return args, checkpoint


def load_checkpoint(folder, script, Flags):
    """Returns what last.pt in a run's folder holds. Raises ValueError if that is no checkpoint of this script."""
    path = Path(folder) / "last.pt"
    if not path.is_file():
        raise ValueError(f"--resume {folder}: there is no {path}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        made_by, settings = checkpoint["script"], checkpoint["args"]
        checkpoint["iteration"], checkpoint["agent"], checkpoint["files"], checkpoint["best_return"]
    except Exception as error:
        raise ValueError(f"--resume {folder}: {path} is truncated or not a checkpoint of ours") from error
    if made_by != script.name:
        raise ValueError(f"--resume {folder}: that run was made by {made_by}")
    differing = {field.name for field in fields(Flags)} ^ settings.keys()
    if differing:
        raise ValueError(f"--resume {folder}: made by another version of {made_by}: {', '.join(sorted(differing))}")
    return checkpoint


def save(path, **content):
    """Writes tensors and plain values as a whole or not at all: beside `path`, to the disk, then in place."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def git_revision(folder):
    """The commit, with "-dirty" where a Python file differs from it, "unknown" outside git."""
    git, options = ["git", "-C", str(folder)], dict(capture_output=True, text=True)
    try:
        commit = subprocess.run([*git, "describe", "--always", "--abbrev=12"], check=True, **options).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ":/*.py"], **options).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("-dirty" if changed else "")


def open_folder(args, script, checkpoint):
    """Makes the run's folder, or opens that of --resume and cuts off what was logged after its checkpoint.

    Returns its path and a lock on it, an open file. Raises ValueError if it can't be written or another process has it.
    """
    revision = git_revision(script.parent)
    name = f"{args.env_id.replace('/', '-').replace(':', '-')}__{script.stem}__{args.seed}__{int(time.time())}"
    folder = Path(args.runs_dir) / name if args.resume is None else Path(args.resume)
    try:
        if not checkpoint:
            for number in itertools.count(2):
                with contextlib.suppress(FileExistsError):  # another run began in the same second
                    folder.mkdir(parents=True)
                    break
                folder = folder.with_name(f"{name}-{number}")
            (folder / "config.json").write_text("{}")
        lock = open(folder / "config.json", "r+")  # over NFS only a file opened for writing can be locked
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it does
        revisions = json.load(lock).get("revisions", [])
        if revision not in revisions:
            config = dict(asdict(args), resume=None, script=script.name, revisions=[*revisions, revision], **VERSIONS)
            lock.seek(0)
            lock.write(json.dumps(config, indent=2) + "\n")
            lock.truncate()
            lock.flush()
        for path in logs(folder):
            if path.name in checkpoint["files"]:
                os.truncate(path, checkpoint["files"][path.name])
            else:
                path.unlink()
    except BlockingIOError:
        raise ValueError(f"--resume {folder}: another process is at work on that run") from None
    except OSError as error:
        flag = "runs-dir" if args.resume is None else "resume"
        raise ValueError(f"--{flag}: can't write {folder} ({error.strerror})") from error
    return folder, lock


def logs(folder):
    return [*folder.glob("*.csv"), *folder.glob("events.*")]


def append_rows(path, rows):
    """Appends dicts to a CSV file, with a header if it is new; closed each time, so that a crash loses nothing."""
    with open(path, "a", newline="") as file:
        for row in rows:
            if file.tell() == 0:
                file.write(",".join(row) + "\n")
            cells = (f"{x:.6g}" if isinstance(x, (float, np.floating)) else str(x) for x in row.values())
            file.write(",".join(cells) + "\n")


def statistics(episodes):
    """What there is to log about the episodes of an iteration; NaN where none ended."""
    scalars = {}
    for name in ("return", "cost", "length"):
        values = [episode[name] for episode in episodes] or [np.nan]
        scalars[f"charts/episodic_{name}"], scalars[f"charts/episodic_{name}_std"] = np.mean(values), np.std(values)
    scalars["charts/safe_episode_rate"] = np.mean([episode["safe"] for episode in episodes] or [np.nan])
    return scalars


def summary(progress_csv, num_iterations):
    """The last tenth of the iterations in a line."""
    with open(progress_csv) as file:
        last = list(csv.DictReader(file))[-max(1, num_iterations // 10) :]
    names = ("episodic_return", "episodic_cost", "safe_episode_rate")
    means = [np.nanmean([float(row[name]) for row in last]) for name in names]
    return "Mean of the last {} iterations: return {:.1f}, cost {:.2f}, safe episodes {:.1%}".format(len(last), *means)


def say(message):
    """Prints; a reader who has gone away (`| head`) or can't be shown an accent doesn't end the run."""
    with contextlib.suppress(AttributeError):  # not every stand-in for stdout has it
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(message, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def run(train, Args, task_settings, argv=None):
    """Trains by the command line's flags, or those of `argv`, logs and saves; bad input gets one line and status 2.

    SIGINT and SIGTERM let the iteration end, save, and end the process with status 130 and 143.
    """
    script = Path(train.__code__.co_filename).resolve()
    try:
        args, loaded = read_flags(Args, task_settings, script, argv)
        faulthandler.dump_traceback_later(args.iteration_timeout, exit=True, file=sys.__stderr__)
        iterations = train(args, loaded)
        checkpoint = next(iterations)["checkpoint"]
        num_iterations = args.total_timesteps // (args.num_envs * args.num_steps)
        if checkpoint["iteration"] >= num_iterations:
            longer = f"more --total-timesteps than {args.total_timesteps} make it longer"
            raise ValueError(f"--resume {args.resume} is complete; {longer}")
        folder, lock = open_folder(args, script, loaded)
    except (ValueError, OverflowError, MemoryError) as error:
        faulthandler.cancel_dump_traceback_later()
        print(f"{script.name}: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    stop = []

    def catch(number, frame):
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)  # the next one ends the process at once

    signal.signal(signal.SIGINT, catch)
    signal.signal(signal.SIGTERM, catch)
    try:
        with lock:
            keep(iterations, checkpoint, loaded, args, num_iterations, script.name, folder, stop)
    except FloatingPointError as error:
        raise SystemExit(f"\n{script.name}: {error}; what was logged and saved in {folder} is intact") from None
    finally:
        faulthandler.cancel_dump_traceback_later()


def keep(iterations, checkpoint, loaded, args, num_iterations, script, folder, stop):
    """Logs and saves what `iterations` yields, until it ends or `stop` holds a signal.

    checkpoint: the one to begin from. loaded: the same with what was saved beside it if the run is resumed, or None.
    """
    writer = SummaryWriter(folder)
    if args.track:
        import wandb

        names = dict(id=folder.name, name=folder.name, project=args.wandb_project_name, entity=args.wandb_entity)
        wandb.init(**names, config=asdict(args), dir=folder, resume="allow")
    made_by = dict(script=script, versions=VERSIONS, args=dict(asdict(args), resume=None))
    best_return, seconds = (loaded["best_return"], loaded["seconds"]) if loaded else (-math.inf, 0.0)
    start_time = time.monotonic() - seconds

    def save_last():
        writer.flush()
        files = {}  # how long the logs are: a resumed run cuts off what was logged later
        for path in logs(folder):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                files[path.name] = os.fstat(file.fileno()).st_size
        progress = dict(best_return=best_return, seconds=time.monotonic() - start_time, files=files)
        save(folder / "last.pt", **made_by, **checkpoint, **progress)

    if not loaded:
        settings = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{settings}")
        save_last()
    shown = "{n}/{total} iterations, {elapsed} of {elapsed}+{remaining}{postfix}"
    bar = tqdm(iterations, initial=checkpoint["iteration"], total=num_iterations, bar_format=shown, dynamic_ncols=True)
    ended = 0  # episodes since the last checkpoint
    for progress in bar:
        faulthandler.dump_traceback_later(args.iteration_timeout, exit=True, file=sys.__stderr__)
        checkpoint, episodes = progress["checkpoint"], progress["episodes"]
        iteration, seconds = checkpoint["iteration"], time.monotonic() - start_time
        global_step = iteration * args.num_envs * args.num_steps
        for name, value in progress["scalars"].items():
            if not math.isfinite(value):
                raise FloatingPointError(f"{name} is NaN or infinite in iteration {iteration}")

        # Log
        scalars = {**statistics(episodes), **progress["scalars"], "charts/SPS": int(global_step / seconds)}
        for name, value in scalars.items():
            writer.add_scalar(name, value, global_step)
        if args.track:
            wandb.log(scalars, step=global_step)
        row = dict(iteration=iteration, global_step=global_step, episodes=len(episodes))
        row.update({name.split("/")[1].lower(): value for name, value in scalars.items()}, seconds=seconds)
        append_rows(folder / "progress.csv", [row])
        append_rows(folder / "episodes.csv", episodes)
        shown = "return {episodic_return:.1f}, cost {episodic_cost:.2f}, safe {safe_episode_rate:.0%}, {sps} steps/s"
        bar.set_postfix_str(shown.format(**row))

        # Save
        is_safe = row["episodic_cost"] <= args.cost_limit and row["safe_episode_rate"] >= args.min_safe_rate
        if is_safe and row["episodic_return"] > best_return:
            best_return = float(row["episodic_return"])
            save(folder / "best_safe.pt", **made_by, iteration=iteration, agent=progress["sampled_from"])
        ended += len(episodes)
        if iteration == num_iterations or (args.save_every and iteration % args.save_every == 0) or stop:
            if not ended and not stop:
                raise FloatingPointError(f"no episode has ended by iteration {iteration}; the task needs a time limit")
            save_last()
            ended = 0
        if stop and iteration < num_iterations:
            say(f"\nStopped after iteration {iteration} of {num_iterations}; go on with --resume {folder}")
            raise SystemExit(128 + stop[0])
    writer.close()
    if args.track:
        wandb.finish()
    told = summary(folder / "progress.csv", num_iterations)
    say(f"{args.env_id}, seed {args.seed}, {global_step} steps in {seconds:.0f} s. {told}. {folder}")
