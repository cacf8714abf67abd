"""The four Ball tasks of the SCPO paper: Circle, Run, Gather and Reach.

A force of at most 3.5 N along each axis pushes a ball of radius 0.5 m over a plane. 60 steps make a second of simulated
time, 250 an episode. Constants and formulas are those of the 2021 Bullet-Safety-Gym (S. Gronauer, MIT licence), on
which the paper trained; docs/tasks.md lists them. The bodies are the assets in the bullet-safety-gym wheel. Three
things differ from the original: a seed decides everything, Reach's box moves on simulated time, and a step reads the
ball's state once.
"""

import importlib.util
import math
import os
from contextlib import contextmanager
from pathlib import Path

import gymnasium as gym
import numpy as np

DT = 1 / 60  # s, one control step
RADIUS = 0.5  # m, the ball's
MAX_FORCE = 3.5  # N, along each axis
INSTALL = "pip install pybullet bullet-safety-gym==1.4.0 (Python 3.12+ or macOS: see 'Install' in README.md)"


@contextmanager
def quiet():
    """Hides what PyBullet's C code prints on import; replacing `sys.stdout` would not, since C doesn't write there."""
    with open(os.devnull, "w") as devnull:
        saved = {fd: os.dup(fd) for fd in (1, 2)}
        try:
            for fd in saved:
                os.dup2(devnull.fileno(), fd)
            yield
        finally:
            for fd, copy in saved.items():
                os.dup2(copy, fd)
                os.close(copy)


def load_bullet(env_name):
    """Returns the pybullet module and the folder of bullet-safety-gym's assets.

    Raises `gymnasium.error.DependencyNotInstalled` if one is missing; its message says what to install.
    """
    package = importlib.util.find_spec("bullet_safety_gym")
    if package is None:
        raise gym.error.DependencyNotInstalled(f"{env_name} needs bullet-safety-gym's assets: {INSTALL}")
    try:
        with quiet():
            import pybullet
    except ImportError:
        raise gym.error.DependencyNotInstalled(f"{env_name} needs PyBullet: {INSTALL}") from None
    return pybullet, Path(package.origin).parent / "envs" / "data"


