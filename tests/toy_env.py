"""Small tasks for the tests: `--env-id toy_env:Toy-v0`."""

import multiprocessing
import os
import signal
import time

import gymnasium as gym
import numpy as np


class Toy(gym.Env):
    """A point in the unit square earns its x and pays 1 where x > 0.5; 20 steps an episode, by the time limit."""

    def __init__(self, cost="cost", obs="box", fault=None, costs=None):
        self.cost, self.obs, self.fault, self.costs = cost, obs, fault, costs
        if fault == "unbuilt":
            raise ValueError("too many values to unpack (expected 2)")
        if fault == "killed" and multiprocessing.parent_process():
            os.kill(os.getpid(), signal.SIGKILL)
        box = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = {
            "box": box,
            "matrix": gym.spaces.Box(-1, 1, (2, 1), np.float32),
            "dict": gym.spaces.Dict({"place": box, "zone": gym.spaces.Discrete(3)}),
            "discrete": gym.spaces.Discrete(3),
            "sequence": gym.spaces.Sequence(box),
        }[obs]
        shape = (0,) if fault == "empty" else (2,)
        low, dtype = {"integers": (-1, np.int64), "bools": (0, bool)}.get(fault, (-1, np.float32))
        self.action_space = gym.spaces.Box(low, 1, shape, dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = self.np_random.uniform(-0.2, 0.2, 2), 0
        self.total = getattr(self, "total", 0)
        if self.fault == "lost" and self.total > 150:
            return self.observe() * np.nan, {}
        return np.zeros(3, np.float32) if self.fault == "old" else (self.observe(), {})

    def observe(self):
        zone = int(self.place[0] > 0.5)
        box = self.place.astype(np.float32)
        return {
            "box": box,
            "matrix": box[:, None],
            "dict": {"place": box, "zone": zone},
            "discrete": zone,
            "sequence": (box,),
        }[self.obs]

    def step(self, action):
        assert np.abs(action).max() <= 1, "actions are clipped for the environment"
        self.place = np.clip(self.place + 0.1 * action, -1, 1)
        self.steps += 1
        self.total += 1
        reward, cost = float(self.place[0]), float(self.place[0] > 0.5)
        if self.costs is not None:
            cost = self.costs[self.steps - 1]
        if self.fault == "nan" and self.total > 150:
            reward = float("nan")
        if self.fault == "bug":
            raise KeyError("speed")
        if self.fault == "raise" and self.total > 150:
            raise RuntimeError("the motor is\non fire")
        if self.fault == "hang" and self.total > 150:
            time.sleep(1000)
        if self.fault == "slow":
            time.sleep(0.0005)
        if self.fault == "six":
            return self.observe(), reward, cost, False, False, {}
        if self.fault == "noise":
            self.place[1] = np.ravel(self.action_space.sample())[-1]
        if self.fault == "array" and self.total > 150:
            cost = np.array([cost, 1.0])
        if self.fault == "forget" and self.total > 150:
            return self.observe(), reward, False, False, {}
        info = {"cost": {"cost": cost}, "constraint_costs": {"constraint_costs": [cost]}, "none": {}}[self.cost]
        return self.observe(), reward, self.fault == "die" and self.place[1] > 0.5, False, info


class ToyChoice(Toy):
    """The same with pushes to choose from; "choices": one number an axis, "from5": numbers that start at 5."""

    def __init__(self, actions="choice", **kwargs):
        super().__init__(**kwargs)
        spaces = {"choice": gym.spaces.Discrete(3), "choices": gym.spaces.MultiDiscrete([3, 2])}
        self.action_space = spaces[actions] if actions in spaces else gym.spaces.Discrete(3, start=5)

    def step(self, action):
        assert self.action_space.contains(action), action
        first = np.ravel(action)[0] - np.ravel(getattr(self.action_space, "start", 0))[0]
        return super().step(np.array([first - 1, np.ravel(action)[-1] % 2], dtype=float))


gym.register("Toy-v0", Toy, max_episode_steps=20)
gym.register("ToyDict-v0", Toy, max_episode_steps=20, kwargs=dict(obs="dict", cost="constraint_costs"))
gym.register("ToyDiscrete-v0", Toy, max_episode_steps=20, kwargs=dict(obs="discrete"))
gym.register("ToyMatrix-v0", Toy, max_episode_steps=20, kwargs=dict(obs="matrix"))
gym.register("ToySequence-v0", Toy, max_episode_steps=20, kwargs=dict(obs="sequence"))
gym.register("ToyNoCost-v0", Toy, max_episode_steps=20, kwargs=dict(cost="none"))
gym.register("ToyNegative-v0", Toy, max_episode_steps=20, kwargs=dict(costs=[-1.0] * 20))
gym.register("ToyIntegers-v0", Toy, max_episode_steps=20, kwargs=dict(fault="integers"))
gym.register("ToyBools-v0", Toy, max_episode_steps=20, kwargs=dict(fault="bools"))
gym.register("ToyEmpty-v0", Toy, max_episode_steps=20, kwargs=dict(fault="empty"))
gym.register("ToyNan-v0", Toy, max_episode_steps=20, kwargs=dict(fault="nan"))
gym.register("ToyChoice-v0", ToyChoice, max_episode_steps=20)
gym.register("ToyChoices-v0", ToyChoice, max_episode_steps=20, kwargs=dict(actions="choices"))
gym.register("ToyFrom5-v0", ToyChoice, max_episode_steps=20, kwargs=dict(actions="from5"))
gym.register("ToyChoiceNan-v0", ToyChoice, max_episode_steps=20, kwargs=dict(fault="nan"))
gym.register("ToyEndless-v0", Toy)
gym.register("ToyLong-v0", Toy, max_episode_steps=250)
gym.register("ToyFree-v0", Toy, max_episode_steps=20, kwargs=dict(costs=[0.0] * 20))
gym.register("ToyTenth-v0", Toy, max_episode_steps=3, kwargs=dict(costs=[0.1] * 3))
gym.register("ToyChoiceEndless-v0", ToyChoice)
gym.register("ToyChoiceLong-v0", ToyChoice, max_episode_steps=250)
gym.register("ToyChoiceTenth-v0", ToyChoice, max_episode_steps=3, kwargs=dict(costs=[0.1] * 3))
gym.register("ToyDie-v0", Toy, max_episode_steps=20, kwargs=dict(fault="die"))
for fault in ("raise", "hang", "slow", "array", "forget", "six", "noise", "old", "unbuilt", "lost", "killed", "bug"):
    gym.register(f"Toy{fault.title()}-v0", Toy, max_episode_steps=20, kwargs=dict(fault=fault))
    gym.register(f"ToyChoice{fault.title()}-v0", ToyChoice, max_episode_steps=20, kwargs=dict(fault=fault))
