"""Steps a second of training beside a peer's, by turns in the same minutes, one thread each.

    python benchmarks/training_speed.py --peer "PYTHON PEER_SCRIPT {env_id} {iterations}" [--tasks Circle Run Gather Reach]

PEER is any command that trains on the task {env_id} for {iterations} iterations of 32,768 steps and whose output has "sps N" in
its last line, in an environment of its own (Stable-Baselines3's PPO, say). Ours is read from progress.csv: the time from the
first step to the last log line, compilation excluded and printed beside it, since it is paid once a run.
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", required=True, help="command with {env_id} and {iterations}")
    parser.add_argument("--script", default="scpo_continuous.py")
    parser.add_argument("--tasks", nargs="+", default=["Circle", "Run", "Gather", "Reach"])
    parser.add_argument("--iterations", type=int, default=5, help="ours; the peer makes 1 of them at a time")
    parser.add_argument("--rounds", type=int, default=2, help="turns; the best of each side counts")
    args = parser.parse_args()
    print(f"{'task':24} {'ours':>8} {'peer':>8} {'ratio':>6} {'start-up':>9}")
    for task in args.tasks:
        env_id = f"SafetyBall{task}-v0"
        speeds, peers, starts = [], [], []
        for _ in range(args.rounds):
            sps, start = ours(args.script, env_id, args.iterations)
            speeds.append(sps)
            starts.append(start)
            out = run(args.peer.format(env_id=env_id, iterations=1).split())
            peers.append(float(re.findall(r"sps (\d+)", out)[-1]))
        ratio = max(speeds) / max(peers)
        print(f"{env_id:24} {max(speeds):8.0f} {max(peers):8.0f} {ratio:6.1f} {min(starts):8.1f}s", flush=True)


if __name__ == "__main__":
    main()
