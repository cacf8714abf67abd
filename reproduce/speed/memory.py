"""Resident memory and speed over a long run: python -m reproduce.speed.memory [scpo_continuous.py --env-id ENV_ID ...].

Starts the script and reads its resident size from /proc (Linux) whenever it has logged an iteration. Prints every fifth
size, the growth from iteration 5 to the last but one, and the speed of iterations 2 to 11 beside that of the last ten.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reproduce import curves

DEFAULT = "scpo_continuous.py --env-id SafetyBallReach-v0 --seed 101 --total-timesteps 2031616".split()


def resident(pid):
    """In MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def main():
    command = sys.argv[1:] or DEFAULT
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, curves.ROOT / command[0], *command[1:], "--runs-dir", folder], stderr=subprocess.DEVNULL
        )
        sizes, path = [], None
        while process.poll() is None:
            time.sleep(0.2)
            for path in Path(folder).glob("*/progress.csv"):
                try:
                    sizes += [resident(process.pid)] * (curves.length(path) - len(sizes))
                except (OSError, KeyError):  # it has just ended
                    pass
        rows = curves.read(path) if path else {}
    if process.returncode or len(sizes) < 12:
        raise SystemExit(
            f"{command[0]} ended with status {process.returncode} after {len(sizes)} iterations; 12 are needed"
        )
    for iteration in range(5, len(sizes) + 1, 5):
        print(f"iteration {iteration:3}: {sizes[iteration - 1]:6.0f} MiB")
    # the last one is read while the process is already closing its environments
    print(f"growth from iteration 5 to {len(sizes) - 1}: {sizes[-2] / sizes[4] - 1:+.1%}")
    seconds, steps = rows["seconds"], rows["global_step"][0]
    early, late = (10 * steps / (seconds[end] - seconds[end - 10]) for end in (10, len(seconds) - 1))
    print(f"steps/s: {early:.0f} in iterations 2 to 11, {late:.0f} in the last ten")


if __name__ == "__main__":
    main()
