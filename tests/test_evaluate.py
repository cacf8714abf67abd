"""evaluate.py: right, the same answer from the checkpoint alone, and one line for what can't be judged."""

import importlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from scipy import stats
from toy_env import Toy

import evaluate
import scpo_run

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    "scpo_continuous",
    "scpo_discrete",
    *(f"baselines/{x}" for x in ("trpo", "trpo_lagrangian", "cpo", "pcpo", "pdo")),
]


class Variant(Toy):
    """The toy task with another range of actions, or with a fault: six values, a failing reset, odd pictures."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, low=-1.0, high=1.0, fault=None, picture=None, render_mode=None):
        super().__init__()
        self.action_space = gym.spaces.Box(low, high, (2,), np.asarray(high).dtype)
        self.fault, self.picture, self.seen = fault, picture, []
        self.drawn_when_made = random.random() + np.random.random()  # noqa: NPY002

    def reset(self, *, seed=None, options=None):
        self.resets = getattr(self, "resets", 0) + 1
        if self.fault == "global":
            self.total = -np.random.randint(9)  # noqa: NPY002
        if self.fault == "reset" and self.resets == 4:
            raise RuntimeError("the door\nis shut")
        return super().reset(seed=seed)

    def step(self, action):
        self.seen.append(action)
        obs, reward, terminated, truncated, info = super().step(np.zeros(2))
        if self.fault == "global":
            reward = self.total + self.drawn_when_made + random.random()
        if self.fault == "nan" and self.total > 30:
            obs = obs * np.nan
        return (
            (obs, reward, info["cost"], terminated, truncated, {})
            if self.fault == "six"
            else (obs, reward, False, False, info)
        )

    def render(self):
        if self.picture == "none":
            return None
        if self.picture == "no":
            raise NotImplementedError
        return np.full((90, 400, 3), 128, dtype=np.uint8)


gym.register("Endless-v0", Toy)
for name, kwargs in dict(
    Far=dict(low=np.float32([100, 0]), high=np.float32([200, 1000])),
    Unbounded=dict(low=-np.inf, high=np.float32(np.inf)),
    Integers=dict(low=0, high=np.int64(10)),
    Six=dict(fault="six"),
    Shut=dict(fault="reset"),
    Global=dict(fault="global"),
    Blank=dict(fault="nan"),
    Undrawn=dict(picture="no"),
    Hidden=dict(picture="none"),
    Drawn=dict(),
).items():
    gym.register(f"{name}-v0", Variant, max_episode_steps=20, kwargs=kwargs)
for task in ("Circle", "Run", "Gather", "Reach"):
    gym.register(f"Short{task}-v0", f"scpo_envs.ball_tasks:Ball{task}", max_episode_steps=3)
gym.register("ShortCartSafe-v0", "scpo_envs.cart_safe:CartSafe", max_episode_steps=3)


def train(script, runs_dir, env_id=None, iterations=4, more=""):
    """Trains in this process and returns the run's folder."""
    module = importlib.import_module(script.replace("/", "."))
    task = env_id or f"toy_env:Toy{'Choice' if 'discrete' in script else ''}-v0"
    size = "--minibatch-size 32 --no-compile" if "scpo_" in script else "--critic-minibatches 4"
    flags = (
        f"--env-id {task} --num-envs 2 --num-steps 64 --total-timesteps {128 * iterations} --cost-limit 3 {size} {more}"
    )
    scpo_run.run(module.train, module.Args, module.TASK_SETTINGS, [*flags.split(), "--runs-dir", str(runs_dir)])
    (run_dir,) = Path(runs_dir).iterdir()
    return run_dir


@pytest.fixture(autouse=True, scope="module")
def signals():
    """Training in this process sets handlers."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A short run of each script."""
    return {script: train(script, tmp_path_factory.mktemp(script.replace("/", "_"))) for script in SCRIPTS}


def judged(capsys, *argv):
    capsys.readouterr()
    evaluate.main([*map(str, argv), "--json"])
    return json.loads(capsys.readouterr().out)


