"""evaluate.py: the same answer from the checkpoint alone, in a new process, right; one line for what can't be judged."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from test_runs import SCRIPTS, flags, only, rows, run

import evaluate

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A short run of each script."""
    made = {}
    for script in SCRIPTS:
        folder = tmp_path_factory.mktemp(script.replace("/", "_"))
        run(script, flags(script, folder, iterations=4))
        made[script] = only(folder)
    return made


def judged(capsys, *argv):
    evaluate.main([*map(str, argv), "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_scripts_policy_is_judged_in_both_modes(script, runs, capsys):
    told = judged(capsys, runs[script], "--episodes", 30)
    assert told["run"] == f"{rows_task(runs[script])}, {script.split('/')[-1]}.py, seed 1, after iteration 4"
    for mode in ("deterministic", "stochastic"):
        assert told[mode]["n"] == 30 and told[mode]["cost_limit"] == 3
        for metric in ("return", "cost", "length", "safe"):
            assert told[mode][metric]["low"] <= told[mode][metric]["mean"] <= told[mode][metric]["high"]
        assert told[mode]["length"] == {"mean": 20, "low": 20, "high": 20}
    assert told["deterministic"]["return"] != told["stochastic"]["return"]


def rows_task(run_dir):
    return json.loads((run_dir / "config.json").read_text())["env_id"]


def test_the_figures_are_those_of_the_episodes(runs):
    """Played by hand: the actor's mean in torch, the task without our wrapper's help."""
    checkpoint, module = evaluate.load(runs["scpo_continuous"])
    env = evaluate.make_env(module, checkpoint["args"], "toy_env:Toy-v0", False)
    policy = evaluate.make_policy(checkpoint, module, env)
    episodes = [evaluate.play(env, policy, seed, True) for seed in range(5)]
    agent = module.Agent(3, 2)
    agent.load_state_dict(checkpoint["agent"])
    plain = env.unwrapped
    for seed in range(5):
        obs, _ = plain.reset(seed=seed)
        returned = spent = 0.0
        for _ in range(20):
            state = torch.tensor([*obs, min(spent / 3, 1.1)], dtype=torch.float32)
            action = agent.actor_mean(state).detach().numpy().clip(-1, 1)
            obs, reward, _, _, info = plain.step(action)
            returned, spent = returned + reward, spent + info["cost"]
        assert episodes[seed]["return"] == pytest.approx(returned, abs=1e-4)
        assert episodes[seed]["cost"] == spent and episodes[seed]["safe"] == (spent <= 3)


def test_stochastic_actions_are_those_of_training(runs, capsys):
    """The policy that the run goes on with has, in its next iterations, the return that is judged here."""
    told = judged(capsys, runs["baselines/trpo"], "--episodes", 200, "--stochastic")
    assert list(told) == ["run", "stochastic"]
    checkpoint = torch.load(runs["baselines/trpo"] / "last.pt", weights_only=True)
    assert checkpoint["agent"]["std"].item() == pytest.approx(0.1)  # of the last iteration
    last = float(rows(runs["baselines/trpo"] / "progress.csv")[-1]["episodic_return"])
    assert abs(told["stochastic"]["return"]["mean"] - last) < 2.5


def test_the_bootstrap_interval_is_scipys():
    values = np.random.default_rng(0).exponential(size=80)
    ours = evaluate.bootstrap(values)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=10_000, rng=1).confidence_interval
    assert ours == pytest.approx(tuple(theirs), rel=0.02)


def test_the_worst_episode_is_the_costliest_then_the_poorest():
    episodes = [
        {"seed": seed, "return": returned, "cost": cost, "length": 20, "safe": cost <= 3}
        for seed, (returned, cost) in enumerate([(1, 0), (5, 4), (2, 4), (-9, 3)])
    ]
    told = evaluate.judge(episodes, 3)
    assert told["worst_episode"] == {"seed": 2, "return": 2, "cost": 4, "length": 20} and told["safe"]["mean"] == 0.5


def test_a_new_process_gives_the_same_answer(runs, capsys, tmp_path):
    command = [sys.executable, str(ROOT / "evaluate.py"), str(runs["scpo_discrete"]), "--episodes", "10"]
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "/usr/bin:/bin"}
    told = [subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env) for _ in range(2)]
    assert told[0].returncode == 0, told[0].stderr
    evaluate.main([str(runs["scpo_discrete"]), "--episodes", "10"])
    assert told[0].stdout == told[1].stdout == capsys.readouterr().out
    assert "worst episode, stochastic: cost" in told[0].stdout