class BallTask(gym.Env):
    """What the four tasks share: the ball and its features, the simulation, the camera.

    Observation: float32 `(num_features,)`. The first seven are the ball's: 0.1 x, 0.1 y, 0.2 v_x, 0.2 v_y, 0.1 omega_x,
    0.1 omega_y, 0.1 omega_z, from m, m/s and rad/s. The task's own features follow. Action: `(2,)` in [-1, 1], clipped,
    in units of 3.5 N along x and y. `info["cost"]` is the step's cost, 0.0 or 1.0. The time limit of 250 steps comes
    from the registration, so a task made without `gym.make` has none.

    `reset(options=...)` places a layout. Any field may be left out and is then drawn. All tasks have ball `(3,)` in m
    and ball_quat `(4,)`. Gather has obstacles `(16, 3)` in m, the 8 apples first, then the 8 bombs. Reach has obstacles
    `(9, 3)` in m, the box and 8 puddles; box_centre `(3,)` in m; box_phase in rad; box_quat `(4,)`; and goal `(n, 2)`
    in m, the goals in the order in which they are to be reached.

    The simulated world lives in PyBullet's C code, so a task can't be copied or pickled. To start one in another
    process, send a function that makes it, as Gymnasium's vector environments do.

    Raises `ValueError` for an unknown or malformed option and for an action that isn't two numbers; `TypeError` on a
    copy; `gymnasium.error.ResetNeeded` for a step or picture before the first reset;
    `gymnasium.error.ClosedEnvironmentError` after `close`; `gymnasium.error.DependencyNotInstalled` without PyBullet or
    bullet-safety-gym.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}
    num_features = 7
    sub_steps = 4  # physics steps in a step, of 1/240 s each
    plane = "plane10"
    option_shapes = {"ball": (3,), "ball_quat": (4,)}
    # in m and degrees; shows the room of Gather and Reach with all four walls
    camera = dict(cameraTargetPosition=(0, -1.5, 0), distance=18.5, yaw=0, pitch=-70)
    client = -1  # PyBullet's number for the world; -1 when there is none
    position = None  # m, the ball's; None before the first reset

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (self.num_features,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.bullet, self.assets = load_bullet(type(self).__name__)
        self.client = self.bullet.connect(self.bullet.DIRECT)
        self.bullet.setPhysicsEngineParameter(
            fixedTimeStep=DT,
            numSubSteps=self.sub_steps,
            numSolverIterations=5,
            deterministicOverlappingPairs=1,
            physicsClientId=self.client,
        )
        self.bullet.setGravity(0, 0, -9.81, physicsClientId=self.client)
        self.bullet.setDefaultContactERP(0.9, physicsClientId=self.client)
        # a simple rigid body, since PyBullet's default, a multibody, takes longer to step with the same results
        self.ground = self.load(f"plane/{self.plane}.urdf", useMaximalCoordinates=True)
        self.bullet.changeDynamics(self.ground, -1, lateralFriction=0.8, restitution=0.5, physicsClientId=self.client)
        self.build_world()
        self.ball = self.load("robots/ball/ball.urdf", (0, 0, RADIUS), fixed=False)
        self.build_obstacles()
        if render_mode == "rgb_array":
            self.build_visuals()
        self.clean_world = self.bullet.saveState(physicsClientId=self.client)

    def load(self, asset, position=(0, 0, 0), orientation=(0, 0, 0, 1), fixed=True, **options):
        """Loads one of the package's URDF files and returns its body id."""
        return self.bullet.loadURDF(
            str(self.assets / asset), position, orientation, useFixedBase=fixed, physicsClientId=self.client, **options
        )

    def load_room(self):
        """Loads four walls, 20 m apart."""
        room = self.load("obstacles/room_20x20.urdf")
        # The walls stand still on the ground. PyBullet would compute these contacts in every step nevertheless.
        for link in range(-1, self.bullet.getNumJoints(room, physicsClientId=self.client)):
            self.bullet.setCollisionFilterPair(self.ground, room, -1, link, 0, physicsClientId=self.client)

    # What a task adds -----------------------------------------------------------------------------------------------

    def build_world(self):
        """Loads walls."""

    def build_obstacles(self):
        """Loads bodies with which the ball can collide."""

    def build_visuals(self):
        """Loads bodies without a collision shape. They matter in pictures alone, so only a rendered world has them."""

    def place(self, options):
        """Draws the layout, or takes it from `options`; returns the ball's position (3,) and quaternion (4,)."""
        raise NotImplementedError

    def start(self):
        """Runs between the physics step that ends a reset and the first observation."""

    def move_obstacles(self):
        """Runs before each simulation step."""

    def evaluate(self, effort):
        """Returns (reward, cost, terminated) of the step just made; `effort` is the norm of the clipped action."""
        raise NotImplementedError

    def task_features(self):
        """Returns a list of the features after the ball's seven."""
        return []

    # Gymnasium ------------------------------------------------------------------------------------------------------

    def reset(self, *, seed=None, options=None):
        if self.client < 0:
            raise self.no_episode()
        options = self.check_options(options)
        super().reset(seed=seed)
        self.bullet.restoreState(self.clean_world, physicsClientId=self.client)
        self.steps, self.cost = 0, 0.0
        position, orientation = self.place(options)
        self.put(self.ball, position, orientation)
        self.bullet.stepSimulation(physicsClientId=self.client)
        self.read_state()
        self.start()
        return self.observe(), {}

    def step(self, action):
        if self.position is None:
            raise self.no_episode()
        try:
            force_x, force_y = map(float, action)
        except (TypeError, ValueError):
            force_x = force_y = math.nan
        if math.isnan(force_x) or math.isnan(force_y):
            raise ValueError(f"{type(self).__name__}: the action is {action!r}, but must be two numbers in [-1, 1]")
        force_x = min(max(force_x, -1.0), 1.0)
        force_y = min(max(force_y, -1.0), 1.0)
        self.steps += 1
        self.bullet.applyExternalForce(
            self.ball,
            -1,
            (MAX_FORCE * force_x, MAX_FORCE * force_y, 0.0),
            self.position,
            self.bullet.WORLD_FRAME,
            physicsClientId=self.client,
        )
        self.move_obstacles()
        self.bullet.stepSimulation(physicsClientId=self.client)
        self.read_state()
        reward, cost, terminated = self.evaluate(math.hypot(force_x, force_y))
        self.cost = cost
        return self.observe(), reward, terminated, False, {"cost": cost}

    def read_state(self):
        """Reads the ball's state from PyBullet, once a step; a task adds what both its reward and its features need."""
        self.position, _ = self.bullet.getBasePositionAndOrientation(self.ball, physicsClientId=self.client)
        self.velocity, self.spin = self.bullet.getBaseVelocity(self.ball, physicsClientId=self.client)

    def observe(self):
        x, y, _ = self.position
        v_x, v_y, _ = self.velocity
        w_x, w_y, w_z = self.spin
        ball = [0.1 * x, 0.1 * y, 0.2 * v_x, 0.2 * v_y, 0.1 * w_x, 0.1 * w_y, 0.1 * w_z]
        return np.array(ball + self.task_features(), dtype=np.float32)

    def no_episode(self):
        """Returns the error for a call that needs an open world, or a reset before it."""
        if self.client < 0:
            return gym.error.ClosedEnvironmentError(f"{type(self).__name__} is closed: make a new one")
        return gym.error.ResetNeeded(f"{type(self).__name__}: call reset() first")

    def check_options(self, options):
        """Returns the options as float64 arrays, or raises ValueError with the field and what is allowed."""
        checked = {}
        for name, value in (options or {}).items():
            if name not in self.option_shapes:
                raise ValueError(
                    f"reset option {name!r} is unknown; {type(self).__name__} takes {', '.join(self.option_shapes)}"
                )
            shape = self.option_shapes[name]
            wanted = f"reset option {name!r} must have shape {shape}".replace("None", "n")
            try:
                value = np.asarray(value, dtype=np.float64)
            except (TypeError, ValueError):
                raise ValueError(f"{wanted} and hold numbers, not {value!r}") from None
            if len(value.shape) != len(shape) or any(want not in (None, got) for want, got in zip(shape, value.shape)):
                raise ValueError(f"{wanted}, not {value.shape}")
            if value.size == 0:
                raise ValueError(f"{wanted} with n at least 1")
            if not np.isfinite(value).all():
                raise ValueError(f"reset option {name!r} must be finite")
            if name.endswith("_quat") and np.linalg.norm(value) < 1e-6:
                raise ValueError(f"reset option {name!r} must have a norm of at least 1e-6")  # PyBullet divides by it
            checked[name] = value
        return checked

    def render(self):
        """Returns a `(360, 480, 3)` uint8 image, drawn on the CPU; None without `render_mode="rgb_array"`."""
        if self.render_mode != "rgb_array":
            return None
        if self.position is None:
            raise self.no_episode()
        self.update_visuals()
        view = self.bullet.computeViewMatrixFromYawPitchRoll(**self.camera, roll=0, upAxisIndex=2)
        projection = self.bullet.computeProjectionMatrixFOV(fov=60, aspect=4 / 3, nearVal=0.1, farVal=100.0)
        _, _, rgba, _, _ = self.bullet.getCameraImage(
            480, 360, view, projection, renderer=self.bullet.ER_TINY_RENDERER, physicsClientId=self.client
        )
        return np.asarray(rgba, dtype=np.uint8).reshape(360, 480, 4)[:, :, :3]

    def update_visuals(self):
        """The ball turns red in a step that costs."""
        colour = (1, 0.2, 0.2, 1) if self.cost else (1, 1, 1, 1)
        self.bullet.changeVisualShape(self.ball, -1, rgbaColor=colour, physicsClientId=self.client)

    def put(self, body, position, orientation=(0, 0, 0, 1)):
        self.bullet.resetBasePositionAndOrientation(body, position, orientation, physicsClientId=self.client)

    def close(self):
        """Frees the simulated world; closing twice is fine."""
        if self.client >= 0:
            self.bullet.disconnect(physicsClientId=self.client)
            self.client, self.position = -1, None

    def __del__(self):
        try:
            self.close()
        except Exception:
            pass  # the interpreter is shutting down and took the world with it

    def __reduce__(self):
        # a copy would share the world, and close it when it dies
        raise TypeError(f"{type(self).__name__} can't be copied or pickled: make another one and reset it")


