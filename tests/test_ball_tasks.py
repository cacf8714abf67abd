"""The paper's Ball tasks against trajectories recorded from the original ones. Needs no torch."""

import copy
import gc
import multiprocessing
import pickle
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import scpo_envs

ROOT = Path(__file__).parent.parent
GOLDEN = np.load(ROOT / "tests/data/ball_tasks.npz")
TASKS = scpo_envs.BALL_TASKS


def make(task, **kwargs):
    return gym.make(f"SafetyBall{task}-v0", disable_env_checker=True, **kwargs)


def golden(task, episode):
    fields = {key.split("/")[2]: GOLDEN[key] for key in GOLDEN if key.startswith(f"{task}/{episode}/")}
    names = scpo_envs_class(task).option_shapes
    return fields, {name: fields[name] for name in names if name in fields and fields[name].size}


def scpo_envs_class(task):
    from scpo_envs import ball_tasks

    return getattr(ball_tasks, f"Ball{task}")


def replay(env, actions, **reset):
    """Returns observations (steps + 1, n), rewards, costs and terminations (steps,) of one episode."""
    obs, _ = env.reset(**reset)
    observations, rewards, costs, terminations = [obs], [], [], []
    for action in actions:
        obs, reward, terminated, _, info = env.step(action)
        observations.append(obs)
        rewards.append(reward)
        costs.append(info["cost"])
        terminations.append(terminated)
    return np.array(observations), np.array(rewards), np.array(costs), np.array(terminations)


