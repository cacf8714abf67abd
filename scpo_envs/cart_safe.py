"""CartSafe: swing a pole up and hold it there, with the cart near the middle.

The paper takes the task from gym-safety, which was never published as a package; docs/tasks.md lists its constants.
"""

import math

import gymnasium as gym
import numpy as np

GRAVITY, DT = 9.8, 0.02  # m/s^2, s
CART_MASS, POLE_MASS, HALF_LENGTH = 1.0, 0.1, 0.5  # kg, kg, m
TOTAL_MASS, MASS_LENGTH = CART_MASS + POLE_MASS, POLE_MASS * HALF_LENGTH
FORCE = 10.0  # N
X_COST, X_END = 1.0, 2.4  # m


class CartSafe(gym.Env):
    """Cart-pole that starts hanging.

    Observation: float64 `(4,)`, (x, x_dot, theta, theta_dot) in m, m/s, rad, rad/s; theta is 0 upright and lies in
    [0, 2 pi). Action: 0 pushes with -10 N, 1 with 10 N. Reward 1 + cos(theta). `info["cost"]` is 1.0 when |x| > 1, else
    0.0 (the paper prints the inequality the wrong way round). `info["constraint_costs"]` has it as a list, as in
    gym-safety. Terminates when |x| > 2.4. The time limit of 300 steps comes from the registration.
    `reset(options={"state": ...})` places the state `(4,)`.

    Raises `ValueError` for an action that isn't 0 or 1 and for an unknown or malformed option, and
    `gymnasium.error.ResetNeeded` for a step or picture before the first reset.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}
    state = None  # before the first reset

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        high = np.array([np.inf, np.inf, 2 * math.pi, np.inf])
        self.observation_space = gym.spaces.Box(np.array([-np.inf, -np.inf, 0, -np.inf]), high, dtype=np.float64)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        state = self.np_random.uniform(-0.05, 0.05, 4) + [0, 0, math.pi, 0]
        for name, value in (options or {}).items():
            if name != "state" or np.shape(value) != (4,) or not np.isfinite(value).all():
                raise ValueError(
                    f"reset option {name!r} is unknown or malformed; CartSafe takes state, 4 finite numbers"
                )
            state = value
        self.state = tuple(float(x) for x in state)
        return np.array(self.state), {}

    def step(self, action):
        if self.state is None:
            raise gym.error.ResetNeeded("CartSafe: call reset() first")
        if getattr(action, "size", 1) != 1 or action not in (0, 1):
            raise ValueError(f"CartSafe: the action is {action}, but must be 0 or 1")
        x, x_dot, theta, theta_dot = self.state
        sin, cos = math.sin(theta), math.cos(theta)
        pull = ((FORCE if action == 1 else -FORCE) + MASS_LENGTH * theta_dot**2 * sin) / TOTAL_MASS
        theta_acc = (GRAVITY * sin - cos * pull) / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cos**2 / TOTAL_MASS))
        x_acc = pull - MASS_LENGTH * theta_acc * cos / TOTAL_MASS
        x, x_dot = x + DT * x_dot, x_dot + DT * x_acc
        theta, theta_dot = (theta + DT * theta_dot) % (2 * math.pi), theta_dot + DT * theta_acc
        self.state = (x, x_dot, theta, theta_dot)
        cost = 1.0 if abs(x) > X_COST else 0.0
        info = {"cost": cost, "constraint_costs": [cost]}
        return np.array(self.state), 1 + math.cos(theta), abs(x) > X_END, False, info

    def render(self):
        """Returns a `(300, 600, 3)` uint8 image of cart, pole and limits; None without `render_mode="rgb_array"`."""
        if self.render_mode != "rgb_array":
            return None
        if self.state is None:
            raise gym.error.ResetNeeded("CartSafe: call reset() first")
        x, _, theta, _ = self.state
        columns, rows = np.meshgrid((np.arange(600) - 299.5) / 120, (149.5 - np.arange(300)) / 120)  # m, from the axle
        image = np.full((300, 600, 3), 255, dtype=np.uint8)
        image[abs(rows) < 0.01] = (160, 160, 160)  # the rail
        image[abs(abs(columns) - X_COST) < 0.015] = (220, 50, 40)
        unsafe = abs(x) > X_COST
        image[(abs(columns - x) < 0.25) & (abs(rows) < 0.12)] = (220, 50, 40) if unsafe else (50, 50, 50)
        tip = 2 * HALF_LENGTH * np.array([math.sin(theta), math.cos(theta)])
        along = np.clip(((columns - x) * tip[0] + rows * tip[1]) / (tip @ tip), 0, 1)
        image[np.hypot(columns - x - along * tip[0], rows - along * tip[1]) < 0.04] = (30, 110, 180)
        return image
