"""scpo_continuous.py against hand calculations, the numbers printed in the paper and independent implementations."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import scpo_continuous as scpo
import scpo_discrete
import scpo_run
from baselines import cpo, pcpo, pdo, trpo, trpo_lagrangian

ROOT = Path(__file__).parent.parent
SMALL = "--env-id toy_env:Toy-v0 --num-envs 2 --num-steps 64 --minibatch-size 32 --no-compile --cost-limit 3".split()


ALL = [scpo, scpo_discrete, trpo, trpo_lagrangian, cpo, pcpo, pdo]
BOX = gym.spaces.Box(-1, 1, (2,))


def run(runs_dir, *flags, script=scpo, small=SMALL):
    """Trains in this process and returns the run's folder."""
    argv = [*small, "--runs-dir", str(runs_dir), "--total-timesteps", "384", *map(str, flags)]
    scpo_run.run(script.train, script.Args, script.TASK_SETTINGS, argv)
    return max(Path(runs_dir).iterdir(), key=lambda path: path.stat().st_mtime)


def settings_of(script, *flags):
    """The flags that a command line ends up with."""
    args, _ = scpo_run.read_flags(script.Args, script.TASK_SETTINGS, Path(script.__file__), list(flags))
    script.check_args(args)
    return args


def rows(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def column(*values):
    """One environment's values as (num_steps, 1)."""
    return np.array(values, dtype=np.float64)[:, None]


# The reward -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k, printed", [(0, 90), (1, 40), (4, -3.75), (8, -9.6), (math.inf, -10)])
def test_advantages_of_the_papers_first_toy_cmdp(k, printed):
    check_toy(k, (0.5, 1.0), printed)


@pytest.mark.parametrize("k, printed", [(0, 90), (4, 3.84), (8, -0.18), (math.inf, 0)])
def test_advantages_of_the_papers_second_toy_cmdp(k, printed):
    check_toy(k, (0.5, 0.7), printed)


def check_toy(k, q, printed):
    """One step from s^0 with rewards 200 and 20: both actions' advantages under a uniform policy, by our functions."""
    rewards = scpo.nullify(np.array([[200.0, 20.0]]), np.zeros((1, 2)), np.array([q]), k, 0.0, 0.0)
    values = np.full((1, 2), rewards.mean())
    over = np.ones((1, 2))
    advantages = scpo.gae(rewards, values, np.full((1, 2), 1e9), over, over, 1.0, 0.95)
    assert advantages[0] == pytest.approx([printed, -printed], abs=0.01)


def test_nullify_by_hand():
    q = np.array([0.5, 0.0, 1.0])
    rewards, costs = np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 1.0])
    np.testing.assert_allclose(scpo.nullify(rewards, costs, q, 2, 10, 1), [2 * 0.25 - 10 * 0.75, -10, 4])
    np.testing.assert_allclose(scpo.nullify(rewards, costs, q, 2, 10, 1, "always"), [0.5 - 10, -10, -6])


def test_k_0_is_ppo_or_a_fixed_lagrange_multiplier():
    rng = np.random.default_rng(0)
    rewards, costs, q = rng.normal(size=(7, 3)), rng.uniform(size=(7, 3)), rng.integers(0, 3, (7, 3)) / 2
    np.testing.assert_array_equal(scpo.nullify(rewards, costs, q, 0, 0, 0), rewards)
    np.testing.assert_array_equal(scpo.nullify(rewards, costs, q, 0, 5, 0), rewards)  # the cost term vanishes with k
    np.testing.assert_array_equal(scpo.nullify(rewards, costs, q, 0, 5, 0, "always"), rewards - 5 * costs)


def test_k_0_trains_as_if_there_were_no_safety_critic(tmp_path):
    """To the last bit where its loss, which shares the norm of the gradient, has no weight."""
    plain = "--k 0 --beta 0 --no-augment-state --safety-vf-coef 0".split()
    other = "--safety-gamma 0.5 --safety-lambdas 0 --cost-limit 0".split()
    one, two = run(tmp_path / "1", *plain), run(tmp_path / "2", *plain, *other)
    for name in ("episodic_return", "policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm"):
        assert [row[name] for row in rows(one / "progress.csv")] == [row[name] for row in rows(two / "progress.csv")]
    assert rows(one / "progress.csv")[-1]["safety_loss"] != rows(two / "progress.csv")[-1]["safety_loss"]


# The safety critic ----------------------------------------------------------------------------------------------------


def test_safety_target_by_hand():
    safe, over = column(1, 1, 1), column(0, 0, 1)
    # unsafe after the last action: only the terminal state's f is 0
    targets = scpo.safety_target(safe, column(0.3, 0.3, 0), over, 0.9)
    np.testing.assert_allclose(targets, column(0.1 + 0.9 * 0.19, 0.1 + 0.9 * 0.1, 0.1))
    # safe to the end: 1, whatever the discount (the printed closed form gives 1 - gamma^3)
    np.testing.assert_allclose(scpo.safety_target(safe, column(0.3, 0.3, 1), over, 0.9), 1)
    # cut by the rollout's end: the critic's 0.6 stands for the rest
    np.testing.assert_allclose(scpo.safety_target(safe, column(0.3, 0.3, 0.6), column(0, 0, 0), 1.0), 0.6)
    # once unsafe, 0
    np.testing.assert_allclose(scpo.safety_target(column(1, 0, 0), column(0, 0, 0), over, 0.9), column(0.1, 0, 0))


