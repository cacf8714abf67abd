"""scpo_run.py: what a run leaves, what resumes it, what ends it; and a short smoke test of each of the seven scripts.

Most of it is tested with `train` below, a generator of a millisecond an iteration. Processes that are killed are forks
of this one: importing torch takes longer than all that they do.
"""

import contextlib
import csv
import errno
import fcntl
import importlib
import io
import json
import math
import multiprocessing
import os
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import scpo_run

ROOT = Path(__file__).parent.parent
SCRIPTS = ["scpo_continuous", "scpo_discrete"]
SCRIPTS += [f"baselines.{name}" for name in ("trpo", "trpo_lagrangian", "cpo", "pcpo", "pdo")]


# A train of our own ---------------------------------------------------------------------------------------------------

TASKS = {"Walk-v0": dict(k=5.0, total_timesteps=80), "any other task": dict(k=7.0)}


@dataclass
class Args:
    env_id: str = "Walk-v0"  # what walks
    seed: int = 1
    total_timesteps: int = 80
    num_envs: int = 2
    num_steps: int = 4
    cost_limit: float = 3.0
    k: float = 2.0  # some power
    target_kl: Optional[float] = None
    save_every: int = 3
    device: str = "cpu"


def during(iteration):
    """Replaced by tests: what happens in an iteration (0: in the set-up), and what it yields instead."""


def train(args, checkpoint=None):
    if args.k < 0:
        raise ValueError(f"--k is {args.k}, but must be 0 or more")
    during(0)
    rng, weights, first = np.random.default_rng(args.seed), torch.zeros(3), 1
    if checkpoint:
        weights, first = checkpoint["agent"]["weights"] + checkpoint["moments"], checkpoint["iteration"] + 1
        rng.bit_generator.state = json.loads(checkpoint["numpy_rng"])

    def checkpoint_after(iteration):
        state = json.dumps(rng.bit_generator.state)
        return dict(iteration=iteration, agent={"weights": weights}, moments=torch.zeros(3), numpy_rng=state)

    yield dict(checkpoint=checkpoint_after(first - 1))
    for iteration in range(first, args.total_timesteps // 8 + 1):
        sampled_from, episodes = {"weights": weights}, []
        for env in range(args.num_envs):
            outcome = {"return": rng.normal(), "cost": float(rng.integers(6)), "length": 4}
            place = dict(iteration=iteration, global_step=8 * iteration, env=env)
            episodes.append({**place, **outcome, "safe": int(outcome["cost"] <= args.cost_limit)})
        weights = weights + torch.tensor(rng.normal(size=3), dtype=torch.float32)
        scalars = {"losses/loss": weights.sum().item(), "policy/KL": np.float32(1 / 3)}
        progress = dict(scalars=scalars, episodes=episodes, sampled_from=sampled_from)
        progress.update(during(iteration) or {})
        yield dict(checkpoint=checkpoint_after(iteration), **progress)


def run(*argv):
    scpo_run.run(train, Args, TASKS, [str(word) for word in argv])


def made(runs_dir, *argv):
    """Runs to the end and returns the run's folder."""
    run("--runs-dir", runs_dir, *argv)
    return only(runs_dir)


def only(runs_dir):
    (folder,) = runs_dir.iterdir()
    return folder


def refused(capsys, function, *argv):
    """Returns the one line that bad input gets."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        function(*argv)
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    return said.err


def rows(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def untimed(path):
    return [{k: v for k, v in row.items() if k not in ("sps", "sampling_sps", "seconds")} for row in rows(path)]


def load(path):
    return torch.load(path, weights_only=True)  # nothing pickled


def logged(folder):
    """(tag, step, value) of all event files."""
    found = []
    for path in folder.glob("events.*"):
        events = EventAccumulator(str(path)).Reload()
        found += [(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    return sorted((tag, step, value) for tag, step, value in found if "SPS" not in tag)


def assert_same_run(one, two):
    """To the last bit, but for the clock."""
    assert untimed(one / "progress.csv") == untimed(two / "progress.csv")
    assert (one / "episodes.csv").read_bytes() == (two / "episodes.csv").read_bytes()
    assert str(logged(one)) == str(logged(two))
    for name in ("last.pt", "best_safe.pt"):
        a, b = load(one / name), load(two / name)
        assert a.keys() == b.keys() and a["iteration"] == b["iteration"] and a["agent"].keys() == b["agent"].keys()
        assert all(torch.equal(a["agent"][key], b["agent"][key]) for key in a["agent"])
    assert load(one / "last.pt")["numpy_rng"] == load(two / "last.pt")["numpy_rng"]


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """A run sets signal handlers and may set a variable. Waiting for the disk would take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment = dict(os.environ)
    torch.set_num_threads(1)  # a fork of a process with threads can hang
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)
    for child in multiprocessing.active_children():  # of a test that failed
        child.kill()


@pytest.fixture
def happens(monkeypatch):
    """happens(iteration, action, ...) makes `action` happen in that iteration; what it returns is yielded."""
    actions = {}
    monkeypatch.setitem(globals(), "during", lambda iteration: actions.get(iteration, lambda: None)())

    def happens(iteration, action):
        actions[iteration] = action

    return happens


def fork(folder, function, *argv):
    """A process that calls the function; `said` tells what it printed."""

    def child():
        sys.stdout, sys.stderr = (open(folder / name, "w", buffering=1) for name in ("stdout", "stderr"))
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stderr.fileno(), 2)
        function(*argv)

    folder.mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process


def ended(process):
    process.join(60)
    if process.exitcode is None:
        process.kill()
        raise AssertionError("it doesn't end")
    return process.exitcode


