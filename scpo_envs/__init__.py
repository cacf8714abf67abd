"""The tasks of the SCPO paper, registered with Gymnasium by `import scpo_envs`.

SafetyBallCircle-v0, SafetyBallRun-v0, SafetyBallGather-v0 and SafetyBallReach-v0 are the tasks of the 2021
Bullet-Safety-Gym, on which the paper trained. CartSafe-v0 is gym-safety's. SafetyBallReachSlowBox-v0 is Reach with a
box as slow as in the published runs. PyPI's bullet-safety-gym 1.4.0 has other tasks under the same ids (see
docs/tasks.md). They can be had as `release/SafetyBallCircle-v0` and so on; its Car, Drone and Ant tasks keep their ids.
"""

import gymnasium as gym

try:
    # This only registers the package's ids, it doesn't load PyBullet. It must run before we register ours. Python runs
    # a module once, so nobody's later `import bullet_safety_gym` can then replace the paper's tasks.
    import bullet_safety_gym  # noqa: F401
except ImportError:
    pass  # making a Ball task says what to install

BALL_TASKS = ("Circle", "Run", "Gather", "Reach")

for task in BALL_TASKS:
    env_id = f"SafetyBall{task}-v0"
    released = gym.registry.pop(env_id, None)
    if released is not None and str(released.entry_point).startswith("bullet_safety_gym"):  # not ours, on a reload
        gym.register(
            f"release/{env_id}",
            entry_point=released.entry_point,
            max_episode_steps=released.max_episode_steps,
            kwargs=released.kwargs,
        )
    gym.register(env_id, entry_point=f"scpo_envs.ball_tasks:Ball{task}", max_episode_steps=250)

# In the published runs the box followed the wall clock. The machine made some 1,800 steps a second, 30 times as many as
# a second of simulated time has.
gym.register(
    "SafetyBallReachSlowBox-v0",
    entry_point="scpo_envs.ball_tasks:BallReach",
    max_episode_steps=250,
    kwargs={"box_speed": 1 / 30},
)
gym.register("CartSafe-v0", entry_point="scpo_envs.cart_safe:CartSafe", max_episode_steps=300)