@pytest.mark.parametrize("gamma", [0.9, 0.995, 1.0])
def test_safety_target_is_the_closed_form_with_the_missing_term(gamma):
    rng = np.random.default_rng(1)
    for first_unsafe in range(1, 9):
        f = (np.arange(9) < first_unsafe).astype(float)  # of s_0 .. s_8; a_7 is the last action
        next_values = f[1:] * np.append(rng.uniform(size=7), 1)
        targets = scpo.safety_target(f[:-1, None], next_values[:, None], np.eye(8)[:, 7:], gamma)[:, 0]
        for t in range(8):
            closed = sum((1 - gamma) * gamma**k * f[t + k] for k in range(8 - t)) + gamma ** (8 - t) * f[8]
            assert targets[t] == pytest.approx(closed)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
def test_safety_q_is_the_geometric_average_of_the_n_step_estimates(lam):
    rng = np.random.default_rng(2)
    steps = 6
    f = np.array([1, 1, 1, 1, 0, 0, 0.0])  # of s_0 .. s_6
    values = np.append(rng.uniform(size=steps), f[-1])  # the critic on s_0 .. s_5; of the last state f is known
    n_step = [[f[t + n - 1] * f[t + n] * values[t + n] for n in range(1, steps - t + 1)] for t in range(steps)]
    q = scpo.safety_q(f[:-1, None], (f * values)[1:, None], np.eye(steps)[:, -1:], 1.0, lam)[:, 0]
    for t in range(steps):
        weights = [(1 - lam) * lam**n for n in range(len(n_step[t]) - 1)] + [lam ** (len(n_step[t]) - 1)]
        assert q[t] == pytest.approx(np.dot(weights, n_step[t]))


def test_monte_carlo_q_is_the_next_states_target():
    rng = np.random.default_rng(3)
    safe, next_values = np.ones((5, 2)), rng.uniform(size=(5, 2))
    dones = np.array([[0, 0], [1, 0], [0, 0], [0, 0], [0, 1.0]])
    q = scpo.safety_q(safe, next_values, dones, 0.9, 1.0)
    targets = scpo.safety_target(safe, next_values, dones, 0.9)
    for t in range(4):
        expected = np.where(dones[t] == 1, next_values[t], targets[t + 1])
        np.testing.assert_allclose(q[t], expected)
    np.testing.assert_allclose(scpo.safety_q(safe, next_values, dones, 0.9, 0.0), next_values)


def batch_of(agent, size=64, actions=2, obs_dim=3, seed=0):
    torch.manual_seed(seed)
    obs, act = torch.randn(size, obs_dim), torch.randn(size, actions)
    with torch.no_grad():
        logprobs, _ = agent.get_logprob_and_entropy(obs, act)
    return obs, act, logprobs + 0.3 * torch.randn(size), torch.randn(size), 3 * torch.randn(size), torch.rand(size)


def flat(agent):
    weights = nn.utils.parameters_to_vector(agent.parameters()).detach().clone()
    return weights, (torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros(()))


def test_the_critic_starts_pessimistic_and_recovers_from_a_long_unsafe_phase():
    torch.manual_seed(0)
    agent = scpo.Agent(3, BOX).requires_grad_(False)
    obs, *rest = batch_of(agent)
    assert agent.get_safety_value(obs).max() < 0.1
    agent.safety_critic[-1].bias.fill_(-1.0)  # as after a phase in which all targets were 0 and Adam overshot
    assert (agent.get_safety_value(obs) == 0).all()
    weights, adam = flat(agent)
    minibatch = (obs, *rest[:-1], torch.ones(64))
    for _ in range(300):
        weights, adam, _ = scpo.update(weights, adam, torch.tensor(0.01), agent, minibatch, scpo.Args())
    nn.utils.vector_to_parameters(weights, agent.parameters())
    assert agent.get_safety_value(obs).min() > 0.9
    assert agent.get_safety_value(100 * obs).max() <= 1


# Advantages, surrogates, gradient step --------------------------------------------------------------------------------


def test_gae_by_hand():
    rewards, values = column(1, 2, 3), column(0.5, 0.4, 0.3)
    next_values = column(0.4, 0.3, 10)
    deltas = np.array([1 + 0.9 * 0.4 - 0.5, 2 + 0.9 * 0.3 - 0.4, 3 - 0.3])  # a termination: 10 isn't worth anything
    trace = 0.9 * 0.8
    expected = [deltas[0] + trace * (deltas[1] + trace * deltas[2]), deltas[1] + trace * deltas[2], deltas[2]]
    over = column(0, 0, 1)
    np.testing.assert_allclose(scpo.gae(rewards, values, next_values, over, over, 0.9, 0.8)[:, 0], expected)
    # a time limit: 10 counts
    expected = scpo.gae(rewards, values, next_values, column(0, 0, 0), over, 0.9, 0.8)[:, 0]
    assert expected[2] == pytest.approx(3 + 0.9 * 10 - 0.3)


def test_gae_does_not_leak_over_the_end_of_an_episode():
    rng = np.random.default_rng(4)
    rewards, values, next_values = rng.normal(size=(3, 8, 2))
    for terminations in (np.zeros((8, 2)), np.eye(8)[:, 3:4] * np.ones((1, 2))):
        dones = np.eye(8)[:, 3:4] * np.ones((1, 2))
        advantages = scpo.gae(rewards, values, next_values, terminations, dones, 0.99, 0.95)
        rewards[4:] += 100
        np.testing.assert_array_equal(
            scpo.gae(rewards, values, next_values, terminations, dones, 0.99, 0.95)[:4], advantages[:4]
        )


