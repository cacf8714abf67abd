"""What a run needs besides its algorithm, for all seven scripts: flags, a folder, logs, checkpoints, --resume, signals.

A script calls `run(train, Args, TASK_SETTINGS)`. Its `train(args, checkpoint=None)` is a generator. It yields a dict
once before the first iteration, with "checkpoint" alone, and then one after each iteration:

    checkpoint    tensors and plain values to go on from; "iteration" and "agent", the networks' weights, are among them
    scalars       {"group/name": value} to log
    episodes      a dict for each episode that ended: iteration, global_step, env, return, cost, length, safe
    sampled_from  the weights of the policy that played these episodes; None while --limit-factor raises the limit

A run leaves runs/<env>__<script or --exp-name>__<seed>__<time>/ with config.json, progress.csv, episodes.csv,
events for TensorBoard, last.pt, from which --resume goes on, and best_safe.pt, the best policy within the limit.
"""

import contextlib
import faulthandler
import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from importlib import import_module, metadata
from pathlib import Path
from typing import Optional

import numpy as np
import torch
import tyro
from torch.utils.tensorboard import SummaryWriter


@dataclass
class RunArgs:
    runs_dir: str = "runs"  # folder that gets a folder for this run
    exp_name: Optional[str] = None  # takes the script's place in the name of the run's folder
    resume: Optional[str] = None  # folder of a run to go on with; more --total-timesteps make a complete run longer
    min_safe_rate: float = 0.8  # share of an iteration's episodes that must be safe for best_safe.pt to take its policy
    num_workers: int = 1  # processes that step the environments: faster where steps take longer than updates
    iteration_timeout: float = 3600.0  # seconds an iteration (the first: with start-up) may take, else the run ends
    track: bool = False  # log to Weights & Biases too (pip install wandb)
    wandb_project_name: str = "scpo"  # Weights & Biases project
    wandb_entity: Optional[str] = None  # Weights & Biases team (None: yours)


VERSIONS = dict(python=sys.version.split()[0], **{x: metadata.version(x) for x in ("torch", "numpy", "gymnasium")})
# What --resume may change: the length of the run, and what concerns only the process. All other flags define the run
PROCESS_FLAGS = "total_timesteps device compile resume num_workers iteration_timeout track".split()  # and wandb_*
WRONG_ID = r"--env-id (?!scpo_envs\S+Gymnasium-)(\S+:)?(Safety(?!Ball)\w+?)(Gymnasium)?(-v\d+): (?!--).*"
RIGHT_ID = r"\g<0>; if it is one of Safety-Gymnasium, take scpo_envs.safety_gymnasium:\2Gymnasium\4 (docs/field.md)"
SAVED = "script args revisions iteration agent best_return seconds files".split()  # in every last.pt


def parse(cls, argv, **options):
    """Returns tyro's reading of a command line. A wrong flag is a ValueError of one line, where tyro prints a box."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(cls, args=argv, **options)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        said = re.sub(r"[│╮╰\s]+", " ", re.split("[─-]{5,}|Got errors", said.getvalue())[1]).strip()
        raise ValueError(said if len(said) < 480 else f"{said[:230]} ... {said[-230:]}") from None


def check(args, name, is_allowed, allowed):
    if not is_allowed:
        raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)!r}, but must be {allowed}")


def read_flags(Args, task_settings, script, argv=None):
    """Returns the flags of Args and RunArgs, and --resume's checkpoint or None. Raises ValueError for wrong flags."""

    @dataclass
    class Flags(RunArgs, Args):
        pass

    given, _ = parse(Flags, argv, add_help=False, return_unknown_args=True)  # --env-id and --resume set the defaults
    checkpoint = None if given.resume is None else load_checkpoint(given, script, Flags)
    task = given.env_id.split(":")[-1] + " --fast" * getattr(given, "fast", False)
    settings = task_settings.get(task, task_settings["any other task"])
    default = Flags(**(checkpoint["args"] if checkpoint else dict(settings, env_id=given.env_id)))
    args = parse(Flags, argv, default=default)
    if checkpoint:
        for name, value in checkpoint["args"].items():
            may_differ = name in PROCESS_FLAGS or name.startswith("wandb")
            check(args, name, may_differ or getattr(args, name) == value, f"{value!r}, as in the run to go on with")
        least = (checkpoint["iteration"] + 1) * args.num_envs * args.num_steps
        check(args, "total_timesteps", args.total_timesteps >= least, f"{least} or more, to go beyond what is done")
    check(args, "runs_dir", args.runs_dir, "the name of a folder")
    check(args, "exp_name", args.exp_name != "", "a name, or left out")
    fits = args.num_workers == 1 or args.num_envs < 1 or args.num_envs <= 32 * args.num_workers <= 32 * args.num_envs
    check(args, "num_workers", fits, f"in [1, {args.num_envs}] with at most 32 num-envs each")  # see scpo_workers
    check(args, "min_safe_rate", 0 <= args.min_safe_rate <= 1, "in [0, 1]")
    check(args, "iteration_timeout", 1 <= args.iteration_timeout <= 1e6, "in [1, 1e6] seconds")
    try:
        if args.track:
            import_module("wandb").login(verify=True)  # fails where wandb's servers are out of reach, too
    except Exception as error:
        raise ValueError(f"--track: {error} (pip install wandb; wandb login, or WANDB_MODE=offline)") from error
    return args, checkpoint


