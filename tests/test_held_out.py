"""A baseline's step on its own batch and on others: reproduce/held_out.py."""

import csv
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import scpo_continuous
from baselines import cpo, trpo_lagrangian
from reproduce import held_out

FLAGS = dict(env_id="toy_env:Toy-v0", cost_limit=5, num_envs=2, num_steps=128, save_every=0, total_timesteps=512)


def run_of(script, folder, **flags):
    """Trains on the toy task and saves a run's last checkpoint; returns its folder."""
    args = script.Args(**{**FLAGS, **flags})
    *_, last = script.train(args)
    content = dict(script=Path(script.__file__).name, args=asdict(args))
    torch.save({**content, **last["checkpoint"]}, folder / "last.pt")
    return folder


@pytest.mark.parametrize("script", [cpo, trpo_lagrangian])
def test_own_is_what_the_script_logs_of_its_step(script, tmp_path, monkeypatch):
    logged, update = [], script.update_policy
    monkeypatch.setattr(script, "update_policy", lambda *args: logged.append(update(*args)) or logged[-1])
    run = run_of(script, tmp_path)
    before = torch.load(run / "last.pt", weights_only=True)["agent"]
    logged.clear()
    rows = held_out.held_out(run, 3)
    assert len(rows) == len(logged) == 3 and [row["batch"] for row in rows] == [0, 1, 2]
    for row, log in zip(rows, logged):
        assert log["step_accepted"] and row["iteration"] == 2
        assert float(row["own_cost"]) == pytest.approx(held_out_length() * log["cost_surrogate_change"], rel=1e-3)
        if script is cpo:  # the others' objective has the cost in it
            assert float(row["own_return"]) == pytest.approx(log["objective_change"], rel=1e-3)
    stds, policy = [], script.numpy_policy
    monkeypatch.setattr(script, "numpy_policy", lambda agent: stds.append(agent.std.item()) or policy(agent))
    checkpoint = torch.load(run / "last.pt", weights_only=True)
    if script is trpo_lagrangian:
        checkpoint["agent"]["lagrangian_multiplier"].fill_(5)
    agents, batches = held_out.sample(script, script.Args(**FLAGS), checkpoint, 2)
    for agent in agents:
        for name, value in agent.state_dict().items():
            if not name.startswith(("return_", "excess", "lagrangian")):
                assert torch.equal(value, before[name]), name  # all batches are of one policy
    if script is trpo_lagrangian:  # a step is made with the multiplier of its batch
        first, second = (agent.lagrangian_multiplier.item() for agent in agents)
        assert first != second
    assert stds == [before["std"].item()] * 2
    assert not torch.equal(batches[0][1], batches[1][1])


def held_out_length():
    return cpo.make_env(FLAGS["env_id"], 5, False).spec.max_episode_steps


def test_other_is_the_mean_over_the_other_batches(tmp_path, monkeypatch):
    batches = [[torch.full((1,), float(i))] for i in range(3)]
    agent = cpo.Agent(4, cpo.make_env("toy_env:Toy-v0", 5, False).action_space)
    monkeypatch.setattr(held_out, "sample", lambda *args: ([agent] * 3, batches))
    monkeypatch.setattr(held_out, "surrogates", lambda new, old, batch: [batch[0].item(), -batch[0].item()])
    run = run_of(cpo, tmp_path)
    monkeypatch.setattr(cpo, "update_policy", lambda *args: {})
    rows = held_out.held_out(run, 3)
    assert [float(row["own_return"]) for row in rows] == [0, 1, 2]
    assert [float(row["other_return"]) for row in rows] == [1.5, 1, 0.5]
    assert np.allclose([float(row["other_cost"]) for row in rows], -held_out_length() * np.array([1.5, 1, 0.5]))


def test_a_run_made_again_takes_the_place_of_its_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(held_out, "RESULTS", tmp_path)
    run = run_of(cpo, tmp_path)
    for batches, seed in (("3", 1), ("2", 1), ("2", 2)):
        checkpoint = torch.load(run / "last.pt", weights_only=True)
        checkpoint["args"]["seed"] = seed
        torch.save(checkpoint, run / "last.pt")
        held_out.main([str(run), "--batches", batches])
    with open(tmp_path / "held_out.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["batch"]) for row in rows] == [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]
    assert "own_cost" in capsys.readouterr().out


SAYS = [("1", "--batches is 1, but must be 2 or more"), ("2", "No such file"), ("2", "")]


@pytest.mark.parametrize("batches, says", SAYS)
def test_bad_input_gets_one_line(batches, says, tmp_path, capsys):
    run = tmp_path / "none"
    if not says:
        args = scpo_continuous.Args(**FLAGS, compile=False)
        *_, last = scpo_continuous.train(args)
        torch.save(dict(script="scpo_continuous.py", args=asdict(args), **last["checkpoint"]), tmp_path / "last.pt")
        run, says = tmp_path, "RUN must be a baseline's"
    with pytest.raises(SystemExit) as stop:
        held_out.main([str(run), "--batches", batches])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and says in said


def test_a_run_from_before_a_flag_is_refused(tmp_path):
    run = run_of(cpo, tmp_path)
    checkpoint = torch.load(run / "last.pt", weights_only=True)
    del checkpoint["args"]["kl_margin"]
    torch.save(checkpoint, run / "last.pt")
    with pytest.raises(ValueError, match="is older than the script and has no kl_margin"):
        held_out.held_out(run, 2)


@pytest.mark.parametrize("name, lacks", [("best_safe.pt", "optimizer torch_rng numpy_rng"), ("last.pt", "optimizer")])
def test_a_checkpoint_that_nothing_goes_on_from_is_refused_before_sampling(name, lacks, tmp_path, monkeypatch, capsys):
    checkpoint = torch.load(run_of(cpo, tmp_path) / "last.pt", weights_only=True)
    torch.save({key: value for key, value in checkpoint.items() if key not in lacks.split()}, tmp_path / name)
    monkeypatch.setattr(held_out, "sample", lambda *args: pytest.fail("it sampled"))
    with pytest.raises(SystemExit) as stop:
        held_out.main([str(tmp_path / name)])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and "has no optimizer" in said
    assert said.endswith("take the last.pt of a run's folder\n")


def test_a_task_without_a_time_limit_is_refused(tmp_path, monkeypatch):
    env, policy, checkpoint = held_out.evaluate.load(run_of(cpo, tmp_path))
    env.spec.max_episode_steps = None
    monkeypatch.setattr(held_out.evaluate, "load", lambda run: (env, policy, checkpoint))
    with pytest.raises(ValueError, match="has no time limit"):
        held_out.held_out(tmp_path, 2)