def test_surrogates_by_hand():
    logratio = torch.tensor([2.0, 2.0, 0.5, 0.5, 1.1]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    l1 = [0.2, -1.0, -0.5, 0.2, 0.1]  # ratio - 1 = 1, 1, -0.5, -0.5, 0.1
    l2 = [0.2, -0.5, -1.0, 0.2, 1 - 1 / 1.1]  # 1 - 1/ratio = 0.5, 0.5, -1, -1
    for kind, values in (("l1", l1), ("l2", l2)):
        for one in range(5):
            value, _ = scpo.clipped_surrogate(logratio[one : one + 1], advantages[one : one + 1], 0.2, kind)
            assert value.item() == pytest.approx(values[one], abs=1e-6)


def test_clipfrac_is_that_of_the_surrogates_own_clip():
    """A ratio of 1.22 is 0.22 from 1, but 1 - 1/1.22 is 0.18; 0.82 is 0.18 from 1, but 1 - 1/0.82 is -0.22."""
    logratio = torch.tensor([1.22, 1.22, 1.22, 0.82]).log()
    for kind, share in (("l1", 0.75), ("l2", 0.25)):
        assert scpo.clipped_surrogate(logratio, torch.ones(4), 0.2, kind)[1].item() == share


@pytest.mark.parametrize("surrogate", ["l1", "l2"])
def test_update_is_ppo_with_torchs_own_parts(surrogate):
    """Loss, gradient, clipping and Adam against torch.distributions, autograd, clip_grad_norm_, torch.optim.Adam."""
    args = scpo.Args(surrogate=surrogate, ent_coef=0.01, max_grad_norm=0.5)
    torch.manual_seed(1)
    agent = scpo.Agent(3, BOX)
    nn.init.normal_(agent.actor_logstd, std=0.3)
    minibatch = batch_of(agent)
    obs, actions, old, advantages, returns, targets = minibatch
    weights, adam = flat(agent)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2, eps=1e-5)
    for _ in range(5):
        weights, adam, logged = scpo.update(weights, adam, torch.tensor(1e-2), agent, minibatch, args)
        policy = torch.distributions.Normal(agent.actor(obs), agent.actor_logstd.exp())
        ratio = (policy.log_prob(actions).sum(1) - old).exp()
        ratio = ratio - 1 if surrogate == "l1" else 1 - 1 / ratio
        normalised = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy_loss = -torch.min(ratio * normalised, ratio.clamp(-0.2, 0.2) * normalised).mean()
        value_loss = nn.functional.mse_loss(agent.critic(obs)[:, 0], returns)
        safety_loss = nn.functional.mse_loss(agent.safety_critic(obs)[:, 0].tanh(), targets)
        entropy = policy.entropy().sum(1).mean()
        optimizer.zero_grad()
        (policy_loss - 0.01 * entropy + 0.5 * value_loss + 0.5 * safety_loss).backward()
        norm = nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        named = dict(zip(scpo.LOGGED, logged.tolist()))
        theirs = dict(
            policy_loss=policy_loss, value_loss=value_loss, safety_loss=safety_loss, entropy=entropy, grad_norm=norm
        )
        for name, value in theirs.items():
            assert named[name] == pytest.approx(value.item(), rel=1e-4), name
    torch.testing.assert_close(
        weights, nn.utils.parameters_to_vector(agent.parameters()).detach(), rtol=1e-4, atol=1e-5
    )


def test_the_numpy_policy_is_the_torch_policy():
    torch.manual_seed(0)
    agent = scpo.Agent(5, BOX).requires_grad_(False)
    agent.actor[-1].weight.mul_(100)
    agent.actor_logstd.copy_(torch.tensor([-1.0, 0.5]))
    agent.obs_mean.copy_(torch.arange(5.0))
    agent.obs_var.copy_(torch.arange(5.0) + 0.5)
    obs, noise = torch.randn(16, 5), torch.randn(16, 2)
    expected = agent.actor(agent.normalize(obs)) + agent.actor_logstd.exp() * noise
    np.testing.assert_allclose(
        scpo.numpy_policy(agent)(obs.numpy(), noise.numpy()), expected.numpy(), rtol=1e-4, atol=1e-5
    )


# Scales ---------------------------------------------------------------------------------------------------------------


def trained(script, env_id="Toy-v0", seen=None, monkeypatch=None, make_env=None, **flags):
    """Trains on a toy task and returns the last checkpoint; seen gets the observations of each rollout."""
    if seen is not None:
        numpy_policy = script.numpy_policy

        def watched(agent):
            act = numpy_policy(agent)
            seen.append([])
            return lambda obs, noise: (seen[-1].append(obs.copy()), act(obs, noise))[1]

        monkeypatch.setattr(script, "numpy_policy", watched)
    env_id = f"toy_env:{env_id.replace('Toy', 'ToyChoice') if script is scpo_discrete else env_id}"
    small = dict(num_envs=2, num_steps=64, minibatch_size=32, compile=False, cost_limit=3, total_timesteps=384)
    *_, last = script.train(script.Args(**{**small, "env_id": env_id, **flags}), make_env=make_env or script.make_env)
    return last["checkpoint"]