def test_best_safe_is_judged_too(runs, capsys):
    told = judged(capsys, runs["scpo_continuous"] / "best_safe.pt", "--episodes", 5)
    assert "after iteration" in told["run"]


@pytest.mark.parametrize("task", ["SafetyBallRun", "SafetyBallCircle", "SafetyBallGather", "SafetyBallReach", "CartSafe"])
def test_video_of_each_task_with_the_cost_drawn_in(task, tmp_path, capsys):
    iio = pytest.importorskip("imageio.v3")
    script = "scpo_discrete" if task == "CartSafe" else "scpo_continuous"
    short = "--num-envs 1 --num-steps 300 --minibatch-size 60 --total-timesteps 300 --no-compile --save-every 0"
    run(script, ["--env-id", f"{task}-v0", *short.split(), "--runs-dir", tmp_path])
    capsys.readouterr()
    run_dir = only(tmp_path)
    evaluate.main([str(run_dir), "--episodes", "1", "--stochastic", "--video", str(tmp_path / "film.mp4"), "--json"])
    told = json.loads(capsys.readouterr().out)
    frames = iio.imread(tmp_path / "film.mp4")
    assert abs(len(frames) - told["stochastic"]["length"]["mean"]) <= 1
    assert frames[:, 9:24, 10:218].min() < 150 < frames[:, 9:24, 10:218].max()  # the text on its white ground
    assert frames[0].std() > 5  # and a picture around it
    assert (frames[0] != frames[-1]).mean() > 0.001


@pytest.mark.parametrize(
    "argv, says",
    [
        (["nowhere"], "RUN: there is no nowhere"),
        (["{run}", "--episodes", "0"], "--episodes is 0, but must be at least 1"),
        (["{run}", "--episodes", "x"], "--episodes: invalid int value: 'x'"),
        (["{run}", "--env-id", "toy_env:ToyMatrix-v0", "--seed", "-1"], "--seed is -1, but must be 0 or more"),
        (["{run}", "--env-id", "SafetyBallRun-v0"], "observations have"),
        (["{run}", "--env-id", "CartSafe-v0"], "actions must be Box"),
        (["{run}", "--env-id", "Nowhere-v0"], "--env-id Nowhere-v0"),
        (["{run}", "--video", "/nowhere/film.mp4"], "--video: there is no folder /nowhere"),
        (["{run}", "--deterministic", "--stochastic"], "not allowed with"),
        ([], "RUN"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(argv, says, runs, capsys):
    with pytest.raises(SystemExit) as stop:
        evaluate.main([word.replace("{run}", str(runs["scpo_continuous"])) for word in argv])
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and says in said and "\n" not in said


@pytest.mark.parametrize("content", [b"", b"nonsense", "foreign", "gone"])
def test_a_file_that_is_no_checkpoint_gets_one_line(content, tmp_path, capsys):
    if isinstance(content, bytes):
        (tmp_path / "last.pt").write_bytes(content)
    else:
        script = {"foreign": None, "gone": "my_ppo.py"}[content]
        torch.save({"script": script, "agent": {}, "args": {"env_id": "x"}} if script else {"x": 1}, tmp_path / "last.pt")
    with pytest.raises(SystemExit) as stop:
        evaluate.main([str(tmp_path)])
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and "\n" not in said
    assert ("which isn't here" if content == "gone" else "not a checkpoint of ours") in said


def test_the_module_is_the_script(runs):
    assert evaluate.load(runs["baselines/cpo"])[1].__file__ == importlib.import_module("baselines.cpo").__file__
