"""reproduce/film.py: runs side by side, with the cost spent, the limit and the ball's path."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from PIL import Image, ImageColor
from toy_env import Toy

import baselines.trpo
import scpo_continuous
import scpo_run
from reproduce import film
from scpo_envs import ball_tasks

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("spent, colour, filled", [(0, film.GREEN, 0), (25, film.GREEN, 0.5), (30, film.RED, 0.6)])
def test_the_bar_shows_cost_and_limit(spent, colour, filled):
    env = SimpleNamespace(spent=spent, cost_limit=25, length=3, earned=1.0)
    bar = np.asarray(film.header(416, "SCPO", env, safe=spent <= 25))[
        52
    ]  # a row of pixels through it, 8 left on both sides
    inside = (bar[9:408] == ImageColor.getrgb(colour)).all(-1)
    black = (bar[205:212] < 40).all(-1)
    assert inside.mean() == pytest.approx(filled, abs=0.02)
    assert black.sum() == 3  # the limit's mark


def test_the_path_is_where_the_ball_is():
    """The pixels that differ between two places of the ball are around both places."""
    env = gym.make("SafetyBallCircle-v0", render_mode="rgb_array", disable_env_checker=True)
    pictures, places = [], []
    for x, y in ((-4, 3), (5, -2)):
        env.reset(seed=1, options={"ball": (x, y, 0.5)})
        pictures.append(env.render().astype(int))
        places.append(film.place(env.unwrapped, env.unwrapped.position))
    rows, columns = np.nonzero(np.abs(pictures[0] - pictures[1]).sum(-1))
    left = columns < 240
    assert places[0] == pytest.approx((columns[left].mean(), rows[left].mean()), abs=3)
    assert places[1] == pytest.approx((columns[~left].mean(), rows[~left].mean()), abs=3)


def test_the_path_stays_where_the_ball_was_although_the_camera_follows_it():
    """On Run: a place behind the ball moves to the left as the ball, and the camera with it, goes on along x."""
    env = gym.make("SafetyBallRun-v0", render_mode="rgb_array", disable_env_checker=True)
    env.reset(seed=1)
    start, distances = env.unwrapped.position, []
    for _ in range(2):
        for _ in range(40):
            env.step(np.array([1.0, 0.0]))
        env.render()
        here = film.place(env.unwrapped, env.unwrapped.position)
        distances.append(np.hypot(*np.subtract(film.place(env.unwrapped, start), here)))
    assert 20 < distances[0] < distances[1]


def test_a_film_of_two_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = "--env-id SafetyBallCircle-v0 --num-envs 1 --num-steps 256 --total-timesteps 256".split()
    for module, more in ((scpo_continuous, ["--no-compile"]), (baselines.trpo, ["--cost-limit", "3"])):
        scpo_run.run(module.train, module.Args, module.TASK_SETTINGS, [*flags, *more])
    runs = [str(path) for path in sorted((tmp_path / "runs").iterdir())]
    capsys.readouterr()
    shown, original = [], film.header
    monkeypatch.setattr(film, "header", lambda *args: shown.append((args[2].spent, args[3])) or original(*args))
    monkeypatch.setattr(ball_tasks.BallCircle, "x_limit", 0)  # each step costs 1
    film.main([*runs, "--every", "100", "--width", "480", "--out", "film.gif"])
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["SCPO:", "TRPO:"]
    assert [line.split()[-1] for line in said] == ["25", "3"]
    assert shown == [(1, 1), (101, 0), (201, 0), (250, 0)] * 2
    with Image.open("film.gif") as made:
        assert made.n_frames == 4 and made.size == (480, 212)  # after steps 1, 101, 201 and 250

    renamed = torch.load(f"{runs[1]}/last.pt", weights_only=True)
    torch.save({**renamed, "script": "mine.py"}, "renamed.pt")
    copied = shutil.copy(ROOT / "baselines" / "trpo.py", "mine.py")
    film.main(["renamed.pt", "--script", copied, "--every", "250", "--out", "mine.gif"])
    assert capsys.readouterr().out.startswith("mine.py: ")


def test_a_task_that_cannot_draw_itself_gets_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    gym.register("Undrawn-v0", lambda render_mode=None: Toy(), max_episode_steps=20)
    flags = "--env-id Undrawn-v0 --cost-limit 3 --num-envs 2 --num-steps 20 --total-timesteps 40".split()
    flags += ["--critic-minibatches", "1"]
    scpo_run.run(baselines.trpo.train, baselines.trpo.Args, baselines.trpo.TASK_SETTINGS, flags)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        film.main([str(next((tmp_path / "runs").iterdir())), "--out", "film.gif"])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith("reproduce.film: Undrawn-v0 can't be filmed (")
    assert "MUJOCO_GL=egl" in line and line.endswith(": NotImplementedError()")


@pytest.mark.parametrize(
    "words, named",
    [
        ("", "RUN"),
        ("--every 0", "--every"),
        ("--width 1", "--width"),
        ("--out film.mp4", "--out"),
        ("--out none/film.gif", "--out is none/film.gif, but there is no folder none"),
        ("--every y", "--every"),
    ],
)
def test_bad_input_gets_one_line(words, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        film.main(["nowhere", *words.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith(f"reproduce.film: {named}")
    assert not list(tmp_path.iterdir())