def load_checkpoint(given, script, Flags):
    """Returns what last.pt in --resume's folder holds. Raises ValueError if that is no checkpoint of this script."""
    path = Path(given.resume) / "last.pt"
    check(given, "resume", given.resume and os.path.isfile(path), "the folder of a run, with a last.pt in it")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        made_by, settings = [checkpoint[name] for name in SAVED][:2]
        differing = {field.name for field in fields(Flags)} ^ settings.keys()
    except Exception as error:
        raise ValueError(f"--resume: {path} is truncated or not a checkpoint of ours") from error
    check(given, "resume", made_by == script.name, f"a run of {script.name}; this is one of {made_by}")
    check(given, "resume", not differing, f"one of this version: {', '.join(sorted(differing))} was added or removed")
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
    """The commit, and "-dirty-HASH" of changes to Python files (e69de29: none); else $SCPO_REVISION or "unknown"."""
    command = "git rev-parse --short=12 HEAD && git diff HEAD -- ':/*.py' ':!/tests' | git hash-object --stdin"
    told = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True).stdout.split()
    return "-dirty-".join(x[:12] for x in told if x[:7] != "e69de29") or os.getenv("SCPO_REVISION", "unknown")


def new_folder(args, script):
    name = re.sub(r"[/:;,#?']", "-", f"{args.env_id}__{args.exp_name or script.stem}__{args.seed}")
    Path(args.runs_dir).mkdir(parents=True, exist_ok=True)
    for second in range(int(time.time()), sys.maxsize):
        folder = Path(args.runs_dir, f"{name}__{second}")
        with contextlib.suppress(FileExistsError):  # another run began in the same second
            folder.mkdir()
            return folder


def open_folder(args, script, checkpoint):
    """Returns the run's folder, new or --resume's, a lock on it and what to save with a checkpoint; or ValueError."""
    revisions, files = (checkpoint["revisions"], checkpoint["files"]) if checkpoint else ([], {})
    revisions = list(dict.fromkeys([*revisions, git_revision(script.parent)]))
    settings, made_by = dict(asdict(args), resume=None), dict(script=script.name, revisions=revisions, **VERSIONS)
    try:
        folder = Path(args.resume) if checkpoint else new_folder(args, script)
        whole = all(os.path.getsize(folder / name) >= size for name, size in files.items() if name.endswith(".csv"))
        check(args, "resume", whole, "a run whose CSVs still have all rows that were there when last.pt was saved")
        lock = open(os.open(folder / "config.json", os.O_RDWR | os.O_CREAT, 0o666), "r+")  # NFS locks no read-only file
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it does
        print(json.dumps({**settings, **made_by}, indent=2), file=lock, flush=True)  # on a full disk the old text stays
        lock.truncate()
        for path in logs(folder):  # what was logged after the checkpoint goes
            os.truncate(path, files.get(path.name, 0))
    except BlockingIOError:
        raise ValueError(f"--resume {folder}: another process is at work on that run") from None
    except OSError as error:
        raise ValueError(f"--{'resume' if checkpoint else 'runs-dir'}: can't write there: {error}") from error
    return folder, lock, dict(made_by, args=settings)


