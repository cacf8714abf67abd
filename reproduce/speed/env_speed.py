"""Steps a second of the Ball tasks beside the package's own, one after the other in one process, with random actions.

    OMP_NUM_THREADS=1 python -m reproduce.speed.env_speed [STEPS]

Both are measured without wrappers (`env.unwrapped`), resets included, three times by turns; the best of three counts.
"""

import sys
import time

import gymnasium as gym
import numpy as np

import scpo_envs
from reproduce.curves import fail


def steps_per_second(env, steps):
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, 2)).astype(np.float32)
    env.reset(seed=0)
    start = time.perf_counter()
    for i in range(steps):
        _, _, terminated, _, _ = env.step(actions[i])
        if terminated or i % 250 == 249:
            env.reset()
    return steps / (time.perf_counter() - start)


def main(steps):
    print(f"{'task':24} {'ours':>8} {'package':>8} {'ratio':>6}")
    for task in scpo_envs.BALL_TASKS:
        env_id = f"SafetyBall{task}-v0"
        ours = gym.make(env_id, disable_env_checker=True).unwrapped
        theirs = gym.make(f"release/{env_id}", disable_env_checker=True).unwrapped
        rounds = [(steps_per_second(ours, steps), steps_per_second(theirs, steps // 5)) for _ in range(3)]
        our_best, their_best = (max(speeds) for speeds in zip(*rounds))
        print(f"{env_id:24} {our_best:8.0f} {their_best:8.0f} {our_best / their_best:6.1f}")


if __name__ == "__main__":
    steps = sys.argv[1] if len(sys.argv) == 2 else "20000"
    if len(sys.argv) > 2 or not steps.isdecimal() or int(steps) < 1000:
        fail("env_speed", f"STEPS is {' '.join(sys.argv[1:])}, but must be one number, 1000 or more")
    main(int(steps))
