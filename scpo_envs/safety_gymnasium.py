"""Safety-Gymnasium 1.0.0, on Python 3.11 too and with quick resets. docs/field.md says how to install and use it.

`--env-id scpo_envs.safety_gymnasium:SafetyPointGoal1Gymnasium-v0` imports this module, and this module the package:

1. Since Python 3.11 a dataclass takes no default that can't be hashed, such as an array. The package's dataclasses have
   some. While it is imported they are turned into factories, so all works as on Python 3.8 to 3.10.
2. At each reset a navigation task decodes 24 MB of PNG files, the stars in its sky. That takes longer than the 1,000
   steps of the episode. Here the sky is grey. What the agent sees and does stays the same to the last bit.
"""

import dataclasses
import functools
from types import SimpleNamespace

import yaml

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


dataclasses.dataclass = dataclass
try:
    from safety_gymnasium import world  # and with it all tasks, which register themselves with Gymnasium
finally:
    dataclasses.dataclass = original
world.yaml = SimpleNamespace(load=load, FullLoader=yaml.FullLoader)