@pytest.mark.parametrize("script", [scpo, scpo_discrete])
def test_observations_are_normalised_by_all_that_came_before_in_the_first_half(script, monkeypatch):
    seen = []
    agent = trained(script, seen=seen, monkeypatch=monkeypatch, norm_obs=True, total_timesteps=768)["agent"]
    obs = np.concatenate([np.concatenate(rollout) for rollout in seen[:3]])[:, :2]
    assert len(seen) == 6 and len(obs) == 384
    np.testing.assert_allclose(agent["obs_mean"], [*obs.mean(0), 0], rtol=1e-4)  # not of the share spent
    np.testing.assert_allclose(agent["obs_var"], [*obs.var(0), 1], rtol=0.02)
    agent = trained(script)["agent"]
    assert not agent["obs_mean"].any() and (agent["obs_var"] == 1).all()


def test_what_is_normalised_reaches_all_networks_and_only_when_asked_for():
    """The same task in other units of its observations: with --norm-obs the runs are alike from iteration 2 on."""
    policies = {}

    def in_other_units(env_id, cost_limit, augment_state):
        env = scpo.make_env(env_id, cost_limit, augment_state)
        env.env = gym.wrappers.TransformObservation(env.env, lambda obs: 100 * obs + 500)
        return env

    for norm_obs in (False, True):
        flags = dict(norm_obs=norm_obs, total_timesteps=25600, learning_rate=1e-3)
        usual = trained(scpo, **flags)
        other = trained(scpo, make_env=in_other_units, **flags)
        for name, checkpoint in (("usual", usual), ("other", other)):
            agent = scpo.Agent(3, BOX).requires_grad_(False)
            agent.load_state_dict(checkpoint["agent"])
            policies[norm_obs, name] = agent
    grid = torch.rand(200, 3, generator=torch.Generator().manual_seed(0))
    units = grid * torch.tensor([100.0, 100, 1]) + torch.tensor([500.0, 500, 0])

    def varies(agent, obs):
        obs = agent.normalize(obs)
        return [network(obs).std().item() for network in (agent.actor, agent.critic, agent.safety_critic)]

    assert min(varies(policies[True, "other"], units)) > 0.2 * min(varies(policies[True, "usual"], grid))
    assert min(varies(policies[False, "other"], units)) < 0.2 * min(varies(policies[False, "usual"], grid))


def test_sampling_estimates_and_updates_see_the_same_normalised_observations(monkeypatch):
    seen, get_value = [], scpo.Agent.get_value
    monkeypatch.setattr(scpo.Agent, "get_value", lambda self, obs: (seen.append(obs), get_value(self, obs))[1])

    def far_away(*task):
        env = scpo.make_env(*task)
        env.env = gym.wrappers.TransformObservation(env.env, lambda obs: 100 * obs + 500)
        return env

    trained(scpo, make_env=far_away, norm_obs=True)
    calls = 2 + 5 * 4  # an iteration: s and s' of the rollout, five epochs of four minibatches
    assert len(seen) == 3 * calls
    assert min(obs[..., :2].min() for obs in seen[:calls]) > 300  # nothing is known of the first ones
    assert max(obs[..., :2].abs().max() for obs in seen[calls:]) < 10


class Falls(gym.Wrapper):
    """Every other episode ends itself at its fifth step, without a cost."""

    def reset(self, **options):
        self.episode, self.steps = getattr(self, "episode", 0) + 1, 0
        return self.env.reset(**options)

    def step(self, action):
        obs, reward, _, truncated, info = self.env.step(action)
        self.steps += 1
        return obs, reward, self.episode % 2 == 1 and self.steps == 5, truncated, {**info, "cost": 0.0}


@pytest.mark.parametrize("termination_cost", [0.0, 7.0])
@pytest.mark.parametrize("script", [scpo, scpo_discrete])
def test_an_end_of_the_tasks_own_making_is_unsafe_and_costs_where_asked_for(script, termination_cost, monkeypatch):
    seen, nullify, safety_q = {}, script.nullify, script.safety_q
    monkeypatch.setattr(script, "nullify", lambda *x: (seen.update(costs=x[1].copy()), nullify(*x))[1])
    monkeypatch.setattr(
        script, "safety_q", lambda *x: (seen.update(next_values=x[1].copy(), dones=x[2].copy()), safety_q(*x))[1]
    )

    def make_env(*task):
        env = script.make_env(*task)
        env.env = Falls(env.env)
        return env

    env_id = "toy_env:ToyChoice-v0" if script is scpo_discrete else "toy_env:Toy-v0"
    flags = dict(env_id=env_id, termination_cost=termination_cost, compile=False, cost_limit=3)
    args = script.Args(num_envs=2, num_steps=64, minibatch_size=32, total_timesteps=128, **flags)
    *_, last = script.train(args, make_env=make_env)
    episodes = last["episodes"]
    assert {episode["length"] for episode in episodes} == {5, 20}
    assert all(episode["cost"] == 0 and episode["safe"] == 1 for episode in episodes)  # what the task says
    falls = np.zeros_like(seen["dones"])
    falls[4::25] = 1
    np.testing.assert_array_equal(seen["costs"], termination_cost * falls)
    ends = seen["next_values"][seen["dones"] == 1]
    expected = np.where(falls[seen["dones"] == 1] == 1, float(termination_cost == 0), 1)
    np.testing.assert_array_equal(ends, expected)


@pytest.mark.parametrize("script", ALL)
def test_a_wrapper_that_normalises_and_is_not_saved_is_named(script, capsys):
    class SafeNormalizeReward(gym.wrappers.NormalizeReward):  # Safety-Gymnasium's is one
        pass

    class NormalizedTask(gym.Wrapper):
        pass

    def wrapped_in(wrapper):
        def make_env(*task):
            env = script.make_env(*task)
            env.env = wrapper(env.env)
            return env

        return make_env

    for wrapper, times in ((gym.wrappers.NormalizeObservation, 1), (SafeNormalizeReward, 1), (NormalizedTask, 0)):
        make_env = wrapped_in(wrapper)
        env_id = f"toy_env:Toy{'Choice' * (script is scpo_discrete)}-v0"
        args = script.Args(env_id=env_id, cost_limit=25, num_envs=2, num_steps=64)
        args.total_timesteps, args.save_every, args.compile = 256, 0, False
        next(script.train(args, make_env=make_env))
        said = capsys.readouterr().err.splitlines()
        assert len(said) == times and all("A Normalize wrapper isn't saved" in line for line in said)