def logs(folder):
    return [*folder.glob("progress.csv"), *folder.glob("episodes.csv"), *folder.glob("events.*")]


def append_rows(path, rows):
    """Appends dicts to a CSV, with a header if new; a crash loses none. Floats: six digits or all before the point."""
    with open(path, "a") as file:
        for row in rows:
            if file.tell() == 0:
                print(*row, sep=",", file=file)
            cells = (x if isinstance(x, int) else f"{x:.{max(6, len(f'{abs(x):.0f}'))}g}" for x in row.values())
            print(*cells, sep=",", file=file)


def summary(progress_csv, num_iterations):
    """The last tenth of the iterations in a line."""
    rows = np.atleast_1d(np.genfromtxt(progress_csv, delimiter=",", names=True))
    last = rows[rows["episodes"] > 0][-max(1, num_iterations // 10) :]
    means = [last[name].mean() for name in ("episodic_return", "episodic_cost", "safe_episode_rate")]
    return "Mean of the last {} iterations: return {:.1f}, cost {:.2f}, safe episodes {:.1%}".format(len(last), *means)


def say(message, stream, end="\n"):
    """Prints. A reader who has gone away (`| head`) or can't be shown an accent doesn't end the run."""
    with contextlib.suppress(AttributeError):  # not every stand-in for stdout has it
        stream.reconfigure(errors="backslashreplace")
    try:
        print(message, end=end, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run(train, Args, task_settings, argv=None):
    """Trains with the flags of the command line or of `argv`, logs and saves. Bad input gets one line and status 2."""
    script = Path(train.__code__.co_filename).resolve()
    for number in (signal.SIGINT, signal.SIGTERM):  # end the process while there is nothing to save
        signal.signal(number, signal.SIG_DFL)
    cache = os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir()))
    try:
        os.makedirs(cache, exist_ok=True)
        if re.search(r"[\s'\"\\]", cache):
            raise OSError(f"torch hands {cache} to the compiler without quotes")
    except OSError as error:  # torch makes this folder, and fails where it can't, compiling or not
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir="/tmp")
        say(f"TORCHINDUCTOR_CACHE_DIR can't be used: {error}. A temporary folder takes its place", sys.stderr)
    try:
        args, loaded = read_flags(Args, task_settings, script, argv)
        faulthandler.dump_traceback_later(args.iteration_timeout, exit=True, file=2)
        if args.num_workers > 1:
            train = import_module("scpo_workers").with_workers(train, args)
        iterations = train(args, loaded)
        misfits = (AttributeError, KeyError, RuntimeError, TypeError) if loaded else ()
        try:
            checkpoint = next(iterations)["checkpoint"]
        except misfits as error:
            raise ValueError(f"--resume {args.resume}: last.pt lacks a part or doesn't fit ({error!r})") from error
        folder, lock, made_by = open_folder(args, script, loaded)
    except (ValueError, ChildProcessError, ModuleNotFoundError) as error:  # the last one: a file of ours isn't here
        faulthandler.cancel_dump_traceback_later()
        say(f"{script.name}: {re.sub(WRONG_ID, RIGHT_ID, ' '.join(str(error).split())[:500])}", sys.stderr)
        raise SystemExit(2) from None
    stop = []  # a signal lets the iteration end, saves, and ends the process with status 130 (SIGINT) or 143 (SIGTERM)

    def catch(number, frame):
        stop.append(number)
        for either in (signal.SIGINT, signal.SIGTERM):  # the next one ends the process at once
            signal.signal(either, signal.SIG_DFL)

    signal.signal(signal.SIGINT, catch)
    signal.signal(signal.SIGTERM, catch)
    try:
        with lock, SummaryWriter(folder) as writer:
            keep(iterations, checkpoint, loaded, args, made_by, folder, writer, stop)
    except (FloatingPointError, ChildProcessError) as error:
        raise SystemExit(f"\n{script.name}: {error}; what was logged and saved in {folder} is intact") from None
    finally:
        faulthandler.cancel_dump_traceback_later()


