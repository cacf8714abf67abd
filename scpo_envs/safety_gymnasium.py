"""Safety-Gymnasium 1.0.0 on Python 3.11: `--env-id scpo_envs.safety_gymnasium:SafetyPointGoal1Gymnasium-v0`.

Since 3.11 a dataclass takes no default that can't be hashed, such as an array, and the package's dataclasses have some.
Here they are handed to it as factories while the package is imported. It then works as it does on Python 3.8 to 3.10,
where this module imports the package and does nothing else. docs/field.md says how to install it.
"""

import dataclasses

original = dataclasses.dataclass


def dataclass(cls, **options):
    for name in vars(cls).get("__annotations__", ()):
        default = vars(cls).get(name)
        if type(default).__hash__ is None:
            setattr(cls, name, dataclasses.field(default_factory=lambda default=default: default))
    return original(cls, **options)


dataclasses.dataclass = dataclass
try:
    import safety_gymnasium  # noqa: F401  registers its tasks with Gymnasium
finally:
    dataclasses.dataclass = original