def python(code):
    """Runs code in a new interpreter and returns what it printed."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("render_mode", [None, "rgb_array"])
@pytest.mark.parametrize("episode", range(4))
@pytest.mark.parametrize("task", TASKS)
def test_matches_the_original(task, episode, render_mode):
    env = make(task, render_mode=render_mode)
    env.reset(seed=3)  # the world has been used: nothing of that may be left
    for _ in range(20):
        env.step([1.0, 0.3])
    fields, options = golden(task, episode)
    observations, rewards, costs, terminations = replay(env, fields["action"], options=options)
    np.testing.assert_allclose(observations, fields["obs"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(rewards, fields["reward"], rtol=0, atol=1e-9)
    np.testing.assert_array_equal(costs, fields["cost"])
    np.testing.assert_array_equal(terminations, fields["terminated"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", TASKS)
def test_passes_gymnasiums_checker(task):
    check_env(make(task, render_mode="rgb_array").unwrapped)


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_decides_the_episode(task):
    actions = np.random.default_rng(0).uniform(-1.5, 1.5, (250, 2))
    env = make(task)
    first = replay(env, actions, seed=5)
    replay(env, actions[:40])  # an episode in between, left in the middle
    again = replay(env, actions, seed=5)
    fresh = replay(make(task), actions, seed=5)
    other = replay(env, actions, seed=6)
    for one, two, three in zip(first, again, fresh):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)
    assert not np.array_equal(first[0][0], other[0][0]) or task == "Gather"  # Gather's ball always starts in the middle
    assert not np.array_equal(first[0], other[0])


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_decides_the_episode_in_another_process(task):
    code = f"""if True:
        import gymnasium as gym, numpy as np, scpo_envs, hashlib
        env = gym.make("SafetyBall{task}-v0", disable_env_checker=True)
        obs = [env.reset(seed=5)[0]] + [env.step([0.5, -0.7])[0] for _ in range(200)]
        print(hashlib.sha256(np.array(obs).tobytes()).hexdigest())"""
    assert python(code) == python(code)


def test_global_random_state_is_neither_used_nor_touched():
    env = make("Gather")
    np.random.seed(1)  # noqa: NPY002
    env.reset(seed=5)
    layout = env.unwrapped.apples
    np.random.seed(2)  # noqa: NPY002
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    env.reset(seed=5)
    assert env.unwrapped.apples == layout
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002


def test_layouts_keep_their_distances():
    gather, reach = make("Gather").unwrapped, make("Reach").unwrapped
    for seed in range(30):
        gather.reset(seed=seed)
        objects = np.array(gather.apples + gather.bombs)
        assert np.linalg.norm(objects, axis=1).min() >= 1.0 and abs(objects).max() <= 7.0
        assert distances(objects).min() > 2.0
        reach.reset(seed=seed)
        obstacles = np.array([reach.box_centre[:2], *reach.puddles])
        assert distances(np.array([reach.goal, *obstacles])).min() > 2.5
        ball = np.array(reach.position[:2])
        assert np.linalg.norm(obstacles - ball, axis=1).min() > 2.49  # the settling step moves the ball a little
        assert np.linalg.norm(np.array(reach.goal) - ball) > 2.49


def distances(points):
    """All distances between different points, as a vector."""
    return np.linalg.norm(points[:, None] - points[None], axis=2)[np.triu_indices(len(points), 1)]


def test_the_box_moves_on_simulated_time():
    actions = np.zeros((30, 2))
    env = make("Reach")
    fast = replay(env, actions, seed=1)[0]
    slow = [env.reset(seed=1)[0]]
    for action in actions:
        time.sleep(0.003)
        slow.append(env.step(action)[0])
    np.testing.assert_array_equal(fast, np.array(slow))
    box, _ = env.unwrapped.bullet.getBasePositionAndOrientation(env.unwrapped.box, physicsClientId=env.unwrapped.client)
    angle = 30 / 60 + env.unwrapped.box_phase
    target = env.unwrapped.box_centre[:2] + 0.7 * np.array([np.sin(angle), np.cos(angle)])
    assert np.linalg.norm(box[:2] - target) < 0.1


@pytest.mark.parametrize("task", TASKS)
def test_bodies_that_are_cheaper_to_step_change_no_bit(task, monkeypatch):
    """The ground as a multibody, and walls whose contacts with the ground are computed, give the same numbers."""
    ball_task, env = scpo_envs_class(task), make(task)
    load = ball_task.load
    monkeypatch.setattr(ball_task, "load", lambda *args, useMaximalCoordinates=False, **kwargs: load(*args, **kwargs))
    monkeypatch.setattr(ball_task, "load_room", lambda self: self.load("obstacles/room_20x20.urdf"))
    plain = make(task)
    rng = np.random.default_rng(0)
    pushes = [rng.uniform(-1, 1, (250, 2)), np.zeros((250, 2))]  # one rolls freely, one lies still
    pushes += [rng.uniform(0.5, 1.2, (250, 2)) * side for side in ([1, 1], [-1, 0.1])]  # into a corner, along a wall
    for seed, actions in enumerate(pushes):
        for ours, theirs in zip(replay(env, actions, seed=seed), replay(plain, actions, seed=seed)):
            np.testing.assert_array_equal(ours, theirs)


def test_the_rays_that_are_not_cast_would_hit_nothing():
    env = make("Reach").unwrapped
    rng = np.random.default_rng(0)
    cast = 0
    for seed in range(300):
        ball = [*rng.uniform(-9, 9, 2), 0.5]
        box = [*(np.array(ball[:2]) + rng.uniform(-6, 6, 2)).clip(-8, 8), 0]
        obs, _ = env.reset(seed=seed, options={"ball": ball, "box_centre": box})
        x, y, z = env.position
        ends = [(x + dx, y + dy, z) for dx, dy in env.rays]
        hits = env.bullet.rayTestBatch([env.position] * 24, ends, physicsClientId=env.client)
        np.testing.assert_allclose(obs[7:31], [1 - hit[2] for hit in hits], rtol=0, atol=1e-7)
        cast += len(env.rays_to_cast())
    assert cast < 300 * 14


def test_a_new_goal_follows_the_reached_one():
    env = make("Reach").unwrapped
    env.reset(seed=1, options={"ball": [0, 0, 0.5], "goal": [[3.0, 0], [-6, -6]], "obstacles": [[6, 6, 0]] * 9})
    rewards = [env.step([1.0, 0])[1] for _ in range(120)]
    assert max(rewards) > 4.9 and env.goal == (-6, -6)
    far = env.next_goal()  # the list is used up: drawn, more than 1.5 m from the ball
    assert np.hypot(far[0] - env.position[0], far[1] - env.position[1]) > 1.5


@pytest.mark.parametrize(
    "task, options, message",
    [
        ("Reach", {"goal": np.zeros((0, 2))}, r"'goal' must have shape \(n, 2\) with n at least 1"),
        ("Gather", {"obstacles": [[1, 2], [3]]}, r"'obstacles' must have shape \(16, 3\) and hold numbers"),
        ("Run", {"ball": "here"}, r"'ball' must have shape \(3,\) and hold numbers"),
        ("Circle", {"ball_quat": [0, 0, 0, 0]}, "'ball_quat' must have a norm"),
        ("Reach", {"box_quat": [0, 0, 0, 1e-200]}, "'box_quat' must have a norm"),
        ("Circle", {"goal": [[1, 2]]}, "'goal' is unknown.*ball, ball_quat"),
        ("Gather", {"obstacles": np.zeros((15, 3))}, r"'obstacles' must have shape \(16, 3\), not \(15, 3\)"),
        ("Reach", {"goal": [1, 2]}, r"'goal' must have shape \(n, 2\)"),
        ("Run", {"ball": [0, 0, np.nan]}, "'ball' must be finite"),
    ],
)
def test_a_wrong_option_is_named(task, options, message):
    env, undisturbed = make(task), make(task)
    for each in (env, undisturbed):
        each.reset(seed=1)
        each.step([0.5, 0.5])
    with pytest.raises(ValueError, match=message):
        env.reset(seed=2, options=options)
    np.testing.assert_array_equal(env.step([0.5, 0.5])[0], undisturbed.step([0.5, 0.5])[0])  # the episode goes on
    np.testing.assert_array_equal(env.reset()[0], undisturbed.reset()[0])  # and so do the random numbers


@pytest.mark.parametrize("action", [[np.nan, 0], [0, np.nan], [0.1, 0.2, 0.3], [0.1], 0.1, None, "ab", [None, 0]])
def test_a_wrong_action_is_refused(action):
    env = make("Run")
    env.reset(seed=1)
    with pytest.raises(ValueError, match="BallRun: the action is .*, but must be two numbers"):
        env.step(action)


@pytest.mark.parametrize("task", TASKS)
def test_a_call_without_an_episode_says_what_is_missing(task):
    env = make(task, render_mode="rgb_array").unwrapped
    calls = {"step": lambda: env.step([0, 0]), "render": env.render, "reset": env.reset}
    for name in ("step", "render"):
        with pytest.raises(gym.error.ResetNeeded, match=f"Ball{task}: call reset"):
            calls[name]()
    env.reset(seed=1)
    env.close()
    for call in calls.values():
        with pytest.raises(gym.error.ClosedEnvironmentError, match=f"Ball{task} is closed"):
            call()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("task", TASKS)
def test_a_task_cannot_be_copied_and_the_original_lives_on(task, duplicate):
    env = make(task)
    env.reset(seed=1)
    with pytest.raises(TypeError, match=f"Ball{task} can't be copied or pickled"):
        duplicate(env.unwrapped)
    gc.collect()
    env.step([0, 0])


def test_objects_at_the_same_place_count_each():
    apples = [[0, 1.3, 0]] * 2 + [[6, 6, 0]] * 6
    bombs = [[0, 1.3, 0]] * 2 + [[-6, 6, 0]] * 6
    env = make("Gather", render_mode="rgb_array").unwrapped
    env.reset(seed=1, options={"obstacles": apples + bombs})
    assert (len(env.apples_left), len(env.bombs_left)) == (8, 8)
    _, rewards, costs, terminations = replay(
        env, [[0, 1]] * 40, seed=1, options={"ball": [0, 0, 0.5], "obstacles": apples + bombs}
    )
    assert rewards.sum() == 20 and costs.sum() == 1 and not terminations.any()
    assert (len(env.apples_left), len(env.bombs_left)) == (6, 6)
    env.render()
    heights = [env.bullet.getBasePositionAndOrientation(body, physicsClientId=env.client)[0][2] for body in env.visuals]
    assert [height < -1 for height in heights] == ([True] * 2 + [False] * 6) * 2


def rollout(env, steps=40):
    return [env.step([0.7, -0.4])[0] for _ in range(steps)]


@pytest.mark.parametrize(
    "task, vector",
    [(task, vector) for task in TASKS for vector in ("SyncVectorEnv", "AsyncVectorEnv fork")]
    + [("Reach", "AsyncVectorEnv spawn")],
)
def test_vector_environments_step_as_single_ones(task, vector):
    name, _, context = vector.partition(" ")
    envs = getattr(gym.vector, name)([lambda: make(task)] * 3, **({"context": context} if context else {}))
    actions = np.random.default_rng(0).uniform(-1, 1, (30, 3, 2)).astype(np.float32)
    observations, rewards = [envs.reset(seed=[4, 5, 6])[0]], []
    for action in actions:
        obs, reward, _, _, info = envs.step(action)
        observations.append(obs.copy())
        rewards.append(reward.copy())
        assert "cost" in info
    envs.close()
    for i in range(3):
        alone = replay(make(task), actions[:, i], seed=4 + i)
        np.testing.assert_array_equal(np.array(observations)[:, i], alone[0])
        np.testing.assert_array_equal(np.array(rewards)[:, i], alone[1])


def test_parent_and_child_go_on_alone_after_a_fork():
    env, reference = make("Reach"), make("Reach")
    for each in (env, reference):
        each.reset(seed=3)
        rollout(each)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child():
        theirs.send(rollout(env))
        env.close()

    process = context.Process(target=child)
    process.start()
    assert ours.poll(30)
    in_child = ours.recv()
    process.join(30)
    in_parent = rollout(env)  # the child has stepped and closed its copy by now
    expected = rollout(reference)
    np.testing.assert_array_equal(in_child, expected)
    np.testing.assert_array_equal(in_parent, expected)


@pytest.mark.parametrize(
    "task, colour",
    [("Circle", "blue"), ("Circle", "yellow"), ("Run", "yellow"), ("Gather", "green"), ("Gather", "red")]
    + [("Reach", "green"), ("Reach", "blue"), ("Reach", "purple")],
)
def test_rendering_shows_zones_and_objects(task, colour):
    env = make(task, render_mode="rgb_array")
    env.reset(seed=2)
    for _ in range(5):
        env.step([0.1, 0.1])
    image = env.render()
    assert image.shape == (360, 480, 3) and image.dtype == np.uint8
    red, green, blue = image.astype(int).transpose(2, 0, 1)
    share = {
        "red": (red > 2 * green + 30) & (red > 2 * blue + 30),
        "green": (green > 2 * red + 30) & (green > 2 * blue + 30),
        "blue": (blue > 1.3 * red + 30) & (blue > 1.3 * green + 20),
        "yellow": (red > blue + 60) & (green > blue + 30) & (red > green),
        "purple": (blue > 1.5 * green + 20) & (red > 1.5 * green + 10) & (blue > red),
    }[colour].mean()
    assert share > 0.0015, share


@pytest.mark.parametrize("task, reach", [("Circle", 11.9), ("Gather", 9.9), ("Reach", 9.9)])
def test_the_picture_shows_the_whole_arena(task, reach):
    """A ball at the foot of each wall and in each corner is seen whole."""
    env = make(task, render_mode="rgb_array").unwrapped
    view = env.bullet.computeViewMatrixFromYawPitchRoll(**env.camera, roll=0, upAxisIndex=2)
    projection = env.bullet.computeProjectionMatrixFOV(fov=60, aspect=4 / 3, nearVal=0.1, farVal=100.0)
    matrix = np.reshape(projection, (4, 4)).T @ np.reshape(view, (4, 4)).T
    bearings = np.arange(8) * np.pi / 4
    walls = reach * np.array([np.sin(bearings), np.cos(bearings), np.zeros(8)])
    if task != "Circle":  # a square room: its corners are farther out
        walls[:, 1::2] *= np.sqrt(2)
    tops = walls + [[0], [0], [2]]
    points = np.concatenate([walls, tops], axis=1)
    x, y, _, w = matrix @ np.concatenate([points, np.ones((1, 16))])
    assert max(abs(x / w).max(), abs(y / w).max()) < 1


def test_a_collected_apple_disappears_from_the_picture():
    env = make("Gather", render_mode="rgb_array").unwrapped
    others = [[6, -7 + 2 * i / 3, 0] for i in range(15)]
    env.reset(seed=1, options={"obstacles": [[0, 1.3, 0], *others]})
    while 0 in env.apples_left:
        env.step([0, 1])
    collected = env.render()
    env.apples_left.add(0)  # the same scene, had it not been collected
    green = [((image[..., 1] > 120) & (image[..., 0] < 90)).sum() for image in (collected, env.render())]
    assert green[0] < green[1]


def test_without_rendering_there_are_no_visuals():
    count = [make("Gather", render_mode=mode).unwrapped for mode in (None, "rgb_array")]
    plain, rendered = (env.bullet.getNumBodies(physicsClientId=env.client) for env in count)
    assert (plain, rendered) == (3, 19)
    plain = make("Gather")
    plain.reset(seed=1)
    assert plain.render() is None


def test_closing_frees_the_world():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    for rounds in (10, 50):  # the first ten fill allocators and caches
        before = resident()
        for _ in range(rounds):
            env = make("Reach")
            env.reset(seed=1)
            env.close()
            env.close()
        gc.collect()
    assert resident() - before < 10, "MB more after 50 worlds"


RELOAD = "import scpo_envs, importlib; importlib.reload(scpo_envs)"


@pytest.mark.parametrize(
    "order", ["import bullet_safety_gym, scpo_envs", "import scpo_envs, bullet_safety_gym", RELOAD]
)
def test_ids_are_ours_whatever_is_imported_first(order):
    out = python(f"""if True:
        {order}
        import gymnasium as gym
        print(gym.spec("SafetyBallRun-v0").entry_point, gym.spec("SafetyBallRun-v0").max_episode_steps)
        print(gym.spec("release/SafetyBallRun-v0").entry_point, gym.spec("release/SafetyBallRun-v0").max_episode_steps)
        print(*sorted(i for i in gym.registry if "Safety" in i))""")
    ours, theirs, ids = out.splitlines()[-3:]
    assert ours == "scpo_envs.ball_tasks:BallRun 250"
    assert theirs == "bullet_safety_gym.envs.builder:EnvironmentBuilder 100"
    assert {"SafetyCarCircle-v0", "SafetyDroneRun-v0", "SafetyAntGather-v0", "release/SafetyBallReach-v0"} <= set(
        ids.split()
    )


@pytest.mark.parametrize("env_id", ["release/SafetyBallCircle-v0", "SafetyCarCircle-v0"])
def test_the_packages_own_tasks_still_run(env_id):
    out = python(f"""if True:
        import gymnasium as gym, scpo_envs
        env = gym.make("{env_id}", disable_env_checker=True)
        env.reset()
        print("cost" in env.step(env.action_space.sample())[-1])""")
    assert out.splitlines()[-1] == "True"


@pytest.mark.parametrize("missing", ["pybullet", "bullet_safety_gym"])
def test_a_missing_package_is_named_in_one_line(missing):
    out = python(f"""if True:
        import sys
        class Hide:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "{missing}":
                    raise ModuleNotFoundError(name)
        if "{missing}" == "pybullet":
            sys.modules["pybullet"] = None
        else:
            import importlib.util
            sys.path_importer_cache.clear()
            sys.modules.pop("bullet_safety_gym", None)
            sys.meta_path.insert(0, Hide())
            find = importlib.util.find_spec
            importlib.util.find_spec = lambda name: None if name == "{missing}" else find(name)
        import gymnasium as gym, scpo_envs
        assert "pybullet" not in [m for m in sys.modules if sys.modules[m]]
        try:
            gym.make("SafetyBallCircle-v0")
        except gym.error.DependencyNotInstalled as error:
            print(error)""")
    assert len(out.splitlines()) == 1 and "pip install" in out and "BallCircle" in out


def test_pybullets_banner_is_hidden():
    assert python('import gymnasium, scpo_envs; gymnasium.make("SafetyBallRun-v0").reset(seed=1)') == ""


def test_the_slow_box_is_reach_at_a_thirtieth_of_the_speed():
    slow, reach = (gym.make(f"SafetyBallReach{name}-v0", disable_env_checker=True) for name in ("SlowBox", ""))
    assert (slow.unwrapped.box_speed, reach.unwrapped.box_speed) == (1 / 30, 1)
    assert type(slow.unwrapped) is type(reach.unwrapped) and slow.spec.max_episode_steps == reach.spec.max_episode_steps


@pytest.mark.parametrize("box_speed", [0.0, 1 / 30, 1.0, -2.0])
def test_reachs_box_circles_at_the_speed_asked_for(box_speed):
    env = gym.make("SafetyBallReach-v0", disable_env_checker=True, box_speed=box_speed).unwrapped
    env.reset(seed=3, options={"box_phase": 0.5})
    targets = []
    change = env.bullet.changeConstraint

    class Spy:
        def __getattr__(self, name):
            return getattr(bullet, name)

        def changeConstraint(self, joint, target, **kwargs):
            targets.append(target)
            return change(joint, target, **kwargs)

    bullet, env.bullet = env.bullet, Spy()
    for _ in range(60):
        env.step(np.zeros(2))
    x, y, _ = env.box_centre
    angles = np.unwrap([np.arctan2(target[0] - x, target[1] - y) for target in targets])
    np.testing.assert_allclose(np.diff(angles), box_speed / 60, atol=1e-6)
    env.close()


def test_a_speed_that_is_none_is_refused():
    with pytest.raises(ValueError, match="box_speed is nan"):
        gym.make("SafetyBallReach-v0", disable_env_checker=True, box_speed=float("nan"))
