"""Steps a second of training, by turns in the same minutes, one thread each: our scripts beside each other and beside peers.

    python benchmarks/training_speed.py [--scripts scpo_continuous.py baselines/cpo.py ...] [--tasks Circle Run Gather Reach]
        [--peer "NAME=PYTHON benchmarks/peer_sb3.py {env_id} {iterations}"] [--csv results/speed.csv]

PEER is any command that trains on the task {env_id} for {iterations} iterations of 32,768 steps and whose output has "sps N" in
its last line, in an environment of its own. Ours is read from progress.csv: the time from the first step to the last log line,
compilation excluded and printed beside it, since it is paid once a run. ratio: the first script's speed to this one's.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(command):
    """Returns the command's output; one thread."""
    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def ours(script, env_id, iterations):
    """Returns (steps a second of training, seconds before training)."""
    with tempfile.TemporaryDirectory() as runs_dir:
        start = time.time()
        flags = ["--env-id", env_id, "--total-timesteps", str(iterations * 32768), "--runs-dir", runs_dir]
        run([sys.executable, script, *flags])
        total = time.time() - start
        with open(next(Path(runs_dir).glob("*/progress.csv"))) as file:
            last = list(csv.DictReader(file))[-1]
    return int(last["global_step"]) / float(last["seconds"]), total - float(last["seconds"])


def theirs(command, env_id):
    out = run(command.format(env_id=env_id, iterations=1).split())
    return float(re.findall(r"sps (\d+)", out)[-1]), 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scripts", nargs="+", default=["scpo_continuous.py"])
    parser.add_argument("--peer", action="append", default=[], help="NAME=command with {env_id} and {iterations}")
    parser.add_argument("--tasks", nargs="+", default=["Circle", "Run", "Gather", "Reach"])
    parser.add_argument("--iterations", type=int, default=5, help="ours; a peer makes 1 at a time")
    parser.add_argument("--rounds", type=int, default=2, help="turns; the best of each side counts")
    parser.add_argument("--csv", help="write the table there as well")
    args = parser.parse_args()
    peers = dict(peer.split("=", 1) for peer in args.peer)
    lines = ["task,script,steps_per_second,ratio,startup_seconds"]
    print(f"{'task':24} {'script':32} {'steps/s':>8} {'ratio':>6} {'start-up':>9}")
    for env_id in (f"SafetyBall{task}-v0" for task in args.tasks):
        turns = {name: [] for name in (*args.scripts, *peers)}
        for _ in range(args.rounds):
            for name, speeds in turns.items():
                speeds.append(theirs(peers[name], env_id) if name in peers else ours(name, env_id, args.iterations))
        for name, speeds in turns.items():
            best, startup = max(speed for speed, _ in speeds), min(startup for _, startup in speeds)
            ratio = max(speed for speed, _ in turns[args.scripts[0]]) / best
            print(f"{env_id:24} {name:32} {best:8.0f} {ratio:6.2f} {startup:8.1f}s", flush=True)
            lines.append(f"{env_id},{name},{best:.0f},{ratio:.2f},{startup:.1f}")
    if args.csv:
        Path(args.csv).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