def until(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


# Flags ----------------------------------------------------------------------------------------------------------------


def read(*argv):
    return scpo_run.read_flags(Args, TASKS, Path(__file__), [str(word) for word in argv])[0]


def test_defaults_are_the_tasks_settings_and_flags_win():
    assert (read().k, read().total_timesteps, read().runs_dir) == (5, 80, "runs")
    assert read("--env-id", "x:Other-v0").k == 7 and read("--env-id", "x:Other-v0").env_id == "x:Other-v0"
    assert read("--env-id", "scpo_envs:Walk-v0").k == read("--env-id", "x:Walk-v0").k == 5  # with a module to import
    assert read("--k", "3").k == 3 and read("--env-id", "Other-v0", "--k", "2").k == 2


def test_help_shows_the_tasks_defaults_and_each_flags_comment(capsys):
    module = importlib.import_module("scpo_continuous")
    with pytest.raises(SystemExit) as stop:
        scpo_run.run(module.train, module.Args, module.TASK_SETTINGS, ["--env-id", "SafetyBallRun-v0", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert stop.value.code == 0
    assert "--k FLOAT power of Q^c in the reward;" in shown and "if surely safe (default: 4)" in shown
    assert "(default: 3276800)" in shown and "folder of a run to go on with" in shown


@pytest.mark.parametrize(
    "argv, says",
    [
        ("--seed x", "--seed: invalid literal for int() with base 10: 'x'"),
        ("--seed", "Missing value for argument '--seed'"),
        ("--colour red", "Unrecognized options: --colour, red"),
        ("--k -1", "--k is -1.0, but must be 0 or more"),
        ("--runs-dir=", "--runs-dir is '', but must be the name of a folder"),
        ("--exp-name=", "--exp-name is '', but must be a name, or left out"),
        ("--min-safe-rate nan", "--min-safe-rate is nan, but must be in [0, 1]"),
        ("--min-safe-rate 80", "--min-safe-rate is 80.0, but must be in [0, 1]"),
        ("--iteration-timeout 0", "--iteration-timeout is 0.0, but must be in [1, 1e6] seconds"),
        ("--iteration-timeout inf", "--iteration-timeout is inf, but must be in [1, 1e6] seconds"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_wrong_flag_gets_one_line(argv, says, encoding, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))  # decides how tyro draws
    line = refused(capsys, run, *argv.split())
    assert line.startswith("test_scpo_run.py: ") and says in line and line.isascii()
    assert not list(tmp_path.iterdir())


# What a run leaves ----------------------------------------------------------------------------------------------------


def test_what_a_run_leaves(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scpo_run, "git_revision", lambda folder: "abc")
    started = int(time.time())
    folder = made(tmp_path, "--seed", "4", "--env-id", "pack.age:ns/Walk-v0")
    env_id, script, seed, second = folder.name.split("__")
    assert (env_id, script, seed) == ("pack.age-ns-Walk-v0", "test_scpo_run", "4")
    assert started <= int(second) <= started + 60
    written = {"config.json", "progress.csv", "episodes.csv", "last.pt", "best_safe.pt"}
    assert {path.name for path in folder.iterdir() if "events" not in path.name} == written

    config = json.loads((folder / "config.json").read_text())
    assert (config["k"], config["seed"], config["min_safe_rate"], config["resume"]) == (7, 4, 0.8, None)
    assert (config["script"], config["revisions"], config["torch"]) == ("test_scpo_run.py", ["abc"], torch.__version__)
    assert (config["python"], config["gymnasium"]) == (sys.version.split()[0], gym.__version__)

    progress, episodes = rows(folder / "progress.csv"), rows(folder / "episodes.csv")
    assert [(x["iteration"], x["global_step"]) for x in progress] == [(str(i), str(8 * i)) for i in range(1, 11)]
    assert list(episodes[0]) == "iteration global_step env return cost length safe".split() and len(episodes) == 20
    assert progress[0]["kl"] == "0.333333" and float(progress[0]["seconds"]) > 0 and int(progress[0]["sps"]) > 0
    for i, row in enumerate(progress):
        returns, costs = (
            [float(episode[name]) for episode in episodes[2 * i : 2 * i + 2]] for name in ("return", "cost")
        )
        assert float(row["episodic_return"]) == pytest.approx(np.mean(returns), rel=1e-4)
        assert float(row["episodic_return_std"]) == pytest.approx(np.std(returns), rel=1e-4)
        assert (
            float(row["episodic_cost"]) == np.mean(costs) and row["episodic_length"] == "4" and row["episodes"] == "2"
        )
        assert float(row["safe_episode_rate"]) == np.mean([cost <= 3 for cost in costs])

    scalars = {(tag.split("/")[1].lower(), step): value for tag, step, value in logged(folder)}
    assert {tag for tag, _, _ in logged(folder)} > {"losses/loss", "policy/KL", "charts/episodic_cost_std"}
    for row in progress:
        for name in ("episodic_return", "episodic_cost", "safe_episode_rate", "loss"):
            assert scalars[name, int(row["global_step"])] == pytest.approx(float(row[name]), rel=1e-5)
    (events,) = folder.glob("events.*")
    text = EventAccumulator(str(events)).Reload().Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0]
    assert b"|param|value|\n|-|-|\n" in text and b"|k|7.0|\n" in text and b"|min_safe_rate|0.8|" in text

    last = load(folder / "last.pt")
    assert (
        last["iteration"] == 10 and last["args"]["env_id"] == "pack.age:ns/Walk-v0" and last["numpy"] == np.__version__
    )
    out, err = capsys.readouterr()
    mean = np.mean([float(row["episodic_return"]) for row in progress[-1:]])
    assert f"Mean of the last 1 iterations: return {mean:.1f}, cost" in out and str(folder) in out
    lines = err.splitlines()
    assert len(lines) == 10 and lines[9].startswith("10/10 return") and lines[9].rstrip().endswith("0 min left")


def test_the_summary_is_of_the_last_tenth_and_of_iterations_with_episodes(tmp_path):
    path = tmp_path / "progress.csv"
    row = "{0},{1},{2},{2},{3}\n"
    head = "iteration,episodes,episodic_return,episodic_cost,safe_episode_rate\n"
    table = [row.format(i, 2, i, i / 100) for i in range(1, 20)] + [row.format(20, 0, "nan", "nan")]
    path.write_text(head + "".join(table))
    assert scpo_run.summary(path, 20) == "Mean of the last 2 iterations: return 18.5, cost 18.50, safe episodes 18.5%"


COSTS = {1: [0, 0, 0, 0, 0], 2: [0, 0, 0, 0, 9], 3: [0, 0, 0, 5, 5], 4: [0, 3.1, 3.1, 3.1, 3.1], 5: [0, 0, 0, 0, 100]}


@pytest.mark.parametrize("rate, best", [(1, 1), (0.8, 2), (0.5, 3), (0, 4)])
def test_best_safe_is_the_best_policy_within_the_limit_by_mean_cost_and_by_share(rate, best, tmp_path, happens):
    """The return rises from iteration to iteration, and so does the cost, until its mean exceeds the limit of 3."""
    for iteration, costs in COSTS.items():
        place = {
            "iteration": iteration,
            "global_step": 8 * iteration,
            "env": 0,
            "return": float(iteration),
            "length": 4,
        }
        episodes = [{**place, "cost": cost, "safe": int(cost <= 3)} for cost in costs]
        happens(iteration, lambda episodes=episodes: {"episodes": episodes})
    kept = load(made(tmp_path, "--min-safe-rate", rate, "--total-timesteps", 40) / "best_safe.pt")
    sampled_from = [progress.get("sampled_from") for progress in train(read())]
    assert kept["iteration"] == best and torch.equal(kept["agent"]["weights"], sampled_from[best]["weights"])


def test_a_policy_that_played_with_another_limit_is_not_kept_as_the_best(tmp_path, happens):
    """The state of --limit-factor's first half is another one than evaluate.py's, so it may act otherwise there."""
    for iteration, played in ((1, {}), (2, {"sampled_from": None})):
        outcome = {"return": float(iteration), "cost": 0.0, "length": 4, "safe": 1}
        episode = dict(iteration=iteration, global_step=8 * iteration, env=0, **outcome)
        happens(iteration, lambda episode=episode, played=played: {"episodes": [episode], **played})
    assert load(made(tmp_path, "--total-timesteps", 16) / "best_safe.pt")["iteration"] == 1


def test_costs_that_add_up_to_the_limit_keep_it(tmp_path, happens):
    """Three costs of 0.1 are 0.30000000000000004."""
    episode = {
        "iteration": 1,
        "global_step": 8,
        "env": 0,
        "return": 1.0,
        "cost": 0.1 + 0.1 + 0.1,
        "length": 3,
        "safe": 1,
    }
    happens(1, lambda: {"episodes": [episode]})
    folder = made(tmp_path, "--cost-limit", 0.3, "--total-timesteps", 8)
    assert load(folder / "best_safe.pt")["iteration"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which file it is")
def test_logs_are_on_the_disk_before_a_checkpoint_names_them_and_it_before_it_takes_its_place(tmp_path, monkeypatch):
    """Otherwise a power cut could leave logs that are shorter than last.pt says, or half of it."""
    done, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    monkeypatch.setattr(os, "replace", lambda *paths: done.append(f"to {paths[1].name}") or replace(*paths))
    folder = made(tmp_path, "--total-timesteps", 8)
    (events,) = (path.name for path in folder.glob("events.*"))
    first, best = [events, "last.partial", "to last.pt"], ["best_safe.partial", "to best_safe.pt"]
    assert done[: len(first)] == first and done[-2:] == first[1:]
    assert set(done[len(first) : -2]) == {"progress.csv", "episodes.csv", events} | (set(best) & set(done))
    sizes = load(folder / "last.pt")["files"]
    assert sizes["progress.csv"] == (folder / "progress.csv").stat().st_size and set(sizes) > {"episodes.csv", events}


def test_two_runs_of_the_same_second_get_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9)
    run("--runs-dir", tmp_path, "--k", "1")
    run("--runs-dir", tmp_path, "--k", "2")
    configs = [json.loads(path.read_text())["k"] for path in sorted(tmp_path.glob("*/config.json"))]
    assert configs == [1, 2]


def test_a_folder_that_can_not_be_written_gets_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "unmounted")
    for name in ("file", "file/below", "gone", "n" * 300):
        line = refused(capsys, run, "--runs-dir", tmp_path / name)
        assert "--runs-dir: can't write there: [Errno" in line and name in line
    if sys.platform == "linux":
        assert "/proc/nowhere" in refused(capsys, run, "--runs-dir", "/proc/nowhere")


def test_a_runs_revision_is_that_of_the_python_files(tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    assert scpo_run.git_revision(scripts) == "unknown"
    for name in ("scripts/copy.py", "env.py", "results.csv"):
        (tmp_path / name).write_text("1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert scpo_run.git_revision(scripts) == "unknown"  # no commit yet
    for command in (["add", "."], ["commit", "-qm", "first"], ["tag", "-am", "one", "v1"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout[:12]
    (tmp_path / "results.csv").write_text("2\n")  # what a campaign writes while it goes on
    assert scpo_run.git_revision(scripts) == commit
    (tmp_path / "env.py").write_text("2\n")  # beside the script's folder
    assert re.fullmatch(commit + "-dirty-[0-9a-f]{12}", scpo_run.git_revision(scripts))


def test_weights_and_biases_gets_what_tensorboard_gets(tmp_path, monkeypatch):
    begun, told = [], []
    tracked = SimpleNamespace(log=lambda *args, step: told.append((*args, step)))
    wandb = SimpleNamespace(login=lambda verify: verify, init=lambda **kwargs: begun.append(kwargs) or tracked)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run("--runs-dir", tmp_path / "runs", "--track", "--wandb-project-name", "p", "--wandb-entity", "e")
    folder = only(tmp_path / "runs")
    assert [begun[0][name] for name in ("id", "project", "entity", "dir")] == [folder.name, "p", "e", folder]
    assert begun[0]["config"]["k"] == 5 and begun[0]["resume"] == "allow"
    sent = [(tag, step, np.float32(value)) for scalars, step in told for tag, value in scalars.items()]
    assert sorted(x for x in sent if "SPS" not in x[0]) == logged(folder) and "charts/SPS" in told[0][0]


@pytest.mark.parametrize("installed", [False, True])
def test_tracking_that_can_not_work_is_refused_before_anything_is_made(installed, tmp_path, monkeypatch, capsys):
    def login(verify):
        raise OSError("no key" if verify else "")  # a key is worth nothing that the server doesn't know

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=login) if installed else None)
    line = refused(capsys, run, "--runs-dir", tmp_path / "runs", "--track")
    assert ("--track: no key (" if installed else "--track: import of wandb halted") in line
    assert "pip install wandb; wandb login, or WANDB_MODE=offline" in line and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_the_real_wandb_without_a_login(mode, tmp_path, monkeypatch):
    """In a process of its own, for wandb keeps its settings and starts others."""
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("WANDB_MODE", mode)

    def tracked():
        run("--runs-dir", tmp_path / "runs", "--track")
        wandb.teardown()

    process = fork(tmp_path / "said", tracked)
    assert ended(process) == (0 if mode == "offline" else 2)
    said = (tmp_path / "said/stderr").read_text()
    if mode == "offline":
        assert list(only(tmp_path / "runs").glob("wandb/offline-run-*/*.wandb")), said
    else:
        assert said.count("\n") == 1 and "--track: " in said and "wandb login" in said
        assert not (tmp_path / "runs").exists()


# Going on -------------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    pass


@contextlib.contextmanager
def crash_at(call):
    """The call-th time that a run touches the disk is its last: it has done half of what it wanted."""
    count = 0

    def crashing(function, half):
        def crash(*args):
            nonlocal count
            count += 1
            if count == call:
                half(*args)
                raise Crash
            return function(*args)

        return crash

    def half_a_row(path, rows):
        with open(path, "a") as file:
            file.write("1,8,0.1")

    def half_a_file(content, file):
        file.write(b"PK")

    def nothing(*args):
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scpo_run, "append_rows", crashing(scpo_run.append_rows, half_a_row))
        patch.setattr(torch, "save", crashing(torch.save, half_a_file))
        patch.setattr(os, "replace", crashing(os.replace, nothing))
        patch.setattr(os, "truncate", crashing(os.truncate, nothing))
        yield


def test_a_run_that_crashes_anywhere_resumes_to_the_last_bit(tmp_path):
    """Wherever it touches the disk, and once more, a little later, when it is resumed."""
    size = ["--total-timesteps", 40, "--save-every", 2]
    whole = made(tmp_path / "whole", *size)
    for call in range(1, 100):
        runs_dir = tmp_path / str(call)
        try:
            with crash_at(call):
                run("--runs-dir", runs_dir, *size)
            break
        except Crash:
            folder = only(runs_dir)
        if not (folder / "last.pt").exists():
            continue
        with contextlib.suppress(Crash), crash_at(1 + call % 8):
            run("--resume", folder)
        if load(folder / "last.pt")["iteration"] < 5:
            run("--resume", folder)
        assert_same_run(whole, folder)
    assert call > 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_iteration_end_and_saves(number, tmp_path, happens, capsys):
    happens(4, lambda: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as stop:
        run("--runs-dir", tmp_path)
    folder = only(tmp_path)
    assert stop.value.code == 128 + number
    assert f"Stopped after iteration 4 of 10; go on with --resume {folder}" in capsys.readouterr().out
    assert load(folder / "last.pt")["iteration"] == 4 == len(rows(folder / "progress.csv"))
    happens(4, lambda: None)
    run("--resume", folder)
    assert [int(row["iteration"]) for row in rows(folder / "progress.csv")] == list(range(1, 11))
    assert [step for tag, step, _ in logged(folder) if tag == "losses/loss"] == list(range(8, 81, 8))


def test_a_signal_in_the_last_iteration_changes_nothing(tmp_path, happens):
    happens(10, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert load(made(tmp_path) / "last.pt")["iteration"] == 10


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_that_hangs(first, number, tmp_path, happens):
    happens(4, lambda: [os.kill(os.getpid(), first), (tmp_path / "hangs").touch(), time.sleep(1000)])
    process = fork(tmp_path / "said", run, "--runs-dir", tmp_path / "runs")
    until((tmp_path / "hangs").exists)
    assert process.is_alive()
    os.kill(process.pid, number)
    assert ended(process) == -number
    assert load(only(tmp_path / "runs") / "last.pt")["iteration"] == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_set_up_ends_the_process(number, tmp_path, happens):
    happens(0, lambda: [(tmp_path / "hangs").touch(), time.sleep(1000)])
    process = fork(tmp_path / "said", run, "--runs-dir", tmp_path / "runs")
    until((tmp_path / "hangs").exists)
    os.kill(process.pid, number)
    assert ended(process) == -number  # a shell's status 130 and 143
    assert (tmp_path / "said/stderr").read_text() == "" and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", ["scpo_continuous", "baselines.trpo_lagrangian"])
def test_killed_at_ten_random_moments_it_is_still_the_same_run(script, tmp_path):
    size = dict(task="Slow", iterations=20, save_every=3)
    whole = fork(tmp_path / "said whole", run_script, script, *flags(script, tmp_path / "whole", **size))
    moments, argv = random.Random(script), flags(script, tmp_path / "killed", **size)
    kills = 0
    while kills < 10:
        process = fork(tmp_path / "said", run_script, script, *argv)
        until(lambda: list((tmp_path / "killed").glob("*/last.pt")))
        process.join(moments.uniform(0.02, 0.4))
        if process.exitcode is not None:  # it was faster
            break
        process.kill()
        ended(process)
        kills += 1
        argv = ["--resume", only(tmp_path / "killed")]
    assert kills >= 3
    if process.exitcode != 0:
        assert ended(fork(tmp_path / "said", run_script, script, *argv)) == 0
    assert ended(whole) == 0
    assert_same_run(only(tmp_path / "whole"), only(tmp_path / "killed"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return made(tmp_path_factory.mktemp("finished"))


def test_a_complete_run_can_be_made_longer_by_another_revision(tmp_path, monkeypatch, happens):
    happens(1, lambda: time.sleep(0.1))
    runs_dir = tmp_path / "runs"
    for revision, total, done in (("a", 24, 3), ("b", 40, 5), ("b", 56, 7)):
        monkeypatch.setattr(scpo_run, "git_revision", lambda folder, revision=revision: revision)
        found = ["--resume", only(runs_dir)] if done > 3 else ["--runs-dir", runs_dir]
        run(*found, "--total-timesteps", total)
        config = json.loads((only(runs_dir) / "config.json").read_text())
        assert config["total_timesteps"] == total and load(only(runs_dir) / "last.pt")["iteration"] == done
        assert config["revisions"] == load(only(runs_dir) / "last.pt")["revisions"] == ["a", "b"][: 1 + (done > 3)]
    seconds = [float(row["seconds"]) for row in rows(only(runs_dir) / "progress.csv")]
    assert seconds == sorted(seconds) and seconds[0] > 0.1  # the clock goes on too
    assert_same_run(only(runs_dir), made(tmp_path / "whole", "--total-timesteps", 56))


@pytest.mark.parametrize(
    "argv, says",
    [
        ("--k 5", None),  # the run's own
        ("--k 5.0 --seed 1 --save-every 3", None),
        ("--device other --iteration-timeout 7 --wandb-entity e", None),  # the process's own
        ("--k 2", "--k is 2.0, but must be 5.0, as in the run to go on with"),  # the default of Args, but not the run's
        ("--k 7", "--k is 7.0, but must be 5.0"),
        ("--num-envs 16", "--num-envs is 16, but must be 2"),
        ("--target-kl 0.1", "--target-kl is 0.1, but must be None"),
        ("--env-id Other-v0", "--env-id is 'Other-v0', but must be 'Walk-v0'"),
        ("--save-every 0", "--save-every is 0, but must be 3"),
        ("--min-safe-rate 0.5", "--min-safe-rate is 0.5, but must be 0.8"),
        ("--runs-dir elsewhere", "--runs-dir is 'elsewhere', but must be "),
        ("--total-timesteps 80", "--total-timesteps is 80, but must be 88 or more, to go beyond what is done"),
        ("--total-timesteps 0", "--total-timesteps is 0, but must be 88 or more"),
    ],
)
def test_what_resume_accepts(argv, says, finished, tmp_path, capsys):
    folder = shutil.copytree(finished, tmp_path / "run")
    argv = argv.split()
    argv += [] if "--total-timesteps" in argv else ["--total-timesteps", "96"]
    if says:
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert says in refused(capsys, run, "--resume", folder, *argv)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    else:
        (folder / "mine.csv").write_text("of the user's\n")
        run("--resume", folder, *argv)
        assert len(rows(folder / "progress.csv")) == 12
        assert (folder / "mine.csv").read_text() == "of the user's\n"


def spoil(path, what):
    whole = path.read_bytes()
    content = load(path)
    path.unlink()
    if what == "half":
        path.write_bytes(whole[: len(whole) // 2])
    elif what == "text":
        path.write_text("weights")
    elif what == "folder":
        path.mkdir()
    elif what == "pickled":
        torch.save({"script": Path("x")}, path)
    elif what == "list":
        torch.save([1, 2], path)
    elif what.startswith("no "):
        del content[what[3:]]
        torch.save(content, path)
    elif what == "older":
        del content["args"]["k"]
        torch.save(content, path)
    elif what == "other":
        torch.save(dict(content, script="cpo.py"), path)
    elif what == "wider":
        torch.save(dict(content, agent={"weights": torch.zeros(4)}), path)


LACKING = [f"no {name}" for name in scpo_run.SAVED]


@pytest.mark.parametrize(
    "what, says",
    [
        *[(what, "the folder of a run, with a last.pt in it") for what in ("gone", "folder")],
        *[(what, "is truncated or not a checkpoint of ours") for what in ("half", "text", "pickled", "list", *LACKING)],
        ("no moments", "last.pt lacks a part or doesn't fit (KeyError('moments'))"),
        ("no numpy_rng", "last.pt lacks a part or doesn't fit (KeyError('numpy_rng'))"),
        ("wider", "last.pt lacks a part or doesn't fit (RuntimeError("),
        ("older", "must be one of this version: k was added or removed"),
        ("other", "must be a run of test_scpo_run.py; this is one of cpo.py"),
    ],
)
def test_what_can_not_be_resumed_gets_one_line(what, says, finished, tmp_path, capsys):
    folder = shutil.copytree(finished, tmp_path / "run")
    spoil(folder / "last.pt", what)
    before = {path.name: path.is_file() and path.read_bytes() for path in folder.iterdir()}
    line = refused(capsys, run, "--resume", folder, "--total-timesteps", 96)
    assert "--resume" in line and says in line and str(folder) in line
    assert {path.name: path.is_file() and path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["progress.csv", "episodes.csv"])
def test_a_log_that_has_lost_rows_is_not_continued(name, finished, tmp_path, capsys):
    """Neither with a gap nor with the zeros that a file grows by where it is cut beyond its end."""
    folder = shutil.copytree(finished, tmp_path / "run")
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-10])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    line = refused(capsys, run, "--resume", folder, "--total-timesteps", 96)
    assert "--resume is" in line and "CSVs still have all rows" in line
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / name).unlink()
    line = refused(capsys, run, "--resume", folder, "--total-timesteps", 96)
    assert "--resume" in line and f"No such file or directory: '{folder / name}'" in line


def test_resume_of_an_unset_variable_is_no_new_run(finished, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(shutil.copytree(finished, tmp_path / "run"))
    for name in ("", "nowhere", "last.pt", "n" * 300):
        line = refused(capsys, run, "--resume", name, "--total-timesteps", 96)
        assert f"--resume is {name!r}, but must be the folder of a run" in line
    run("--resume", ".", "--total-timesteps", 96)
    assert len(rows(Path("progress.csv"))) == 12


@pytest.mark.parametrize("nfs", [False, True])
def test_one_process_a_folder(nfs, tmp_path, happens, monkeypatch, capsys):
    """Also over NFS, where flock is a lock by fcntl, which needs a file opened for writing."""
    if nfs:
        monkeypatch.setattr(fcntl, "flock", fcntl.lockf)
    happens(6, lambda: [(tmp_path / "waits").touch(), until((tmp_path / "go on").exists), None][-1])
    first = fork(tmp_path / "said", run, "--runs-dir", tmp_path / "runs")
    until((tmp_path / "waits").exists)
    folder = only(tmp_path / "runs")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "another process is at work on that run" in refused(capsys, run, "--resume", folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: after[name][: len(content)] for name, content in before.items()} == before  # events may still come
    (tmp_path / "go on").touch()
    assert ended(first) == 0 and len(rows(folder / "progress.csv")) == 10
    run("--resume", folder, "--total-timesteps", 96)  # now it is free


# Faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iteration", [0, 5])
def test_what_hangs_is_shown_and_ended(iteration, tmp_path, happens):
    """Also in C code, where no Python handler runs. The set-up counts as a part of the first iteration."""

    def the_robot_hangs():
        lock = multiprocessing.get_context("fork").Lock()
        lock.acquire()
        lock.acquire()

    happens(iteration, the_robot_hangs)
    process = fork(tmp_path / "said", run, "--runs-dir", tmp_path / "runs", "--iteration-timeout", 1)
    assert ended(process) == 1
    said = (tmp_path / "said/stderr").read_text()
    assert "Timeout (0:00:01)!" in said and "in the_robot_hangs" in said
    if iteration:
        assert load(only(tmp_path / "runs") / "last.pt")["iteration"] == 3


def test_the_clock_starts_anew_in_each_iteration_and_stops_with_the_run(tmp_path, happens):
    for iteration in (2, 3, 4):
        happens(iteration, lambda: time.sleep(0.5))

    def two_runs():
        made(tmp_path / "runs", "--iteration-timeout", 1)
        with pytest.raises(SystemExit):
            run("--iteration-timeout", 1, "--k", -1)
        time.sleep(1.2)

    assert ended(fork(tmp_path / "said", two_runs)) == 0


def test_a_crash_shows_where_and_leaves_what_was_saved(tmp_path, happens):
    def the_motor_is_off():
        raise ValueError("volts")

    happens(5, the_motor_is_off)
    with pytest.raises(ValueError, match="volts"):  # with its traceback, not as bad input
        run("--runs-dir", tmp_path / "runs")
    folder = only(tmp_path / "runs")
    assert load(folder / "last.pt")["iteration"] == 3 and len(rows(folder / "progress.csv")) == 4
    happens(5, lambda: None)
    run("--resume", folder)
    assert_same_run(folder, made(tmp_path / "whole"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_scalar_that_is_not_finite_ends_the_run(value, tmp_path, happens):
    happens(5, lambda: {"scalars": {"losses/loss": value}})
    with pytest.raises(SystemExit, match="losses/loss is NaN or infinite in iteration 5; what was logged and saved in"):
        run("--runs-dir", tmp_path)
    assert len(rows(only(tmp_path) / "progress.csv")) == 4 and load(only(tmp_path) / "last.pt")["iteration"] == 3


@pytest.mark.parametrize(
    "save_every, first, ends",
    [(3, 1, 3), (3, 5, 9), (0, 1, 10), (20, 1, 10), (3, 7, 9), (0, 5, None), (20, 5, None), (3, 8, None)],
)
def test_a_task_whose_episodes_do_not_end_is_named(save_every, first, ends, tmp_path, happens):
    """Between two checkpoints at least one must end."""
    for iteration in range(first, 11 if ends else 10):
        happens(iteration, lambda: {"episodes": []})
    if ends is None:
        assert rows(made(tmp_path, "--save-every", save_every) / "progress.csv")[8 - 1]["episodic_cost"] == "nan"
        return
    with pytest.raises(SystemExit, match=f"no episode has ended by iteration {ends}; the task needs a time limit"):
        run("--runs-dir", tmp_path, "--save-every", save_every)


def test_a_stretch_too_short_for_an_episode_is_saved(tmp_path, happens):
    """The last one of ten iterations, saved every three, and the one that is left after a signal and --resume."""
    for iteration in (9, 10):
        happens(iteration, lambda: {"episodes": []})
    happens(8, lambda: os.kill(os.getpid(), signal.SIGTERM) or {})
    with pytest.raises(SystemExit) as stop:
        run("--runs-dir", tmp_path, "--save-every", 3)
    assert stop.value.code == 143 and load(only(tmp_path) / "last.pt")["iteration"] == 8
    run("--resume", only(tmp_path))
    assert load(only(tmp_path) / "last.pt")["iteration"] == 10 and len(rows(only(tmp_path) / "progress.csv")) == 10


@pytest.mark.parametrize("signalled", [8, 10])
def test_a_run_in_which_no_episode_ended_is_named_though_a_signal_came_between(signalled, tmp_path, happens):
    """After iteration 8 each stretch to a checkpoint is too short to tell. The whole run isn't."""
    for iteration in range(1, 11):
        happens(iteration, lambda: {"episodes": []})
    happens(signalled, lambda: os.kill(os.getpid(), signal.SIGTERM) or {"episodes": []})
    with pytest.raises(SystemExit) as stop:
        run("--runs-dir", tmp_path, "--save-every", 20)
    if signalled == 8:
        assert stop.value.code == 143
        with pytest.raises(SystemExit) as stop:
            run("--resume", only(tmp_path))
    assert "no episode has ended by iteration 10; the task needs a time limit" in stop.value.code


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, happens):
    def on_a_small_disk():
        try:
            run("--runs-dir", tmp_path / "runs")
        except OSError as error:
            os._exit(error.errno)

    happens(5, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)))  # the kernel refuses every further byte
    assert ended(fork(tmp_path / "said", on_a_small_disk)) == errno.EFBIG
    happens(5, lambda: None)
    config = only(tmp_path / "runs") / "config.json"
    before = config.read_text()

    def resume_on_a_small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        run("--resume", only(tmp_path / "runs"))

    assert ended(fork(tmp_path / "said", resume_on_a_small_disk)) == 2 and config.read_text() == before
    run("--resume", only(tmp_path / "runs"))
    assert_same_run(only(tmp_path / "runs"), made(tmp_path / "whole"))


def test_a_reader_who_goes_away_does_not_end_the_run(tmp_path):
    """As in `2>&1 | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)

    def unread():
        os.dup2(writer, 1), os.dup2(writer, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        run("--runs-dir", tmp_path / "runs")

    assert ended(fork(tmp_path / "said", unread)) == 0
    assert load(only(tmp_path / "runs") / "last.pt")["iteration"] == 10


def test_an_accent_that_can_not_be_shown_does_not_end_the_run(tmp_path, monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    run("--runs-dir", tmp_path / "é")
    assert b"/\\xe9/" in shown.buffer.getvalue()


def test_on_a_terminal_the_progress_stays_in_one_line_of_80_columns(tmp_path, happens, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    episode = {"iteration": 1, "global_step": 8, "env": 0, "return": -1e9 / 3, "cost": 1e9, "length": 3, "safe": 1}
    happens(2, lambda: {"episodes": [episode]})
    run("--runs-dir", tmp_path, "--total-timesteps", 8 * 20)
    lines = terminal.getvalue().split("\r")
    assert len(lines) == 21 and lines[-1] == "" and {len(line) for line in lines[:-1]} == {79}
    assert "2/20 return -333333333.3, cost 1000000000.00, safe 100%" in lines[1]


@pytest.mark.parametrize("place", ["file/cache", "cache"])
def test_a_cache_folder_that_can_not_be_made_is_replaced(place, tmp_path, monkeypatch, capsys):
    """torch makes the folder even for what isn't compiled."""
    (tmp_path / "file").touch()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / place)
    made(tmp_path / "runs")
    assert os.path.isdir(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert ("TORCHINDUCTOR_CACHE_DIR can't be used: [Errno 20]" in capsys.readouterr().err) == (place == "file/cache")


def test_torch_compiles_though_the_cache_folder_has_a_space(tmp_path, monkeypatch):
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "a b"), TORCHINDUCTOR_COMPILE_THREADS="1")
    for name in ("avx2", "avx512", "amx_tile"):  # each is tried by a compilation of its own
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda: False, raising=False)

    def train_and_compile():
        run("--runs-dir", tmp_path / "runs")
        double = torch.compile(lambda x: 2 * x, options={"cpp_cache_precompile_headers": False})
        assert double(torch.ones(3)).tolist() == [2, 2, 2]

    process = fork(tmp_path / "said", train_and_compile)
    status, said = ended(process), (tmp_path / "said/stderr").read_text()
    assert status == 0 and "TORCHINDUCTOR_CACHE_DIR can't be used: torch hands" in said, said


# The seven scripts ----------------------------------------------------------------------------------------------------


def run_script(script, *argv):
    module = importlib.import_module(script)
    scpo_run.run(module.train, module.Args, module.TASK_SETTINGS, [str(word) for word in argv])


def flags(script, runs_dir=None, task="", iterations=5, save_every=2, cost_limit=3):
    choice = "Choice" if "discrete" in script else ""
    size = f"--num-envs 2 --num-steps 64 --total-timesteps {128 * iterations} --save-every {save_every}"
    size += " --minibatch-size 32 --no-compile" if "scpo" in script else " --critic-minibatches 4"
    given = f"--env-id toy_env:Toy{choice}{task}-v0 --cost-limit {cost_limit} {size}".split()
    return [*given, "--runs-dir", runs_dir] if runs_dir else given


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_an_observation_of_reset_that_is_nan_is_told(script, tmp_path):
    """The largest of three NaN is the first, so with choices the actions don't show it."""
    task = "Lost" if script == "scpo_discrete" else "ChoiceLost"
    with pytest.raises(SystemExit, match="the observation is NaN or infinite in iteration 3"):
        run_script(script, *flags(script, tmp_path, task))


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_trains_and_resumes_after_a_crash_to_the_last_bit(script, tmp_path, capsys):
    run_script(script, *flags(script, tmp_path / "whole"))
    with pytest.raises(Crash), crash_at(13):  # in iteration 3 or 4
        run_script(script, *flags(script, tmp_path / "crashed"))
    assert load(only(tmp_path / "crashed") / "last.pt")["iteration"] == 2
    run_script(script, "--resume", only(tmp_path / "crashed"))
    assert_same_run(only(tmp_path / "whole"), only(tmp_path / "crashed"))
    assert load(only(tmp_path / "whole") / "last.pt")["script"] == f"{script.split('.')[-1]}.py"


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_named_task_sets_what_its_script_sets_by_task(script):
    """Else a task of the paper would silently have Args' default, which is for any other task."""
    module = importlib.import_module(script)
    tasks = {
        task: {*x} for task, x in module.TASK_SETTINGS.items() if task != "any other task" and "--fast" not in task
    }
    assert len({frozenset(names) for names in tasks.values()}) == 1 and module.Args().env_id in tasks
    assert {"cost_limit", "total_timesteps"} < tasks[module.Args().env_id] and module.Args().cost_limit is None
    with pytest.raises(ValueError, match="--cost-limit is needed"):
        next(module.train(module.Args()))


@pytest.mark.parametrize(
    "given, taken",
    [
        ("SafetyPointGoal1-v0: Environment doesn't exist", "SafetyPointGoal1"),
        ("safety_gymnasium:SafetyCarRun0Gymnasium-v0: mutable default", "SafetyCarRun0"),
        ("scpo_envs.safety_gymnasium:SafetyPointGoal1-v0: reset must return obs, info", "SafetyPointGoal1"),
        ("safety_gymnasium:SafetyPointGoal1Gymnasium-v0: No module named 'safety_gymnasium'", "SafetyPointGoal1"),
        ("scpo_envs.safety_gymnasium:SafetyNoGymnasium-v0: doesn't exist", None),
        ("my_task:MySafetyTask-v0: reset must return obs, info", None),
        ("SafetyMine-v0: --cost-limit is needed", None),
        ("SafetyBallRun-v0: doesn't exist", None),
    ],
)
def test_an_id_of_safety_gymnasium_that_fails_names_the_right_one(given, taken):
    hint = f"; if it is one of Safety-Gymnasium, take scpo_envs.safety_gymnasium:{taken}Gymnasium-v0 (docs/field.md)"
    hint = hint if taken else ""
    assert re.sub(scpo_run.WRONG_ID, scpo_run.RIGHT_ID, f"--env-id {given}") == f"--env-id {given}{hint}"


@pytest.mark.parametrize("script", [script for script in SCRIPTS if "discrete" not in script])
def test_bounds_as_large_as_a_float32_are_none(script):
    high = np.array([np.finfo(np.float32).max, 200, np.inf], dtype=np.float32)
    agent = importlib.import_module(script).Agent(4, gym.spaces.Box(-high, high))
    assert agent.to_env(np.array([[0.5, 0.5, 0.5]])).tolist() == [[0.5, 100, 0.5]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("script", [script for script in SCRIPTS if "discrete" not in script])
def test_actions_have_the_precision_of_their_space(script, dtype):
    space = gym.spaces.Box(-0.1, 3, (2,), dtype)
    agent = importlib.import_module(script).Agent(4, space)
    for action in agent.to_env(np.array([[-2.0, 0.7], [0.1, 2.0]], dtype=np.float32)):
        assert action.dtype == dtype and space.contains(action)


@pytest.mark.parametrize("script", SCRIPTS)
def test_copied_alone_into_an_empty_folder_it_trains_prints_and_logs(script, tmp_path):
    copy = tmp_path / "renamed.py"
    shutil.copy(ROOT / f"{script.replace('.', '/')}.py", copy)

    def alone():
        os.chdir(tmp_path)
        sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
        sys.modules.update(scpo_run=None, scpo_envs=None)  # can't be imported
        sys.argv = [str(copy), *flags(script, iterations=3)]
        runpy.run_path(str(copy), run_name="__main__")

    assert ended(fork(tmp_path / "said", alone)) == 0, (tmp_path / "said/stderr").read_text()
    notice, *lines = (tmp_path / "said/stdout").read_text().splitlines()
    assert notice.startswith("There is no scpo_run.py")
    assert [line.split()[0] for line in lines] == ["0", "128", "256", "384"]
    assert all("episodic_return " in line and "episodic_cost " in line for line in lines[1:])
    assert only(tmp_path / "runs").name.split("__")[1:3] == ["renamed.py", "1"]
    tags = {tag for tag, step, _ in logged(only(tmp_path / "runs")) if step == 384}
    assert {f"charts/episodic_{name}" for name in ("return", "cost", "safe")} | {"losses/value_loss"} <= tags
    events = EventAccumulator(str(only(tmp_path / "runs")))
    events.Reload()
    (text,) = events.Tensors("hyperparameters/text_summary")
    assert '"cost_limit": ' in text.tensor_proto.string_val[0].decode()


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_no_script_can_train_gets_one_line(script, tmp_path, capsys):
    argv = flags(script, tmp_path / "runs")
    for more, says in (
        (
            ["--save-every", 1, "--num-steps", 16, "--num-envs", 8],
            "--save-every must give each environment at least 20",
        ),
        (
            ["--total-timesteps", 128, "--num-steps", 16, "--num-envs", 8],
            "--total-timesteps must give each environment",
        ),
        *(
            (["--env-id", flags(script, task=task)[1]], "reset must return obs, info; step obs, reward, terminated")
            for task in ("Six", "Old", "Unbuilt")
        ),
        (["--env-id", "SafetyNowhere1-v0"], "take scpo_envs.safety_gymnasium:SafetyNowhere1Gymnasium-v0"),
        (["--env-id", "SafetyNowhere1Gymnasium-v0"], "take scpo_envs.safety_gymnasium:SafetyNowhere1Gymnasium-v0"),
        (["--env-id", "toy_env:ToyNoCost-v0"], "actions must be" if "discrete" in script else 'info["cost"] is None'),
        (["--env-id", "toy_env:ToyIntegers-v0"], "actions must be"),
        (["--env-id", "toy_env:ToyBools-v0"], "actions must be"),
        (["--env-id", "toy_env:ToyEmpty-v0"], "actions must be"),
        (["--env-id", flags(script, task="Bug")[1]], "Bug-v0: KeyError('speed')"),
        (["--env-id", "Nowhere-v0"], "--env-id Nowhere-v0"),
        (["--num-envs", 1025], "--num-envs is 1025, but must be in [1, 1024]"),
        (
            ["--num-steps", 5000001],
            "--num-steps is 5000001, but must be 1 or more, with num-envs x num-steps at most 1e7",
        ),
    ):
        assert says in refused(capsys, run_script, script, *argv, *more)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_without_the_file_of_workers_is_refused_them(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "scpo_workers", None)
    said = refused(capsys, run_script, script, *flags(script, tmp_path), "--num-workers", 2)
    assert "scpo_workers" in said


def test_a_large_return_keeps_its_digits(tmp_path):
    values = 1234567.89, -0.123456789, np.nan, 12345678, np.float64(-1e7), -123456.7, np.float32(1)
    scpo_run.append_rows(tmp_path / "rows.csv", [dict(zip("abcdefg", values))])
    said = "a,b,c,d,e,f,g\n1234568,-0.123457,nan,12345678,-10000000,-123457,1\n"
    assert (tmp_path / "rows.csv").read_text() == said


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_task_without_a_time_limit_is_named(script, tmp_path):
    with pytest.raises(SystemExit, match="no episode has ended by iteration 2; the task needs a time limit"):
        run_script(script, *flags(script, tmp_path, task="Endless"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_three_costs_of_a_tenth_keep_a_limit_of_three_tenths(script, tmp_path):
    run_script(script, *flags(script, tmp_path, task="Tenth", iterations=1, cost_limit=0.3))
    assert {(row["cost"], row["safe"]) for row in rows(only(tmp_path) / "episodes.csv")} == {("0.3", "1")}
    assert (only(tmp_path) / "best_safe.pt").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_noise_that_a_task_draws_from_its_action_space_is_the_seeds(script):
    module = importlib.import_module(script)
    envs = [module.make_env(flags(script, task="Noise")[1], 3, True) for _ in range(3)]
    drawn = []
    for env, seed in zip(envs, (1, 2, 1)):
        env.reset(seed=seed)
        drawn.append([float(env.step(env.action_space.sample() * 0)[0][1]) for _ in range(8)])
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("script", SCRIPTS[:1] + SCRIPTS[2:])
def test_actions_are_scaled_to_a_box_far_from_0(script):
    space = gym.spaces.Box(np.array([100, -np.inf, -1]), np.array([200, 0, 1]), (3,), np.float32)
    agent = importlib.import_module(script).Agent(2, space)
    actions = np.array([[-1, -1, -1], [0, 0, 0], [0.5, 0.5, 0.5], [1, 1, 1], [9, 9, 9]], dtype=np.float32)
    expected = [[100, -1, -1], [150, 0, 0], [175, 0, 0.5], [200, 0, 1], [200, 0, 1]]
    assert agent.to_env(actions).tolist() == expected


@pytest.mark.parametrize("script", ["scpo_continuous", "scpo_discrete"])
def test_without_a_compiler_it_goes_on_and_says_why(script, monkeypatch, capsys):
    def compile(*args, **kwargs):
        raise OSError("in the compiler:\n  bench.cpp:1: error: 'c' is not a language\n  2 errors")

    monkeypatch.setattr(torch, "compile", compile)
    assert importlib.import_module(script).compiled(max, 1, 2) is max
    said = capsys.readouterr().err
    assert "Going on without torch.compile" in said and "error: 'c' is not a language)" in said


def test_a_command_line_in_a_hostile_place(tmp_path):
    """A real process: called by a link, output unread, cache folder unusable, an accent and a space in the path."""
    runs_dir, link = tmp_path / "é è", tmp_path / "train.py"
    link.symlink_to(ROOT / "scpo_continuous.py")
    (tmp_path / "file").touch()
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", PYTHONIOENCODING="ascii", OMP_NUM_THREADS="1")
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "file/cache")
    argv = [sys.executable, str(link), *flags("scpo_continuous", str(runs_dir), iterations=2)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    process.stdout.close()
    said = process.stderr.read().decode()
    assert process.wait(60) == 0, said
    assert "TORCHINDUCTOR_CACHE_DIR can't be used" in said and "Traceback" not in said and "Exception" not in said
    assert load(only(runs_dir) / "last.pt")["script"] == "scpo_continuous.py"
    run_script("scpo_continuous", "--resume", only(runs_dir), "--total-timesteps", 384)