@pytest.mark.parametrize("script", [scpo, scpo_discrete])
def test_what_is_normalised_is_clipped_and_nothing_else_is(script):
    """A component that was constant so far has variance 0. Its first change must not drown the others."""
    env_id = "toy_env:Toy-v0" if script is scpo else "toy_env:ToyChoice-v0"
    agent = script.Agent(3, script.make_env(env_id, 3, True).action_space).requires_grad_(False)
    agent.obs_mean[:2], agent.obs_var[:2] = torch.tensor([1.0, 5.0]), torch.tensor([0.0, 4.0])
    obs = torch.tensor([[2.0, 8.0, 30.0], [0.0, -40.0, -30.0]])
    expected = torch.tensor([[10.0, 1.5, 30.0], [-10.0, -10.0, -30.0]])
    assert torch.allclose(agent.normalize(obs), expected)
    noise = np.zeros((2, agent.noise_dim), dtype=np.float32)
    played = script.numpy_policy(agent)(obs.numpy(), noise)
    agent.obs_mean.fill_(0)
    agent.obs_var.fill_(1)
    np.testing.assert_array_equal(played, script.numpy_policy(agent)(expected.numpy(), noise))


@pytest.mark.parametrize("script", [scpo, scpo_discrete])
def test_sampled_from_is_the_policy_that_played_with_its_own_normaliser(script):
    env_id = "toy_env:Toy-v0" if script is scpo else "toy_env:ToyChoice-v0"
    size = dict(num_envs=2, num_steps=64, minibatch_size=32, compile=False, cost_limit=3, total_timesteps=384)
    before = None
    for progress in script.train(script.Args(env_id=env_id, norm_obs=True, **size)):
        for name, x in (before or {}).items():
            assert torch.equal(progress["sampled_from"][name], x), name
        before = {name: x.clone() for name, x in progress["checkpoint"]["agent"].items()}


@pytest.mark.parametrize("script", [scpo, scpo_discrete])
def test_the_limit_begins_lenient_and_falls_to_its_value_over_half_of_the_run(script):
    """By the same factor each time. What is told of an episode, and best_safe.pt, go by the final limit alone."""
    env_id = "toy_env:Toy-v0" if script is scpo else "toy_env:ToyChoice-v0"
    size = dict(num_envs=2, num_steps=64, minibatch_size=32, compile=False, total_timesteps=768)
    seen = []

    def make_env(*task):
        env = script.make_env(*task)
        env.unwrapped.costs, step = [1.0] * 20, env.step
        env.step = lambda action: (seen.append(step(action)), seen[-1])[1]
        return env

    args = script.Args(env_id=env_id, cost_limit=3, limit_factor=8, **size)
    played = list(script.train(args, make_env=make_env))[1:]
    limits = np.repeat([24, 12, 6, 3, 3, 3], 2 * 64)
    spent = np.tile(np.repeat(np.arange(1, 21), 2), 20)[: len(limits)]
    np.testing.assert_allclose([obs[-1] for obs, *_ in seen], np.minimum(spent / limits, 1.1), rtol=1e-6)
    np.testing.assert_array_equal([info["safe"] for *_, info in seen], spent <= limits)
    np.testing.assert_allclose([x["scalars"]["safety/cost_limit"] for x in played], limits[::128])
    assert all(episode["cost"] == 20 and episode["safe"] == 0 for x in played for episode in x["episodes"])
    assert [x["sampled_from"] is not None for x in played] == [False] * 3 + [True] * 3


def test_the_reward_is_scaled_once_after_nullification(monkeypatch):
    seen, gae = [], scpo.gae
    monkeypatch.setattr(scpo, "gae", lambda rewards, *rest: (seen.append(rewards.copy()), gae(rewards, *rest))[1])
    for scale in (1, 0.25):
        trained(scpo, reward_scale=scale, k=1, beta=2, reward_bias=3, total_timesteps=128)
    np.testing.assert_allclose(seen[1], 0.25 * seen[0], rtol=1e-6)
    assert seen[0].std() > 0.1


def test_the_deviation_of_actions_starts_where_it_is_told():
    iterations = scpo.train(
        scpo.Args(env_id="toy_env:Toy-v0", log_std_init=-0.7, cost_limit=3, num_steps=64, compile=False)
    )
    torch.testing.assert_close(next(iterations)["checkpoint"]["agent"]["actor_logstd"], torch.full((2,), -0.7))


@pytest.mark.parametrize("script", [scpo, scpo_discrete])
def test_fast_is_a_second_table_that_flags_override(script, capsys):
    changes = script.FAST_SETTINGS
    for task in [name[: -len(" --fast")] for name in script.TASK_SETTINGS if name.endswith(" --fast")]:
        usual, fast = settings_of(script, "--env-id", task), settings_of(script, "--env-id", task, "--fast")
        changed = {name for name in vars(usual) if getattr(usual, name) != getattr(fast, name)}
        assert changed == {"fast", "total_timesteps", *changes} and all(getattr(fast, x) == changes[x] for x in changes)
        assert fast.fast and fast.anneal_lr and 5 * fast.total_timesteps == usual.total_timesteps
        assert settings_of(script, "--env-id", task, "--fast", "--num-steps", "2048").num_steps == 2048
        with pytest.raises(SystemExit):
            settings_of(script, "--env-id", task, "--fast", "--help")
        said = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert f"is the paper's T (default: {fast.num_steps})" in said


