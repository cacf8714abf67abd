"""A task whose steps take 4 ms of computing, to show what --num-workers brings (docs/your-own-env.md)."""

import time

import gymnasium as gym
import numpy as np


class Busy(gym.Env):
    """A cart is paid its speed; a step faster than 1 costs 1."""

    observation_space = action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.speed = self.np_random.uniform(-0.1, 0.1)
        return np.array([self.speed], dtype=np.float32), {}

    def step(self, action):
        end = time.process_time() + 0.004  # no sleep: two sleepers need no second core
        while time.process_time() < end:
            pass
        self.speed += 0.2 * float(action[0])
        return np.array([self.speed], dtype=np.float32), self.speed, False, False, {"cost": float(abs(self.speed) > 1)}


gym.register("Busy-v0", Busy, max_episode_steps=50)
