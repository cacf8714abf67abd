"""Safety-Gymnasium 1.0.0, on Python 3.11 too and faster. docs/field.md says how to install and use it.

`--env-id scpo_envs.safety_gymnasium:SafetyPointGoal1Gymnasium-v0` imports this module, and this module the package:

1. Since Python 3.11 a dataclass takes no default that can't be hashed, such as an array. The package's dataclasses have
   some. While it is imported they are turned into factories, so all works as on Python 3.8 to 3.10.
2. At each reset a navigation task decodes 24 MB of PNG files, the stars in its sky. That takes longer than the 1,000
   steps of the episode. Here the sky is grey.
3. A navigation task computes its lidar and its distances object by object, and checks each observation. Here they are
   computed with fewer calls, without the check.

What the agent sees and does stays the same, in the float32 numbers that it gets. In float64 the last bit of a lidar may
differ: NumPy rounds an angle in two ways, depending on where its arrays lie in memory.
"""

import dataclasses
import functools
import math
from types import SimpleNamespace

import numpy as np

original = dataclasses.dataclass


def dataclass(cls=None, **options):
    if cls is None:  # @dataclass(frozen=True)
        return functools.partial(dataclass, **options)
    for name in vars(cls).get("__annotations__", ()):
        default = vars(cls).get(name)
        if type(default).__hash__ is None:
            setattr(cls, name, dataclasses.field(default_factory=lambda default=default: default))
    return original(cls, **options)


def load(file, Loader):
    assets = yaml.load(file, Loader)
    assets["textures"]["skybox"] = {
        "@type": "skybox",
        "@builtin": "flat",
        "@rgb1": "0.5 0.5 0.5",
        "@width": 8,
        "@height": 48,
    }
    return assets


def lidar(task, positions):
    """Returns how near the nearest of some positions (n, 2 or 3) is in each direction: (num_bins,), from 0 to 1.

    A direction is a sector around the agent. Both neighbours see a part of what is in it, the nearer one more.
    """
    conf, positions = task.lidar_conf, np.array(positions, ndmin=2)
    if conf.max_dist is None or not conf.alias:
        return original_lidar(task, positions)
    offsets = np.zeros((len(positions), 1, 3))  # a product for each, as in the package, so that it rounds as there
    offsets[:, 0, :2] = positions[:, :2]
    in_agents_axes = np.matmul(offsets - task.agent.pos, task.agent.mat)[:, 0, :2]
    z = np.ascontiguousarray(in_agents_axes).view(complex)[:, 0]
    bins, size = [0.0] * conf.num_bins, 2 * np.pi / conf.num_bins
    for length, angle in zip(np.abs(z).tolist(), (np.angle(z) % (2 * np.pi)).tolist()):
        i, nearness = int(angle / size), max(0, conf.max_dist - length) / conf.max_dist
        share, following = (angle - size * i) / size, (i + 1) % conf.num_bins
        bins[i] = max(bins[i], nearness)
        bins[following] = max(bins[following], share * nearness)
        bins[i - 1] = max(bins[i - 1], (1 - share) * nearness)
    return np.array(bins)


def distance(agent, position):
    """Returns the distance of agent and position in the plane, in metres."""
    x, y = np.subtract(position[:2], agent.pos[:2]).tolist()
    return math.sqrt(x * x + y * y)


def build_observation_space(task):
    original_build(task)
    task.obs_info.obs_space_dict.contains = unchecked


def unchecked(obs):
    """In place of a check of each observation. The scripts and evaluate.py look for NaN themselves."""
    return True


dataclasses.dataclass = dataclass
try:
    import yaml
    from safety_gymnasium import world  # and with it all tasks, which register themselves with Gymnasium
    from safety_gymnasium.bases.base_agent import BaseAgent
    from safety_gymnasium.bases.base_task import BaseTask
except ModuleNotFoundError as error:
    raise ImportError(f"{error}; docs/field.md says how to install Safety-Gymnasium") from error
finally:
    dataclasses.dataclass = original
world.yaml = SimpleNamespace(load=load, FullLoader=yaml.FullLoader)
original_lidar, original_build = BaseTask._obs_lidar_pseudo, BaseTask.build_observation_space
BaseTask.build_observation_space = build_observation_space
BaseTask._obs_lidar_pseudo, BaseAgent.dist_xy = lidar, distance