def keep(iterations, checkpoint, loaded, args, made_by, folder, writer, stop):
    """Logs and saves what `iterations` yields, until it ends or `stop` holds a signal. loaded: what --resume found."""
    best_return, seconds = (loaded["best_return"], loaded["seconds"]) if loaded else (-np.inf, 0.0)
    start_time = time.monotonic() - seconds
    total = args.total_timesteps // (args.num_envs * args.num_steps)
    if args.track:
        names = dict(id=folder.resolve().name, project=args.wandb_project_name, entity=args.wandb_entity)
        tracked = import_module("wandb").init(**names, config=asdict(args), dir=folder, resume="allow")

    def save_last():
        writer.flush()
        for path in logs(folder):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        files = {path.name: path.stat().st_size for path in logs(folder)}  # --resume cuts off what is logged later
        save(folder / "last.pt", **made_by, **checkpoint, best_return=best_return, seconds=seconds, files=files)

    if not loaded:
        settings = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{settings}")
        save_last()
    ended, begun = 0, checkpoint["iteration"]  # episodes since the last checkpoint, and its iteration
    for progress in iterations:
        faulthandler.dump_traceback_later(args.iteration_timeout, exit=True, file=2)
        checkpoint, episodes = progress["checkpoint"], progress["episodes"]
        iteration, seconds = checkpoint["iteration"], time.monotonic() - start_time
        global_step = iteration * args.num_envs * args.num_steps
        for name, value in progress["scalars"].items():
            if not np.isfinite(value):
                raise FloatingPointError(f"{name} is NaN or infinite in iteration {iteration}")

        # Log; NaN for the episodes of an iteration in which none ended
        scalars = {}
        for name in ("return", "cost", "length"):
            values = [episode[name] for episode in episodes] or [np.nan]
            scalars[f"charts/episodic_{name}"], scalars[f"charts/episodic_{name}_std"] = np.mean(values), np.std(values)
        scalars["charts/safe_episode_rate"] = np.mean([episode["safe"] for episode in episodes] or [np.nan])
        scalars = {**scalars, **progress["scalars"], "charts/SPS": int(global_step / seconds)}
        for name, value in scalars.items():
            writer.add_scalar(name, value, global_step)
        if args.track:
            tracked.log(scalars, step=global_step)
        row = dict(iteration=iteration, global_step=global_step, episodes=len(episodes))
        row.update({name.split("/")[1].lower(): value for name, value in scalars.items()}, seconds=seconds)
        append_rows(folder / "progress.csv", [row])
        append_rows(folder / "episodes.csv", episodes)
        shown = "return {episodic_return:.1f}, cost {episodic_cost:.2f}, safe {safe_episode_rate:.0%}, {sps} steps/s"
        line = f"{iteration}/{total} {shown.format(**row)}, {(total / iteration - 1) * seconds / 60:.0f} min left"
        say(f"{line:79.79}", sys.stderr, end="\r" if sys.stderr.isatty() else "\n")

        # Save
        keeps_limit = progress["sampled_from"] and row["episodic_cost"] <= args.cost_limit * (1 + 1e-6)
        if keeps_limit and row["safe_episode_rate"] >= args.min_safe_rate and row["episodic_return"] > best_return:
            best_return = float(row["episodic_return"])
            save(folder / "best_safe.pt", **made_by, iteration=iteration, agent=progress["sampled_from"])
        ended += len(episodes)
        if iteration == total or stop or (args.save_every and iteration % args.save_every == 0):
            save_last()
            never = iteration == total and os.path.getsize(folder / "episodes.csv") == 0
            if never or not (ended or stop) and iteration - begun >= min(args.save_every or total, total):
                needed = "the task needs a time limit, or the run a larger --save-every or --total-timesteps"
                raise FloatingPointError(f"no episode has ended by iteration {iteration}; {needed}")
            ended, begun = 0, iteration
        if stop and iteration < total:
            say(f"\nStopped after iteration {iteration} of {total}; go on with --resume {folder}", sys.stdout)
            raise SystemExit(128 + stop[0])
    told = summary(folder / "progress.csv", total)
    say(f"{args.env_id}, seed {args.seed}, {global_step} steps in {seconds:.0f} s. {told}. {folder}", sys.stdout)
