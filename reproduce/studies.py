"""Named runs and their settings, and the studies, which compare runs of one task.

bash benchmark.sh --study NAME makes the runs of a study, python -m reproduce.plot its figure and table. `--study fast`
makes the runs of --fast, which have their own lengths; reproduce/fast.py draws them.
"""

from typing import NamedTuple


class Study(NamedTuple):
    about: str
    task: str
    iterations: int  # that the runs are compared at
    seeds: int
    labels: tuple  # SCPO and PPO are the campaign's own runs


SETTINGS = {  # label: what it changes of the script's defaults
    "PPO": dict(k=0, beta=0),
    "fast": dict(fast=True),
    "annealed": dict(anneal_lr=True),
    "not_augmented": dict(augment_state=False),
    "L2": dict(surrogate="l2"),
    "Monte_Carlo": dict(safety_lambdas=[1.0]),
    "one_step": dict(safety_lambdas=[0.0]),
    "lambda_0.95": dict(safety_lambdas=[0.95]),
    "slow_box": dict(  # with Reach's settings, for the scripts know the task under its own name alone
        **dict(env_id="SafetyBallReachSlowBox-v0", cost_limit=10, k=4, beta=0, reward_bias=0.1, ent_coef=0.01),
        **dict(num_envs=16, num_steps=2048, learning_rate=2e-4, anneal_lr=False, reward_scale=1, log_std_init=0),
        norm_obs=False,
    ),
}
STUDIES = {
    "cartsafe": Study("SCPO and PPO on CartSafe", "CartSafe-v0", 150, 4, ("SCPO", "PPO")),
    "augmentation": Study(
        "the cost spent as part of the state, or not", "SafetyBallRun-v0", 100, 4, ("SCPO", "not_augmented")
    ),
    "annealing": Study(
        "the learning rate annealed to 0, or constant", "SafetyBallRun-v0", 100, 4, ("SCPO", "annealed")
    ),
    "estimators": Study(
        "surrogate L1 or L2, and how Q^c is estimated",
        "SafetyBallCircle-v0",
        100,
        3,
        ("SCPO", "L2", "Monte_Carlo", "one_step", "lambda_0.95"),
    ),
    "box": Study(
        "Reach's box in simulated time, or as slow as in the published runs",
        "SafetyBallReach-v0",
        60,
        2,
        ("SCPO", "slow_box"),
    ),
}
