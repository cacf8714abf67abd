"""CartSafe against trajectories recorded from the original. Needs no torch."""

import copy
import pickle
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import scpo_envs  # noqa: F401

GOLDEN = np.load(Path(__file__).parent / "data/cart_safe.npz")


def make(**kwargs):
    return gym.make("CartSafe-v0", disable_env_checker=True, **kwargs)


@pytest.mark.parametrize("episode", range(4))
def test_matches_the_original(episode):
    golden = {key.split("/")[1]: GOLDEN[key] for key in GOLDEN if key.startswith(f"{episode}/")}
    env = make()
    obs, _ = env.reset(options={"state": golden["obs"][0]})
    observations, rewards, costs, terminations = [obs], [], [], []
    for action in golden["action"]:
        obs, reward, terminated, truncated, info = env.step(action)
        observations.append(obs)
        rewards.append(reward)
        costs.append(info["cost"])
        terminations.append(terminated)
        assert info["constraint_costs"] == [info["cost"]]
    np.testing.assert_allclose(observations, golden["obs"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(rewards, golden["reward"], rtol=0, atol=1e-12)
    np.testing.assert_array_equal(costs, golden["cost"])
    np.testing.assert_array_equal(terminations, golden["terminated"].astype(bool))
    assert truncated == (len(rewards) == 300)


@pytest.mark.filterwarnings("ignore")
def test_passes_gymnasiums_checker():
    check_env(make(render_mode="rgb_array").unwrapped)


def test_a_seed_decides_the_episode_and_it_starts_hanging():
    env = make()
    one, two, other = (env.reset(seed=seed)[0] for seed in (1, 1, 2))
    assert (one == two).all() and (one != other).all()
    starts = np.array([env.reset()[0] for _ in range(200)]) - [0, 0, np.pi, 0]
    assert abs(starts).max() <= 0.05 and abs(starts).max(0).min() > 0.045


@pytest.mark.parametrize("options", [{"state": [1, 2, 3]}, {"start": [0, 0, 0, 0]}, {"state": [0, 0, np.nan, 0]}])
def test_a_wrong_option_is_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        make().reset(options=options)


def test_a_wrong_action_is_refused():
    env = make()
    env.reset(seed=1)
    for action in (2, -1, 0.5, np.nan, None, "1", [0, 1], np.array([0, 1])):
        with pytest.raises(ValueError, match="must be 0 or 1"):
            env.step(action)


def test_a_call_before_the_first_reset_says_so():
    env = make(render_mode="rgb_array").unwrapped
    for call in (lambda: env.step(0), env.render):
        with pytest.raises(gym.error.ResetNeeded, match="CartSafe: call reset"):
            call()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_goes_on_as_the_original(duplicate):
    env = make().unwrapped
    env.reset(seed=1)
    twin = duplicate(env)
    for _ in range(20):
        np.testing.assert_array_equal(env.step(1)[0], twin.step(1)[0])


@pytest.mark.parametrize("vector", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_vector_environments_step_as_single_ones(vector):
    envs = getattr(gym.vector, vector)([make] * 3)
    observations = [envs.reset(seed=[4, 5, 6])[0]] + [envs.step(np.array([0, 1, 1]))[0].copy() for _ in range(30)]
    envs.close()
    for i, action in enumerate([0, 1, 1]):
        env = make()
        alone = [env.reset(seed=4 + i)[0]] + [env.step(action)[0] for _ in range(30)]
        np.testing.assert_array_equal(np.array(observations)[:, i], alone)


def test_rendering_shows_cart_pole_and_limits():
    env = make(render_mode="rgb_array")

    def picture(x, theta):
        env.reset(options={"state": [x, 0, theta, 0]})
        image = env.render().astype(int)
        assert image.shape == (300, 600, 3)
        pole = np.argwhere((image[..., 2] > 150) & (image[..., 0] < 100))
        cart = np.argwhere(image.sum(-1) < 200)
        limits = np.argwhere((image[150 - 60, :, 0] > 200) & (image[150 - 60, :, 1] < 100)).ravel()
        return pole, cart, limits

    pole, cart, limits = picture(0.0, 0.0)  # upright: above the axle, in row 150
    assert pole[:, 0].mean() < 100 and abs(cart[:, 1].mean() - 300) < 2
    assert abs(limits.min() - 180) < 3 and abs(limits.max() - 420) < 3  # 120 pixels a metre
    pole, cart, _ = picture(0.5, np.pi)
    assert pole[:, 0].mean() > 180 and abs(cart[:, 1].mean() - 360) < 2
    assert len(picture(1.2, np.pi)[1]) == 0  # beyond the limit the cart is red