# The state ------------------------------------------------------------------------------------------------------------


def toy(cost_limit, augment=True, **kwargs):
    import toy_env

    return scpo.SafetyState(gym.wrappers.TimeLimit(toy_env.Toy(**kwargs), 20), cost_limit, augment)


@pytest.mark.parametrize(
    "cost_limit, costs, spent, safe",
    [
        (2, [1, 0, 1, 1, 5], [0.5, 0.5, 1.0, 1.1, 1.1], [1, 1, 1, 0, 0]),  # the limit itself is safe
        (0, [0, 0, 1, 0, 0], [0, 0, 1.1, 1.1, 1.1], [1, 1, 0, 0, 0]),
        (0.2, [0, 0.1, 0, 1, 0], [0, 0.5, 0.5, 1.1, 1.1], [1, 1, 1, 0, 0]),
    ],
)
def test_the_state_carries_the_cost_spent(cost_limit, costs, spent, safe):
    env = toy(cost_limit, costs=costs)
    obs, _ = env.reset(seed=1)
    assert obs.shape == (3,) and obs.dtype == np.float32 and obs[-1] == 0
    for cost, share, is_safe in zip(costs, spent, safe):
        obs, _, _, _, info = env.step(np.zeros(2, np.float32))
        assert (info["cost"], info["safe"]) == (cost, is_safe) and obs[-1] == pytest.approx(share)
        assert env.observation_space.contains(obs)
    assert env.reset()[0][-1] == 0


def test_the_episode_is_reported_when_it_ends():
    env = toy(3, costs=[1.0] * 20, cost="constraint_costs")
    env.reset(seed=1)
    rewards = []
    for _ in range(20):
        _, reward, _, truncated, info = env.step(np.array([0.1, 0]))
        rewards.append(reward)
    expected = {"return": pytest.approx(sum(rewards)), "cost": 20, "length": 20, "safe": 0}
    assert truncated and info["episode"] == expected


@pytest.mark.parametrize(
    "low, high, sampled, given",
    [
        ([-1, -1], [1, 1], [0.3, -7.0], [0.3, -1]),  # as the paper's tasks: nothing changes
        ([100, 0], [200, 10], [0.0, 0.5], [150, 7.5]),
        ([100, 0], [200, 10], [-3.0, 3.0], [100, 10]),
        ([-np.inf, 0], [np.inf, np.inf], [700.0, -3.0], [700, 0]),  # without a range: as sampled, within the one bound
    ],
)
def test_actions_span_the_tasks_range(low, high, sampled, given):
    space = gym.spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
    actions = scpo.Agent(3, space).to_env(np.array([sampled], dtype=np.float32))
    assert actions.dtype == np.float32 and actions.tolist() == [pytest.approx(given)] and space.contains(actions[0])


@pytest.mark.parametrize("obs, size", [("box", 2), ("matrix", 2), ("dict", 5), ("discrete", 3)])
@pytest.mark.parametrize("augment", [True, False])
def test_any_flattenable_observation_will_do(obs, size, augment):
    env = toy(3, augment, obs=obs)
    assert env.reset(seed=1)[0].shape == (size + augment,) == env.observation_space.shape


# The run --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["Toy-v0", "ToyDict-v0", "ToyDiscrete-v0", "ToyMatrix-v0", "ToyDie-v0"])
@pytest.mark.parametrize(
    "flags", ["", "--surrogate l2 --penalty always --safety-lambdas 1 --no-augment-state --anneal-lr"]
)
def test_trains_on_other_peoples_tasks(tmp_path, env_id, flags):
    folder = run(tmp_path, "--env-id", f"toy_env:{env_id}", *flags.split())
    assert len(rows(folder / "progress.csv")) == 3


def test_what_the_loop_hands_to_the_mathematics(tmp_path, monkeypatch):
    """Values of the states episodes ended in, f where an episode is over, q_t carried over the end of a rollout."""
    seen = dict(agent=None, ended=[], q=[], first_rows=[])
    step, numpy_policy, safety_q, gae = scpo.SafetyState.step, scpo.numpy_policy, scpo.safety_q, scpo.gae

    def watched_step(self, action):
        out = step(self, action)
        if "episode" in out[-1]:
            seen["ended"].append((out[0], out[2], out[-1]["safe"]))
        return out

    def watched_policy(agent):
        seen["agent"] = agent
        return numpy_policy(agent)

    def watched_q(safe, next_safety_values, dones, *rest):
        seen["q"].append((safe.copy(), next_safety_values.copy()))
        return safety_q(safe, next_safety_values, dones, *rest)

    def watched_gae(rewards, values, next_values, terminations, dones, *rest):
        over = dones == 1
        ended = seen["ended"]
        final = torch.as_tensor(np.array([obs for obs, _, _ in ended]))
        expected = seen["agent"].get_value(seen["agent"].normalize(final)).numpy()
        np.testing.assert_allclose(np.sort(next_values[over]), np.sort(expected), rtol=1e-4, atol=1e-6)
        assert (
            terminations[over].sum() == sum(terminated for _, terminated, _ in ended) and terminations[~over].sum() == 0
        )
        np.testing.assert_allclose(next_values[:-1][~over[:-1]], values[1:][~over[:-1]], rtol=1e-5, atol=1e-6)
        safe, next_safety_values = seen["q"][-1]
        assert sorted(next_safety_values[over]) == sorted(float(is_safe) for _, _, is_safe in ended)
        assert (safe[1:][over[:-1]] == 1).all()  # a new episode has spent nothing
        assert (next_safety_values[:-1][~over[:-1]] <= safe[1:][~over[:-1]]).all()  # unsafe: 0
        seen["ended"].clear()
        seen["first_rows"].append(safe[0])
        return gae(rewards, values, next_values, terminations, dones, *rest)

    for name, watched in (("numpy_policy", watched_policy), ("safety_q", watched_q), ("gae", watched_gae)):
        monkeypatch.setattr(scpo, name, watched)
    monkeypatch.setattr(scpo.SafetyState, "step", watched_step)
    flags = "--env-id toy_env:ToyDie-v0 --cost-limit 0.5 --total-timesteps 2560 --learning-rate 0.01 --k 0 --beta 0"
    run(tmp_path, *flags.split())  # k 0: the policy learns to go where it costs
    assert len(seen["first_rows"]) == 20
    assert (
        0 < np.mean(seen["first_rows"]) < 1
    )  # some rollouts began in the middle of an episode that was unsafe by then


