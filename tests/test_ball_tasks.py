"""The paper's Ball tasks against trajectories recorded from the original ones. Needs no torch."""

import gc
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
        ("Circle", {"goal": [[1, 2]]}, "'goal' is unknown.*ball, ball_quat"),
        ("Gather", {"obstacles": np.zeros((15, 3))}, r"'obstacles' must have shape \(16, 3\), not \(15, 3\)"),
        ("Reach", {"goal": [1, 2]}, r"'goal' must have shape \(n, 2\)"),
        ("Run", {"ball": [0, 0, np.nan]}, "'ball' must be finite"),
    ],
)
def test_a_wrong_option_is_named(task, options, message):
    with pytest.raises(ValueError, match=message):
        make(task).reset(options=options)


def test_a_wrong_action_is_refused():
    env = make("Run")
    env.reset(seed=1)
    for action in ([np.nan, 0], [0.1, 0.2, 0.3]):
        with pytest.raises(ValueError):
            env.step(action)


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


def test_a_collected_apple_disappears_from_the_picture():
    env = make("Gather", render_mode="rgb_array").unwrapped
    others = [[6, -7 + 2 * i / 3, 0] for i in range(15)]
    env.reset(seed=1, options={"obstacles": [[0, 1.3, 0], *others]})
    while (0.0, 1.3) in env.apples_left:
        env.step([0, 1])
    collected = env.render()
    env.apples_left.add((0.0, 1.3))  # the same scene, had it not been collected
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


@pytest.mark.parametrize("order", ["import bullet_safety_gym, scpo_envs", "import scpo_envs, bullet_safety_gym", RELOAD])
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
    assert {"SafetyCarCircle-v0", "SafetyDroneRun-v0", "SafetyAntGather-v0", "release/SafetyBallReach-v0"} <= set(ids.split())


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
            importlib.util.find_spec = lambda name, find=importlib.util.find_spec: None if name == "{missing}" else find(name)
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