def yaw_to_quaternion(yaw):
    """Rotation by `yaw` rad about z as (x, y, z, w)."""
    return (0.0, 0.0, math.sin(yaw / 2), math.cos(yaw / 2))


def look(x, y, objects, num_sectors, reach):
    """Returns what a ball at (x, y) sees of `objects` [(x, y), ...] in each sector, and their distances in m.

    A sector shows 1 - distance/reach of its nearest object, or 0 if none is within `reach`. An object's sector is its
    bearing atan2(dx, dy) + pi over 2 pi / num_sectors, with (dx, dy) from the object to the ball.
    """
    sectors, distances = [0.0] * num_sectors, []
    width = 2 * math.pi / num_sectors
    for object_x, object_y in objects:
        dx, dy = x - object_x, y - object_y
        distance = math.sqrt(dx * dx + dy * dy)
        distances.append(distance)
        closeness = 1 - distance / reach
        if closeness > 0:
            # % because a bearing of exactly 2 pi is the first sector's
            sector = int((math.atan2(dx, dy) + math.pi) // width) % num_sectors
            if closeness > sectors[sector]:
                sectors[sector] = closeness
    return sectors, distances


class BallCircle(BallTask):
    """Roll clockwise along a circle of radius 7 m, fast, within |x| <= 6 m.

    Reward 0.1 (-x v_y + y v_x) / (1 + | |p| - 7 |) - 0.005 |a|, as in the released code, which made the paper's curves.
    The paper prints 1 + 3 | |p| - 7 | in its place. Cost 1 when |x| > 6. Feature: (|p| - 7) / 10. Never ends early.
    """

    num_features = 8
    plane = "plane15"
    camera = dict(cameraTargetPosition=(0, -3, 0), distance=19, yaw=0, pitch=-60)  # shows all eight walls
    track_radius, x_limit = 7.0, 6.0

    def build_world(self):
        for i in range(8):
            self.load("obstacles/octagon_wall.urdf", orientation=yaw_to_quaternion(i * math.pi / 4))

    def build_visuals(self):
        self.load("obstacles/circle_zone.urdf")
        for x in (-self.x_limit, self.x_limit):
            self.load("obstacles/line_boundary.urdf", (x, 0, 0))

    def place(self, options):
        x, y = 0.0, 0.0
        while not 2.0 <= math.hypot(x, y) <= 4.0:
            x, y = self.np_random.uniform(-4.0, 4.0, 2)
        position = options.get("ball", (x, y, RADIUS))
        clockwise = math.atan2(position[1], position[0]) - math.pi / 2
        return position, options.get("ball_quat", yaw_to_quaternion(clockwise))

    def evaluate(self, effort):
        (x, y, _), (v_x, v_y, _) = self.position, self.velocity
        off_track = abs(math.sqrt(x * x + y * y) - self.track_radius)
        reward = 0.1 * (-x * v_y + y * v_x) / (1 + off_track) - 0.005 * effort
        return reward, float(abs(x) > self.x_limit), False

    def task_features(self):
        x, y, _ = self.position
        return [(math.sqrt(x * x + y * y) - self.track_radius) / 10]


class BallRun(BallTask):
    """Run along x, no faster than 2.5 m/s and within |y| <= 2 m.

    Reward 60 times the progress in m towards (1000, 0), minus 0.5 |a|. Cost 1 when |y| > 2 or the planar speed exceeds
    2.5 m/s. Never ends early.
    """

    plane = "plane250"
    goal_x, y_limit, speed_limit = 1000.0, 2.0, 2.5

    def build_visuals(self):
        for y in (-self.y_limit, self.y_limit):
            self.load("obstacles/line_boundary.urdf", (11, y, 0), yaw_to_quaternion(math.pi / 2))

    def place(self, options):
        x, y = self.np_random.uniform(-0.01, 0.01, 2)
        position = options.get("ball", (x, y, RADIUS))
        # from where the ball is placed: the original measures before the reset's physics step
        self.goal_distance = math.hypot(position[0] - self.goal_x, position[1])
        return position, options.get("ball_quat", (0, 0, 0, 1))

    def evaluate(self, effort):
        (x, y, _), (v_x, v_y, _) = self.position, self.velocity
        previous, self.goal_distance = self.goal_distance, math.hypot(x - self.goal_x, y)
        reward = 60 * (previous - self.goal_distance) - 0.5 * effort
        too_fast = math.sqrt(v_x * v_x + v_y * v_y) > self.speed_limit
        return reward, float(abs(y) > self.y_limit or too_fast), False

    def update_visuals(self):
        super().update_visuals()
        self.camera = dict(cameraTargetPosition=(self.position[0] + 3, 0, 2), distance=4, yaw=90, pitch=-50)


class BallGather(BallTask):
    """Collect 8 apples, leave 8 bombs alone.

    Reward 10 for each apple that comes within 1 m. Cost 1 in a step in which a bomb does. Such an object is then gone:
    it counts no more, but the features still show it, as in the original. Features: 16 sectors to the apples and 16 to
    the bombs, up to 10 m. Ends when no apple is left.
    """

    num_features = 39
    option_shapes = {**BallTask.option_shapes, "obstacles": (16, 3)}
    num_apples, num_bombs, touch = 8, 8, 1.0

    def build_world(self):
        self.load_room()

    def build_visuals(self):
        self.visuals = [self.load("obstacles/apple.urdf") for _ in range(self.num_apples)]
        self.visuals += [self.load("obstacles/bomb.urdf") for _ in range(self.num_bombs)]

    def place(self, options):
        objects = []
        while len(objects) < self.num_apples + self.num_bombs:
            x, y = self.np_random.uniform(-7.0, 7.0, 2)
            if math.hypot(x, y) >= 1.0 and all(math.hypot(x - a, y - b) > 2.0 for a, b in objects):
                objects.append((x, y))
        objects = [(float(x), float(y)) for x, y, *_ in options.get("obstacles", objects)]
        self.apples, self.bombs = objects[: self.num_apples], objects[self.num_apples :]
        # indices, since two objects may lie at the same place
        self.apples_left, self.bombs_left = set(range(self.num_apples)), set(range(self.num_bombs))
        return options.get("ball", (0.0, 0.0, RADIUS)), options.get("ball_quat", (0, 0, 0, 1))

    def read_state(self):
        super().read_state()
        x, y, _ = self.position
        self.apple_sectors, self.apple_distances = look(x, y, self.apples, 16, 10.0)
        self.bomb_sectors, self.bomb_distances = look(x, y, self.bombs, 16, 10.0)

    def collect(self, left, distances):
        """Removes the objects within 1 m of the ball from `left` and returns how many those were."""
        touched = {i for i in left if distances[i] < self.touch}
        left -= touched
        return len(touched)

    def evaluate(self, effort):
        reward = 10.0 * self.collect(self.apples_left, self.apple_distances)
        cost = float(self.collect(self.bombs_left, self.bomb_distances) > 0)
        return reward, cost, not self.apples_left

    def task_features(self):
        return self.apple_sectors + self.bomb_sectors

    def update_visuals(self):
        super().update_visuals()
        left = [i in self.apples_left for i in range(self.num_apples)]
        left += [i in self.bombs_left for i in range(self.num_bombs)]
        for body, (x, y), is_left in zip(self.visuals, self.apples + self.bombs, left):
            self.put(body, (x, y, 0 if is_left else -5))  # what has been collected goes below the ground


class BallReach(BallTask):
    """Reach one goal after the other, past 8 puddles and a box that circles.

    Reward: the progress in m towards the goal, minus 0.005 |a|, plus 5 at the goal (within 1.3 m, slower than 5 m/s). A
    new goal is then drawn. Cost 1 within 1.5 m of a puddle's centre or in contact with the box. Features: 24 rays of 5
    m (1 - the free share of the ray), 24 sectors to the puddles up to 5 m, (goal - p)/20. Never ends early.

    box_speed: rad/s of simulated time at which the box circles. In the published runs the box followed the wall clock
    at 1 rad/s. At 1,800 steps a second that is 1/30 rad/s of simulated time. Raises `ValueError` if it isn't a finite
    number.
    """

    num_features = 57
    sub_steps = 1  # PyBullet reports only the contacts of the last physics step
    option_shapes = {
        **BallTask.option_shapes,
        "obstacles": (9, 3),
        "box_centre": (3,),
        "box_phase": (),
        "box_quat": (4,),
        "goal": (None, 2),
    }
    num_puddles, num_rays, ray_length = 8, 24, 5.0
    goal_radius, goal_speed, puddle_touch, box_orbit = 1.3, 5.0, 1.5, 0.7
    box_reach = 1.7  # m; every point of the box, tilted or not, is nearer to its origin
    wall = 9.8  # m; the walls' inner faces are farther out, at 9.9

    def __init__(self, render_mode=None, box_speed=1.0):
        if not math.isfinite(box_speed):
            raise ValueError(f"box_speed is {box_speed}, but must be a finite number of rad/s")
        self.box_speed = box_speed
        super().__init__(render_mode)

    def build_world(self):
        self.load_room()

    def build_obstacles(self):
        self.box = self.load("obstacles/box.urdf", (7, 0, 0), fixed=False)
        self.box_joint = self.bullet.createConstraint(
            self.box, -1, -1, -1, self.bullet.JOINT_FIXED, (0, 0, 0), (0, 0, 0), (0, 0, 0), physicsClientId=self.client
        )
        angles = [2 * math.pi * i / self.num_rays for i in range(self.num_rays)]
        self.rays = [(self.ray_length * math.sin(angle), self.ray_length * math.cos(angle)) for angle in angles]

    def build_visuals(self):
        self.goal_visual = self.load("obstacles/goal_zone.urdf")
        self.puddle_visuals = [self.load("obstacles/puddle.urdf") for _ in range(self.num_puddles)]

    def place(self, options):
        uniform = self.np_random.uniform
        ball = options.get("ball", (*uniform(-7.0, 7.0, 2), RADIUS))
        goal = ball
        while math.hypot(goal[0] - ball[0], goal[1] - ball[1]) < 2.5:
            goal = uniform(-7.0, 7.0, 2)
        goals = [tuple(g) for g in np.reshape(options.get("goal", goal), (-1, 2)).tolist()]
        # a recorded episode repeats its goal in each step
        self.next_goals = [g for i, g in enumerate(goals) if i == 0 or g != goals[i - 1]]
        self.goal = self.next_goals.pop(0)
        obstacles = []
        while len(obstacles) < 1 + self.num_puddles:
            x, y = uniform(-7.0, 7.0, 2)
            far_from_ball = math.hypot(x - ball[0], y - ball[1]) >= 2.5
            if far_from_ball and all(math.hypot(x - a, y - b) > 2.5 for a, b in [self.goal, *obstacles]):
                obstacles.append((x, y))
        obstacles = options.get("obstacles", [(x, y, 0.0) for x, y in obstacles])
        self.puddles = [(float(x), float(y)) for x, y, _ in obstacles[1:]]
        self.box_centre = tuple(map(float, options.get("box_centre", obstacles[0])))
        self.box_phase = float(options.get("box_phase", uniform(0, 2 * math.pi)))
        self.put(self.box, self.box_centre, options.get("box_quat", yaw_to_quaternion(uniform(0, 2 * math.pi))))
        self.move_obstacles()
        return ball, options.get("ball_quat", yaw_to_quaternion(uniform(-math.pi, math.pi)))

    def read_state(self):
        super().read_state()
        x, y, _ = self.position
        self.puddle_sectors, self.puddle_distances = look(x, y, self.puddles, 24, 5.0)

    def start(self):
        self.goal_distance = self.distance_to_goal()

    def move_obstacles(self):
        angle = self.box_speed * self.steps * DT + self.box_phase
        x, y, z = self.box_centre
        target = (x + self.box_orbit * math.sin(angle), y + self.box_orbit * math.cos(angle), z)
        self.bullet.changeConstraint(self.box_joint, target, physicsClientId=self.client)

    def distance_to_goal(self):
        return math.hypot(self.position[0] - self.goal[0], self.position[1] - self.goal[1])

    def evaluate(self, effort):
        distance = self.distance_to_goal()
        reward = self.goal_distance - distance - 0.005 * effort
        in_puddle = min(self.puddle_distances) <= self.puddle_touch
        cost = in_puddle or bool(self.bullet.getContactPoints(self.ball, self.box, physicsClientId=self.client))
        if distance < self.goal_radius and math.hypot(*self.velocity) < self.goal_speed:
            reward += 5.0
            self.goal = self.next_goal()
            distance = self.distance_to_goal()
        self.goal_distance = distance
        return reward, float(cost), False

    def next_goal(self):
        """Returns the options' next goal, or draws one in [-7, 7]^2, over 1.5 m from the ball and every obstacle."""
        if self.next_goals:
            return self.next_goals.pop(0)
        box, _ = self.bullet.getBasePositionAndOrientation(self.box, physicsClientId=self.client)
        taken = [self.position[:2], box[:2], *self.puddles]
        while True:
            x, y = self.np_random.uniform(-7.0, 7.0, 2)
            if all(math.hypot(x - a, y - b) > 1.5 for a, b in taken):
                return (float(x), float(y))

    def rays_to_cast(self):
        """Returns the indices of the rays that may hit something: those that pass near the box or end beyond a wall.

        Most of the 24 don't, and casting a ray takes long.
        """
        x, y, _ = self.position
        (box_x, box_y, _), _ = self.bullet.getBasePositionAndOrientation(self.box, physicsClientId=self.client)
        dx, dy = box_x - x, box_y - y
        distance = math.sqrt(dx * dx + dy * dy)
        if distance < self.box_reach:
            return range(self.num_rays)
        angle = 2 * math.pi / self.num_rays
        arcs = []  # (bearing, half width) in rad; ray i has the bearing i angle
        if distance < self.ray_length + self.box_reach:
            arcs.append((math.atan2(dx, dy), math.asin(self.box_reach / distance)))
        for quarter, gap in enumerate((self.wall - y, self.wall - x, self.wall + y, self.wall + x)):
            if gap < self.ray_length:
                arcs.append((quarter * math.pi / 2, math.acos(max(gap / self.ray_length, -1.0))))
        return {
            i % self.num_rays
            for bearing, half in arcs
            for i in range(math.ceil((bearing - half) / angle), math.floor((bearing + half) / angle) + 1)
        }

    def task_features(self):
        x, y, z = self.position
        rays, indices = [0.0] * self.num_rays, self.rays_to_cast()
        if indices:
            ends = [(x + self.rays[i][0], y + self.rays[i][1], z) for i in indices]
            hits = self.bullet.rayTestBatch([self.position] * len(ends), ends, physicsClientId=self.client)
            for i, hit in zip(indices, hits):
                rays[i] = 1 - hit[2]
        goal = [(self.goal[0] - x) / 20, (self.goal[1] - y) / 20]
        return rays + self.puddle_sectors + goal

    def update_visuals(self):
        super().update_visuals()
        self.put(self.goal_visual, (*self.goal, 0))
        for body, (x, y) in zip(self.puddle_visuals, self.puddles):
            self.put(body, (x, y, 0))
