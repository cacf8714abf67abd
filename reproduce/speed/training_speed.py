"""Steps a second of training, measured alternately, one thread each: our scripts beside each other and peers.

    python -m reproduce.speed.training_speed [--scripts scpo_continuous.py "scpo_continuous.py --fast"] [--tasks Circle]
        [--peer "NAME=PYTHON reproduce/speed/peer_sb3.py {env_id} {iterations}"] [--csv results/speed.csv]

PEER is any command that trains on the task {env_id} for {iterations} iterations of 32,768 steps and whose last line has
"sps N" in it; release/{env_id} is the package's own task. Our speed is read from progress.csv: the time from the first
step to the last log line. Start-up, with the compilation, is printed beside it, since it is paid once a run.
ratio: the first script's speed to this one's. --csv replaces the rows of what was measured, task by task, and keeps the
others. A script with --fast is left out of the tasks that have no --fast.
"""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reproduce import curves


def run(command):
    """Returns the command's output; one thread."""
    done = subprocess.run(command, capture_output=True, text=True, env=curves.ONE_THREAD, cwd=curves.ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def ours(script, env_id, iterations):
    """Returns (steps a second of training, seconds before training)."""
    with tempfile.TemporaryDirectory() as runs_dir:
        start = time.perf_counter()
        flags = ["--env-id", env_id, "--total-timesteps", str(iterations * 32768), "--runs-dir", runs_dir]
        run([sys.executable, *script.split(), *flags])
        total = time.perf_counter() - start
        progress = curves.read(next(Path(runs_dir).glob("*/progress.csv")))
    seconds = progress["seconds"][-1]
    return progress["global_step"][-1] / seconds, total - seconds


def theirs(command, env_id):
    out = run(shlex.split(command.format(env_id=env_id, iterations=1)))
    return float(re.findall(r"sps (\d+)", out)[-1]), 0


def main():
    parser = curves.parser("training_speed", __doc__)
    parser.add_argument("--scripts", nargs="+", default=["scpo_continuous.py"])
    parser.add_argument("--peer", action="append", default=[], help="NAME=command with {env_id} and {iterations}")
    tasks = {task.replace("SafetyBall", "").split("-")[0]: task for task in curves.TASKS}
    parser.add_argument("--tasks", nargs="+", default=list(tasks)[:4], choices=tasks)
    parser.add_argument("--iterations", type=int, default=5, help="ours; a peer makes 1 at a time")
    parser.add_argument("--rounds", type=int, default=2, help="turns; the best of each side counts")
    parser.add_argument("--csv", help="write the table there as well")
    args = parser.parse_args()
    for name, is_allowed, allowed in (
        ("iterations", args.iterations >= 2, "2 or more"),
        ("rounds", args.rounds >= 1, "1 or more"),
        ("peer", all("=" in peer for peer in args.peer), "NAME=command"),
        (
            "scripts",
            all((curves.ROOT / "".join(script.split()[:1])).is_file() for script in args.scripts)
            and "--fast" not in args.scripts[0],
            "files of this project, the first one without --fast",
        ),
        ("csv", not args.csv or (Path(args.csv).parent.is_dir() and not Path(args.csv).is_dir()), "a file's name"),
    ):
        if not is_allowed:
            curves.fail("training_speed", f"--{name} is {getattr(args, name)}, but must be {allowed}")
    peers = dict(peer.split("=", 1) for peer in args.peer)
    print(f"{'task':24} {'script':32} {'steps/s':>8} {'ratio':>6} {'start-up':>9}")
    for env_id in (tasks[task] for task in args.tasks):
        rows = {}
        names = [name for name in (*args.scripts, *peers) if "--fast" not in name or env_id in curves.FAST]
        turns = {name: [] for name in names}
        for _ in range(args.rounds):
            for name, speeds in turns.items():
                speeds.append(theirs(peers[name], env_id) if name in peers else ours(name, env_id, args.iterations))
        for name, speeds in turns.items():
            best, startup = max(speed for speed, _ in speeds), min(startup for _, startup in speeds)
            ratio = max(speed for speed, _ in turns[args.scripts[0]]) / best
            print(f"{env_id:24} {name:32} {best:8.0f} {ratio:6.2f} {startup:8.1f}s", flush=True)
            said = (env_id, name, f"{best:.0f}", f"{ratio:.2f}", f"{startup:.1f}")
            rows[env_id, name] = dict(zip(("task", "script", "steps_per_second", "ratio", "startup_seconds"), said))
        if args.csv:
            kept = {(row["task"], row["script"]): row for row in curves.rows_of(Path(args.csv))}
            merged = sorted({**kept, **rows}.values(), key=lambda row: list(curves.TASKS).index(row["task"]))
            curves.write_rows(Path(args.csv), merged)


if __name__ == "__main__":
    main()
