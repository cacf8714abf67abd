"""An environment for the tests of scpo_workers.py that knows in which process it lives. No torch: it starts fast."""

import os
import random
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np


class Env:
    """Its action is a word that says what to do; five steps an episode."""

    observation_space = action_space = gym.spaces.Discrete(2)
    spec = SimpleNamespace(max_episode_steps=5)

    def __init__(self, fault, folder):
        if fault == "make":
            raise ValueError("--env-id Toy: no such task")
        self.folder, self.cost_limit = folder, 1

    def __str__(self):
        return "<Env of the tests>"

    def reset(self, seed=None):
        self.rng = self.rng if seed is None else np.random.default_rng(seed)
        self.steps = 0
        return ("first", float(self.rng.random())), {}

    def step(self, action):
        self.steps += 1
        if action == "fail":
            raise RuntimeError("the motor is on fire")
        if action == "offline":
            raise ConnectionResetError("the robot has hung up")
        if action == "hang":
            time.sleep(1000)
        if action == "meet":  # goes on when the other environments are here too
            (self.folder / str(id(self) + os.getpid())).touch()
            deadline = time.monotonic() + 60
            while len(list(self.folder.iterdir())) < 3:
                assert time.monotonic() < deadline, "alone"
                time.sleep(0.001)
        if action == "limit":
            return self.cost_limit, 0.0, False, False, {}
        if action == "global":
            return random.random(), np.random.random(), False, False, {}  # noqa: NPY002
        info = {"cost": 0.0, "safe": 1, "private": lambda: None}
        return (os.getpid(), float(self.rng.random())), 1.0, self.steps == 5, False, info


def make_env(fault, folder):
    return Env(fault, folder)


def train(args, checkpoint=None, make_env=make_env):
    return [make_env(args.fault, args.folder) for _ in range(args.num_envs)]