def test_what_a_run_leaves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run(tmp_path, "--seed", 7)
    assert folder.name.startswith("toy_env-Toy-v0__scpo_continuous__7__")
    progress, episodes = rows(folder / "progress.csv"), rows(folder / "episodes.csv")
    assert [int(row["global_step"]) for row in progress] == [128, 256, 384]
    assert [int(row["iteration"]) for row in progress] == [1, 2, 3]
    assert len(episodes) == 2 * (192 // 20) == sum(int(row["episodes"]) for row in progress)
    assert [int(episode["global_step"]) for episode in episodes[::2]] == [40 * i for i in range(1, 10)]
    first = [float(episode["cost"]) for episode in episodes if episode["iteration"] == "1"]
    assert float(progress[0]["episodic_cost"]) == pytest.approx(np.mean(first), rel=1e-5)
    assert float(progress[0]["episodic_cost_std"]) == pytest.approx(np.std(first), rel=1e-5)
    assert float(progress[0]["safe_episode_rate"]) == pytest.approx(np.mean([cost <= 3 for cost in first]))
    config = json.loads((folder / "config.json").read_text())
    assert (
        config["seed"] == 7
        and config["k"] == 4
        and config["total_timesteps"] == 384
        and config["torch"] == torch.__version__
    )
    events = EventAccumulator(str(folder)).Reload()
    tags = set(events.Tags()["scalars"])
    for tag in "charts/episodic_return charts/episodic_cost charts/episodic_cost_std charts/episodic_length".split():
        assert tag in tags
    assert {
        "charts/safe_episode_rate",
        "charts/SPS",
        "losses/policy_loss",
        "losses/approx_kl",
        "safety/safety_q_mean",
    } <= tags
    assert {
        "safety/safety_value_mean",
        "safety/safety_target_mean",
        "safety/unsafe_share",
        "safety/negative_reward_share",
    } <= tags
    assert [event.step for event in events.Scalars("charts/episodic_cost")] == [128, 256, 384]
    saved = torch.load(folder / "last.pt", weights_only=True)
    scpo.Agent(3, BOX).load_state_dict(saved["agent"])
    assert saved["args"]["env_id"] == "toy_env:Toy-v0"


def test_same_seed_same_progress(tmp_path):
    def without_time(folder):
        return [
            {k: v for k, v in row.items() if k not in ("sps", "sampling_sps", "seconds")}
            for row in rows(folder / "progress.csv")
        ]

    one, two, other = (run(tmp_path / name, "--seed", seed) for name, seed in (("a", 5), ("b", 5), ("c", 6)))
    assert without_time(one) == without_time(two) != without_time(other)
    assert (one / "episodes.csv").read_text() == (two / "episodes.csv").read_text()


def test_target_kl_stops_the_epochs(tmp_path):
    free, held = (
        rows(run(tmp_path / str(kl), "--learning-rate", 0.01, *flag) / "progress.csv")
        for kl, flag in ((0, ()), (1, ("--target-kl", 1e-4)))
    )
    assert [row["epochs"] for row in free] == ["5"] * 3
    assert all(int(row["epochs"]) < 5 for row in held)


def test_paper_settings_are_built_in_and_can_be_overridden():
    gather = settings_of(scpo, "--env-id", "SafetyBallGather-v0", "--beta", "2")
    assert (gather.cost_limit, gather.k, gather.beta, gather.reward_bias, gather.ent_coef) == (0.2, 4, 2, 0.05, 0.01)
    assert gather.total_timesteps == 500 * 32768


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--seed x", "--seed"),
        ("--foo 3", "--foo"),
        ("--device tpu", "--device"),
        ("--device cuda", "--device"),
        ("--env-id SafetyBallCirle-v0", "SafetyBallCircle"),
        ("--env-id nowhere:Toy-v0", "nowhere"),
        ("--env-id CartPole-v1", "scpo_discrete.py"),
        ("--env-id toy_env:ToyNoCost-v0", 'info["cost"]'),
        ("--env-id toy_env:ToyNegative-v0", "must put one number, 0 or more"),
        ("--env-id toy_env:ToySequence-v0", "Sequence"),
        ("--minibatch-size 1", "--minibatch-size"),
        ("--minibatch-size 48", "--minibatch-size"),
        ("--total-timesteps 100", "--total-timesteps"),
        (
            "--num-steps 4 --minibatch-size 8 --total-timesteps 32",
            "--total-timesteps must give each environment at least 20",
        ),
        (
            "--num-steps 4 --minibatch-size 8 --save-every 4",
            "--save-every must give each environment at least 20 steps",
        ),
        ("--env-id toy_env:ToyIntegers-v0", "must be a Box of floats"),
        ("--fast", "--fast is True, but must be off for toy_env:Toy-v0"),
        ("--surrogate " + "9" * 600, "--surrogate"),
        ("--reward-scale 0", "--reward-scale"),
        ("--limit-factor 0.5", "--limit-factor is 0.5, but must be in [1, 1e6]"),
        ("--limit-factor 2 --cost-limit 0", "--limit-factor is 2.0, but must be in [1, 1e6]; 1 for a limit of 0"),
        ("--log-std-init 3", "--log-std-init"),
        ("--cost-limit -1", "--cost-limit"),
        ("--cost-limit None", "--cost-limit"),
        ("--k -1", "--k"),
        ("--beta nan", "--beta"),
        ("--learning-rate 0", "--learning-rate"),
        ("--gamma 1.1", "--gamma"),
        ("--safety-gamma 0", "--safety-gamma"),
        ("--safety-lambdas 0 2", "--safety-lambdas"),
        ("--safety-lambdas", "--safety-lambdas"),
        ("--num-envs 0", "--num-envs"),
        ("--seed -1", "--seed"),
        ("--target-kl 0", "--target-kl"),
        ("--runs-dir /dev/null/x", "--runs-dir"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(tmp_path, capsys, flags, says):
    if flags == "--device cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, *flags.split())
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert says in captured.err and len(captured.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--env-id toy_env:ToyNan-v0 --total-timesteps 1280", "the reward is NaN"),
        ("--learning-rate 1e6 --total-timesteps 1280", "is NaN or infinite"),
    ],
)
def test_nan_stops_the_run_and_leaves_the_logs(tmp_path, flags, says):
    with pytest.raises(SystemExit, match=says) as stop:
        run(tmp_path, *flags.split())
    assert isinstance(stop.value.code, str) and "is intact" in stop.value.code  # a message: status 1
    (folder,) = tmp_path.iterdir()
    assert (folder / "config.json").exists()
    if "Nan" in flags:
        assert len(rows(folder / "progress.csv")) >= 1


def test_it_learns_safety_ball_run(tmp_path):
    """The real thing, compiled: 5 iterations of 32,768 steps with the paper's settings."""
    flags = "--env-id SafetyBallRun-v0 --seed 101 --total-timesteps 163840 --runs-dir".split()
    command = [sys.executable, "scpo_continuous.py", *flags, str(tmp_path)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0 and "Going on without" not in out.stderr, out.stderr
    (folder,) = tmp_path.iterdir()
    progress = rows(folder / "progress.csv")
    returns, costs = ([float(row[name]) for row in progress] for name in ("episodic_return", "episodic_cost"))
    assert returns[0] < 0 < 150 < returns[-1]
    assert costs[-1] < 0.7 * costs[0]
    assert float(progress[-1]["safe_episode_rate"]) > float(progress[0]["safe_episode_rate"])


class Scripted(gym.Env):
    """Its observations and infos are given, one a step."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (2,)), gym.spaces.Box(-1, 1, (1,))

    def __init__(self, obs=(1.0, 2.0), infos=()):
        self.obs, self.infos = np.array(obs), iter(infos)

    def reset(self, *, seed=None, options=None):
        return self.obs, {}

    def step(self, action):
        return self.obs, 1.0, False, True, next(self.infos)


@pytest.mark.parametrize("script", ALL)
@pytest.mark.parametrize("obs", [(1.0,), (1.0, 2.0, 3.0)])
def test_an_observation_of_another_size_than_its_space_is_refused(obs, script):
    """Else the share of the limit would take the place of its last number, or memory of another array fill it up."""
    for augment_state in (False, True):
        with pytest.raises(ValueError, match=f"^an observation has {len(obs)} numbers, its space 2$"):
            script.SafetyState(Scripted(obs), 5, augment_state).reset()


@pytest.mark.parametrize("script", ALL)
def test_an_info_that_tasks_share_keeps_their_episodes_apart(script):
    shared = {"cost": 10.0}
    one, two = (script.SafetyState(Scripted(infos=[shared]), 5) for _ in range(2))
    one.reset(), two.reset()
    first = one.step(None)[4]
    shared["cost"] = 0.0
    second = two.step(None)[4]
    assert (first["episode"]["cost"], first["safe"], second["episode"]["cost"], second["safe"]) == (10, 0, 0, 1)
    assert shared == {"cost": 0.0}


@pytest.mark.parametrize("script", ALL)
def test_costs_of_32_bits_that_add_up_to_the_limit_keep_it(script):
    env = script.SafetyState(Scripted(infos=[{"cost": np.float32(0.1)}] * 4), 0.3)
    env.reset()
    assert [env.step(None)[4]["safe"] for _ in range(4)] == [1, 1, 1, 0]


@pytest.mark.parametrize("script", ALL)
def test_an_error_without_a_message_is_told_by_its_type(script, monkeypatch):
    def make(*args, **options):
        raise ValueError

    monkeypatch.setattr(gym, "make", make)
    with pytest.raises(ValueError, match=r"^--env-id X: ValueError\(\)$"):
        script.make_env("X", 5, True)