def refused(capsys, *argv, status=2):
    """What is said, in one line, on stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        evaluate.main([str(word) for word in argv])
    out, said = capsys.readouterr()
    assert stop.value.code == status and out == ""
    assert said.startswith("evaluate.py: ") and said.count("\n") == 1 and len(said) < 600
    return said


# The numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_scripts_policy_is_judged_in_both_modes(script, runs, capsys):
    told = judged(capsys, runs[script], "--episodes", 30)
    task = "ToyChoice-v0" if "discrete" in script else "Toy-v0"
    assert told["run"] == f"{task}, {script.split('/')[-1]}.py, seed 1, after iteration 4"
    for mode in ("deterministic", "stochastic"):
        assert told[mode]["n"] == 30 and told[mode]["cost_limit"] == 3
        assert told[mode]["length"] == {"mean": 20, "low": None, "high": None}
        for metric in ("return", "safe"):
            assert told[mode][metric]["low"] <= told[mode][metric]["mean"] <= told[mode][metric]["high"]
    assert told["deterministic"]["return"] != told["stochastic"]["return"]


def test_the_figures_are_those_of_the_episodes(runs):
    """Played by hand: the actor's mean in torch, the task without our wrapper's help."""
    env, policy, checkpoint = evaluate.load(runs["scpo_continuous"])
    episodes = [[*evaluate.play(env, policy, seed, "deterministic", 20)][-1]["episode"] for seed in range(5)]
    agent = importlib.import_module("scpo_continuous").Agent(3, env.action_space)
    agent.load_state_dict(checkpoint["agent"])
    plain = env.unwrapped
    for seed in range(5):
        obs, _ = plain.reset(seed=seed)
        returned = spent = 0.0
        for _ in range(20):
            state = torch.tensor([*obs, min(spent / 3, 1.1)], dtype=torch.float32)
            obs, reward, _, _, info = plain.step(agent.actor(agent.normalize(state)).detach().numpy().clip(-1, 1))
            returned, spent = returned + reward, spent + info["cost"]
        assert episodes[seed]["return"] == pytest.approx(returned, abs=1e-4)
        assert episodes[seed]["cost"] == spent and episodes[seed]["safe"] == (spent <= 3)


def test_stochastic_actions_are_those_of_training(runs):
    """A Gaussian's deviation and a softmax's shares, from the weights in torch."""
    _, policy, checkpoint = evaluate.load(runs["baselines/trpo"])
    obs, rng = np.array([0.1, -0.1], dtype=np.float32), np.random.default_rng(0)
    actions = np.array([policy(obs, rng) for _ in range(2000)])
    assert checkpoint["agent"]["std"].item() == pytest.approx(0.1)  # of the last iteration
    assert np.std(actions, axis=0) == pytest.approx([0.1, 0.1], rel=0.06)
    assert actions.mean(0) == pytest.approx(policy(obs), abs=0.01)

    env, policy, checkpoint = evaluate.load(runs["scpo_discrete"])
    agent = importlib.import_module("scpo_discrete").Agent(3, env.action_space)
    agent.load_state_dict(checkpoint["agent"])
    obs = np.array([0.1, -0.1, 0], dtype=np.float32)
    shares = agent.actor(agent.normalize(torch.tensor(obs))).softmax(-1).detach().numpy()
    counted = np.bincount([policy(obs, rng) for _ in range(2000)], minlength=3) / 2000
    assert counted == pytest.approx(shares, abs=0.04) and policy(obs) == shares.argmax()


def test_the_task_and_the_policys_noise_draw_from_independent_streams():
    class Echo(gym.Env):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            drawn.append([self.np_random.standard_normal()])
            return np.zeros(1), {}

        def step(self, action):
            return np.zeros(1), 0.0, True, False, {}

    def policy(obs, rng):
        drawn[-1].append(rng.standard_normal())
        return 0.0

    drawn = []
    for seed in range(10_000, 11_000):
        for _ in evaluate.play(Echo(), policy, seed, "stochastic", 1):
            pass
    assert abs(stats.spearmanr(*zip(*drawn)).statistic) < 0.1
    assert len(np.unique(drawn)) == 2000


def episodes(costs, limit=3):
    return [
        {"seed": i, "return": -cost, "cost": cost, "length": 20, "safe": int(cost <= limit)}
        for i, cost in enumerate(costs)
    ]


def test_the_interval_of_the_share_is_the_exact_one():
    told = evaluate.judge(episodes([0] * 100), 3)["safe"]
    assert told["low"] == pytest.approx(0.025 ** (1 / 100)) and told["high"] == 1  # nobody is sure after 100 episodes
    assert evaluate.judge(episodes([9]), 3)["safe"]["high"] == pytest.approx(0.975)
    told = evaluate.judge(episodes([0] * 19 + [9]), 3)["safe"]
    assert told["mean"] == 0.95
    assert stats.binom.sf(18, 20, told["low"]) == pytest.approx(0.025)
    assert stats.binom.cdf(19, 20, told["high"]) == pytest.approx(0.025)
    assert "1.000 [0.964, 1.000]" in evaluate.as_text({"stochastic": evaluate.judge(episodes([0] * 100), 3)}, "")


def test_the_other_intervals_are_given_where_they_mean_something():
    costs = np.random.default_rng(0).exponential(size=80)
    resampled = np.random.default_rng(1).choice(costs, (10_000, 80)).mean(1)
    told = evaluate.judge(episodes(costs), 3)
    assert [told["cost"]["low"], told["cost"]["high"]] == pytest.approx(np.percentile(resampled, [2.5, 97.5]), rel=0.03)
    assert told["length"] == {"mean": 20, "low": None, "high": None}  # all alike
    assert evaluate.judge(episodes(costs[:19]), 3)["cost"] == {"mean": costs[:19].mean(), "low": None, "high": None}
    assert evaluate.judge(episodes(costs[:20]), 3)["cost"]["low"] is not None


def test_the_worst_episode_is_the_costliest_then_the_poorest():
    played = episodes([0, 4, 4, 3])
    played[2]["return"] = -9
    assert evaluate.judge(played, 3)["worst_episode"] == played[2]
    assert "worst episode, stochastic: cost 4, return -9.000, length 20, seed 2 (cost limit 3)" in evaluate.as_text(
        {"stochastic": evaluate.judge(played, 3)}, ""
    )


def test_columns_of_long_numbers_stay_apart():
    told = evaluate.judge(
        [dict(episode, **{"return": -123456.0 - i}) for i, episode in enumerate(episodes([0] * 30))], 3
    )
    (line,) = [
        x for x in evaluate.as_text({"deterministic": told, "stochastic": told}, "").split("\n") if "return" in x[:9]
    ]
    assert re.search(r"\] +-123,?470", line)


def test_best_safe_is_the_policy_that_played_its_iteration(tmp_path, capsys):
    """Those weights stem from one iteration less; last.pt holds what came out of the last one."""
    module = importlib.import_module("scpo_continuous")
    states, original = [], module.train

    def spied(args, checkpoint=None):
        for progress in original(args, checkpoint):
            states.append({name: x.clone() for name, x in progress["checkpoint"]["agent"].items()})
            yield progress

    spied.__code__ = spied.__code__.replace(co_filename=module.__file__)
    module.train = spied
    try:
        run_dir = train("scpo_continuous", tmp_path, iterations=3)
    finally:
        module.train = original
    for name, updates in (("best_safe.pt", None), ("last.pt", 3)):
        checkpoint = torch.load(run_dir / name, weights_only=True)
        updates = checkpoint["iteration"] - 1 if updates is None else updates
        assert all(torch.equal(states[updates][x], weight) for x, weight in checkpoint["agent"].items())
        assert judged(capsys, run_dir / name, "--episodes", 1)["run"].endswith(f"seed 1, after iteration {updates}")


@pytest.mark.parametrize(
    "env_id, expected",
    [
        ("Far", lambda mean: np.clip([150 + 50 * mean[0], 500 + 500 * mean[1]], [100, 0], [200, 1000])),
        ("Unbounded", lambda mean: mean),
    ],
)
def test_actions_are_mapped_to_the_tasks_range(env_id, expected, runs):
    """Bounded ones from [-1, 1], others are passed on."""
    env, policy, checkpoint = evaluate.load(runs["baselines/cpo"], env_id=f"{env_id}-v0")
    agent = importlib.import_module("baselines.cpo").Agent(2, env.action_space)
    agent.load_state_dict(checkpoint["agent"])
    agent.actor[-1].bias.data = torch.tensor([1.5, -0.25])
    obs = np.array([0.3, -0.2], dtype=np.float32)
    env, policy, checkpoint = loaded_with(agent, runs["baselines/cpo"], f"{env_id}-v0")
    mean = agent.actor(agent.normalize(torch.tensor(obs))).detach().numpy()
    assert policy(obs) == pytest.approx(expected(mean), rel=1e-4)


def loaded_with(agent, run_dir, env_id):
    """The run with other weights."""
    checkpoint = torch.load(run_dir / "last.pt", weights_only=True)
    path = run_dir / "other.pt"
    torch.save({**checkpoint, "agent": agent.state_dict()}, path)
    return evaluate.load(path, env_id=env_id)


# The process ----------------------------------------------------------------------------------------------------------


def process(cwd, *argv):
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", OMP_NUM_THREADS="1")
    command = [sys.executable, ROOT / "evaluate.py", *map(str, argv)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=env)


def test_a_new_process_elsewhere_gives_the_same_answer(runs, capsys, tmp_path):
    """And it says nothing else: the progress is for terminals."""
    evaluate.main([str(runs["scpo_discrete"]), "--episodes", "20"])
    told = capsys.readouterr()
    with process(tmp_path, runs["scpo_discrete"], "--episodes", 20) as other:
        assert other.communicate() == (told.out, "") and other.returncode == 0
    assert told.err == "" and max(map(len, told.out.splitlines())) <= 100


def test_tasks_that_draw_from_the_global_generator_give_the_same_answer_too(runs, capsys):
    argv = [runs["scpo_continuous"], "--env-id", "Global-v0", "--episodes", 3]
    assert judged(capsys, *argv) == judged(capsys, *argv)


def test_a_closed_pipe_is_no_error(runs, tmp_path):
    with process(tmp_path, runs["scpo_discrete"], "--episodes", 1) as closed:
        closed.stdout.close()
        assert closed.stderr.read() == ""
    assert closed.returncode == 0


def test_progress_is_shown_on_a_terminal(runs, capsys, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    judged(capsys, runs["scpo_continuous"], "--episodes", 3)
    assert "\rdeterministic:   0%" in terminal.getvalue() and "\rstochastic:   0%" in terminal.getvalue()


def test_ctrl_c_gets_one_line(runs, capsys, monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(evaluate, "play", interrupted)
    assert refused(capsys, runs["scpo_continuous"], status=130) == "evaluate.py: interrupted\n"
    argv = [runs["scpo_continuous"], "--env-id", "Drawn-v0", "--video", tmp_path / "film.mp4"]
    assert refused(capsys, *argv, status=130) == "evaluate.py: interrupted\n"


# What can't be judged -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, says",
    [
        ("", "RUN"),
        ("{run} --episodes 0", "--episodes is 0, but must be in [1, 1e6]"),
        ("{run} --episodes 10000000", "--episodes is 10000000, but must be in [1, 1e6]"),
        ("{run} --episodes x", "--episodes"),
        ("{run} --seed -1", "--seed is -1, but must be in [0, 2e9]"),
        ("{run} --max-steps 0", "--max-steps is 0, but must be 1 or more"),
        ("{run} --nonsense", "--nonsense"),
        ("nowhere", "RUN: nowhere: No such file or directory"),
        ("{run}/progress.csv", "damaged, or not a checkpoint of ours"),
        ("{run} --env-id Nowhere-v0", "--env-id Nowhere-v0"),
        ("{run} --env-id=", "--env-id : Malformed"),
        ("{run} --env-id SafetyBallRun-v0", "last.pt doesn't fit SafetyBallRun-v0 and scpo_continuous.py"),
        ("{run} --env-id CartSafe-v0", "actions must be a Box of floats, not Discrete(2)"),
        ("{run} --env-id Integers-v0", "actions must be a Box of floats, not Box(0, 10, (2,), int64)"),
        (
            "{run} --env-id Six-v0",
            'reset must return obs, info; step obs, reward, terminated, truncated, info, with info["cost"]',
        ),
        ("{run} --env-id toy_env:ToyNoCost-v0", 'info["cost"] is None'),
        ("{run} --env-id SafetyPointGoal1-v0", "take scpo_envs.safety_gymnasium:SafetyPointGoal1Gymnasium-v0 (docs/f"),
        ("{run} --script=", "--script must name the file that made {run}/last.pt"),
        ("{run} --script nowhere.py", "--script must name the file that made {run}/last.pt; nowhere.py won't do"),
        ("{run} --script {root}/scpo_run.py", "KeyError('make_env')"),
        ("{run} --video=", "--video is '', but must be the name of an .mp4 file"),
        ("{run} --video film.gif", "--video is 'film.gif', but must be the name of an .mp4 file"),
        ("{run} --env-id Drawn-v0 --video /nowhere/film.mp4", "No such file or directory"),
        ("{run} --env-id Drawn-v0 --video {folder}", "Is a directory"),
        ("{run} --env-id Undrawn-v0 --video {tmp}/no.mp4", "for MuJoCo): NotImplementedError()"),
        ("{run} --env-id Undrawn-v0 --video {tmp}/no.mp4", "can't film Undrawn-v0 into {tmp}/no.mp4 (pip install"),
        ("{run} --env-id Hidden-v0 --video {tmp}/no.mp4", "its render() returns no picture"),
        ("{run} --video {tmp}/no.mp4", "render_mode"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(argv, says, runs, tmp_path, capsys):
    (tmp_path / "folder.mp4").mkdir()
    places = dict(run=runs["scpo_continuous"], root=ROOT, folder=tmp_path / "folder.mp4", tmp=tmp_path)
    assert says.format(**places) in refused(capsys, *argv.format(**places).split())
    assert not (tmp_path / "no.mp4").exists()


@pytest.mark.parametrize(
    "env_id, says",
    [
        (
            "toy_env:ToyRaise",
            r"ToyRaise-v0 failed in step \d+ of the episode with seed 1000\d: RuntimeError\('the motor",
        ),
        (
            "toy_env:ToyForget",
            r"ToyForget-v0 failed in step \d+ of the episode with seed 1000\d: .*info\[.cost.\] is None",
        ),
        ("toy_env:ToyNan", r"step \d+ .* reward is NaN"),
        ("Blank", "step 10 of the episode with seed 10001: .* observation or reward is NaN"),
        ("Shut", r"Shut-v0 failed in step 0 of the episode with seed 1000\d: RuntimeError\('the door"),
        ("Endless", r"Endless-v0: the episode with seed 10000 hasn't ended after 50 steps, see --max-steps"),
    ],
)
def test_a_task_that_fails_in_mid_episode_gets_one_line(env_id, says, runs, capsys):
    said = refused(capsys, runs["scpo_continuous"], "--env-id", f"{env_id}-v0", "--max-steps", 50)
    assert re.search(says, said), said


def test_damaged_and_foreign_checkpoints_get_one_line(runs, capsys, tmp_path):
    whole = torch.load(runs["scpo_continuous"] / "last.pt", weights_only=True)
    path = tmp_path / "last.pt"

    def said(content):
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        return refused(capsys, tmp_path)

    for content in (b"", b"nonsense", (runs["scpo_continuous"] / "last.pt").read_bytes()[:3000], [1, 2], torch.ones(2)):
        assert f"RUN: {path}: damaged, or not a checkpoint of ours" in said(content)
    for name in ("script", "args", "iteration", "agent"):
        assert f"RUN: {path}: it lacks '{name}'" in said({key: x for key, x in whole.items() if key != name})
    for name in ("env_id", "seed", "cost_limit", "augment_state"):
        args = {key: x for key, x in whole["args"].items() if key != name}
        assert f"RUN: {path}: it lacks '{name}'" in said({**whole, "args": args})
    for name, wrong in (("script", 3), ("args", 3), ("iteration", "5"), ("agent", 3)):
        assert "damaged, or not a checkpoint of ours" in said({**whole, name: wrong})
    lacking = {name: x for name, x in whole["agent"].items() if name != "actor.0.bias"}
    assert f"{path} doesn't fit Toy-v0 and scpo_continuous.py" in said({**whole, "agent": lacking})
    assert f"{path} doesn't fit Toy-v0 and scpo_continuous.py" in said({**whole, "agent": {"actor.0.bias": "x"}})
    for value in (float("nan"), float("inf")):
        weights = {**whole["agent"], "actor.4.bias": torch.tensor([0.0, value])}
        assert f"RUN: {path}: its weights are NaN or infinite" in said({**whole, "agent": weights})


def test_the_run_of_a_renamed_script_is_judged_with_script(runs, capsys, tmp_path):
    checkpoint = torch.load(runs["scpo_continuous"] / "last.pt", weights_only=True)
    torch.save({**checkpoint, "script": "my_ppo.py"}, tmp_path / "last.pt")
    said = refused(capsys, tmp_path)
    assert f"--script must name the file that made {tmp_path}/last.pt" in said and "my_ppo.py won't do" in said
    shutil.copy(ROOT / "scpo_continuous.py", tmp_path / "my_ppo.py")
    told = judged(capsys, tmp_path, "--script", tmp_path / "my_ppo.py", "--episodes", 2)
    original = judged(capsys, runs["scpo_continuous"], "--episodes", 2)
    assert told.pop("run") == original.pop("run").replace("scpo_continuous", "my_ppo") and told == original


# Films ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["Circle", "Run", "Gather", "Reach", "CartSafe"])
def test_films_show_step_mode_cost_and_limit(task, tmp_path, monkeypatch):
    iio = pytest.importorskip("imageio.v3")
    ImageDraw = pytest.importorskip("PIL.ImageDraw")
    written, original = [], ImageDraw.ImageDraw.text

    def text(self, place, words, *args, **kwargs):
        written.append(words)
        return original(self, place, words, *args, **kwargs)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    script = importlib.import_module("scpo_discrete" if task == "CartSafe" else "scpo_continuous")
    env = script.make_env(f"Short{task}-v0", 2, True)
    evaluate.film(tmp_path / "film.mp4", env, lambda obs, rng: env.action_space.sample(), 0, evaluate.MODES, 3)
    for i, words in enumerate(written):
        assert f"{evaluate.MODES[i // 3]}, step {i % 3 + 1}" in words and "\ncost 0, limit 2" in words
        assert (", speed " in words and " m/s, limit 2.5" in words) == (task == "Run")
    frames = iio.imread(tmp_path / "film.mp4")
    assert len(frames) == len(written) == 6
    whole = (tmp_path / "film.mp4").read_bytes()
    with pytest.raises(ValueError, match="hasn't ended after 2 steps"):
        evaluate.film(tmp_path / "film.mp4", env, lambda obs, rng: env.action_space.sample(), 0, evaluate.MODES, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["film.mp4"] and len(whole) > 100
    assert (tmp_path / "film.mp4").read_bytes() == whole
    assert frames[0][:40].min() < 100 < 200 < frames[0][:40].max()  # text on white
    assert frames[0][60:].std() > 5  # and the picture below
