"""Runs of all seven scripts that are killed, stopped, resumed, or that meet a fault: what they leave and what they say."""

import csv
import importlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
FLAGS = {"scpo_continuous": "--num-steps 64 --num-envs 2 --minibatch-size 32 --no-compile", "scpo_discrete": None}
FLAGS["scpo_discrete"] = FLAGS["scpo_continuous"]
for name in ("trpo", "trpo_lagrangian", "cpo", "pcpo", "pdo"):
    FLAGS[f"baselines/{name}"] = "--num-steps 64 --num-envs 2 --critic-minibatches 4"
SCRIPTS = list(FLAGS)


def flags(script, runs_dir, task="", iterations=8, save_every=2, more=()):
    choice = "Choice" if "discrete" in script else ""
    given = f"{FLAGS[script]} --cost-limit 3 --env-id toy_env:Toy{choice}{task}-v0 --save-every {save_every}"
    return [*given.split(), "--total-timesteps", str(128 * iterations), "--runs-dir", str(runs_dir), *more]


def run(script, argv):
    """Trains in this process."""
    module = importlib.import_module(script.replace("/", "."))
    module.main(module.parse_args([str(flag) for flag in argv]))


def start(script, argv, **kwargs):
    """A process of its own."""
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", OMP_NUM_THREADS="1", **kwargs)
    command = [sys.executable, str(ROOT / f"{script}.py"), *map(str, argv)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def only(folder):
    (run_dir,) = folder.iterdir()
    return run_dir


def rows(path):
    with open(path) as file:
        return [{k: v for k, v in row.items() if k not in ("sps", "sampling_sps", "seconds")} for row in csv.DictReader(file)]


def logged(run_dir):
    """(tag, step, value) of all event files, in the order of files."""
    found = []
    for path in sorted(run_dir.glob("events.*")):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            found += [(tag, event.step, event.value) for event in events.Scalars(tag) if "SPS" not in tag]
    return sorted(found)


def assert_same_run(one, two):
    assert rows(one / "progress.csv") == rows(two / "progress.csv")
    assert rows(one / "episodes.csv") == rows(two / "episodes.csv")
    assert logged(one) == logged(two)
    for name in ("last.pt", "best_safe.pt"):
        a, b = (torch.load(folder / name, weights_only=True) for folder in (one, two))
        assert a["iteration"] == b["iteration"] and a["agent"].keys() == b["agent"].keys()
        assert all(torch.equal(a["agent"][key], b["agent"][key]) for key in a["agent"])
    assert not list(one.glob("*.partial")) and not list(two.glob("*.partial"))


class Crash(BaseException):
    pass


# Going on --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(script, tmp_path, monkeypatch):
    """To the last bit, wherever it stopped: in the first iteration, within a checkpoint's writing, between two checkpoints."""
    run(script, flags(script, tmp_path / "whole"))
    module = importlib.import_module(script.replace("/", "."))
    for place, function, calls in (
        ("in the logs of iteration 1", "append_rows", 1),
        ("in the logs of iteration 6", "append_rows", 12),
        ("while iteration 4's checkpoint is written", "os.replace", 6),
    ):
        folder = tmp_path / place
        count = 0
        owner = os if function == "os.replace" else module
        original = getattr(owner, function.split(".")[-1])

        def crash(*args, calls=calls, original=original):
            nonlocal count
            count += 1
            if count == calls:
                raise Crash
            return original(*args)

        locks = []
        begin = module.start_run
        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(owner, function.split(".")[-1], crash)
            patch.setattr(module, "start_run", lambda *args, begin=begin, locks=locks: locks.append(begin(*args)) or locks[0])
            run(script, flags(script, folder))
        locks[0][1].close()  # as the end of a process would
        run(script, ["--resume", only(folder)])
        for leftover in only(folder).glob("*.partial"):
            leftover.unlink()
        assert_same_run(only(tmp_path / "whole"), only(folder))


@pytest.mark.parametrize("script", ["scpo_continuous", "baselines/trpo_lagrangian"])
def test_killed_at_ten_random_moments_it_is_still_the_same_run(script, tmp_path):
    longer = dict(task="Slow", iterations=40, save_every=3)
    whole = start(script, flags(script, tmp_path / "whole", **longer))
    moments = random.Random(script)
    process = start(script, flags(script, tmp_path / "killed", **longer))
    kills = 0
    while kills < 10:
        for _ in range(1200):
            saved = list((tmp_path / "killed").glob("*/last.pt"))
            if saved and (kills == 0 or process.stderr.readline()):
                break
            time.sleep(0.05)
        time.sleep(moments.uniform(0, 0.8))
        process.kill()
        process.communicate()
        kills += 1
        process = start(script, ["--resume", only(tmp_path / "killed")])
    out, err = process.communicate(timeout=300)
    assert process.returncode in (0, 2), err  # 2: it was complete when it was killed
    assert process.returncode == 0 or "is complete" in err
    whole.communicate(timeout=300)
    assert whole.returncode == 0
    for leftover in only(tmp_path / "killed").glob("*.partial"):
        leftover.unlink()
    assert_same_run(only(tmp_path / "whole"), only(tmp_path / "killed"))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_before_it_ends_the_run(script, number, tmp_path):
    process = start(script, flags(script, tmp_path, task="Slow", iterations=1000, save_every=0))
    wait_for_rows(tmp_path, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in err
    last = torch.load(only(tmp_path) / "last.pt", weights_only=True)
    progress = rows(only(tmp_path) / "progress.csv")
    assert f"Stopped after iteration {last['iteration']} of 1000; go on with --resume {only(tmp_path)}" in out
    assert len(progress) == last["iteration"] >= 2


def test_after_a_signal_no_iteration_is_missing_or_twice(tmp_path):
    process = start("baselines/cpo", flags("baselines/cpo", tmp_path, task="Slow", iterations=30, save_every=0))
    wait_for_rows(tmp_path, 2)
    process.terminate()
    process.communicate(timeout=60)
    run("baselines/cpo", ["--resume", only(tmp_path)])
    steps = [step for tag, step, _ in logged(only(tmp_path)) if tag == "charts/episodic_cost"]
    assert [int(row["iteration"]) for row in rows(only(tmp_path) / "progress.csv")] == list(range(1, 31))
    assert steps == [128 * i for i in range(1, 31)]


def wait_for_rows(folder, count):
    for _ in range(2400):
        paths = list(folder.glob("*/progress.csv"))
        if paths and len(paths[0].read_text().splitlines()) > count:
            return
        time.sleep(0.05)
    raise AssertionError("no progress")


@pytest.mark.parametrize("script", ["scpo_continuous", "baselines/pdo"])
def test_a_complete_run_can_be_made_longer(script, tmp_path):
    run(script, flags(script, tmp_path / "short", iterations=4))
    folder = only(tmp_path / "short")
    run(script, ["--resume", folder, "--total-timesteps", 128 * 6])
    assert [int(row["iteration"]) for row in rows(folder / "progress.csv")] == list(range(1, 7))
    if script == "scpo_continuous":  # no schedule knows the end
        run(script, flags(script, tmp_path / "long", iterations=6))
        assert_same_run(folder, only(tmp_path / "long"))


def test_what_a_checkpoint_holds(tmp_path):
    run("baselines/pdo", flags("baselines/pdo", tmp_path))
    last = torch.load(only(tmp_path) / "last.pt", weights_only=True)  # nothing pickled
    assert {"script", "versions", "args", "agent", "optimizer", "iteration", "torch_rng", "numpy_rng"} <= last.keys()
    assert {"obs_mean", "return_var", "lagrangian_multiplier"} <= last["agent"].keys()
    assert last["versions"]["torch"] == torch.__version__ and last["args"]["cost_limit"] == 3
    best = torch.load(only(tmp_path) / "best_safe.pt", weights_only=True)
    safe = [row for row in rows(only(tmp_path) / "progress.csv") if float(row["episodic_cost"]) <= 3]
    assert best["iteration"] == int(max(safe, key=lambda row: float(row["episodic_return"]))["iteration"])


# Faults ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["scpo_continuous", "scpo_discrete", "baselines/trpo", "baselines/cpo"])
@pytest.mark.parametrize(
    "task, says",
    [
        ("Raise", "RuntimeError: the motor is on fire (toy_env.py:"),
        ("Hang", "TimeoutError: an environment takes longer for a step than --step-timeout allows"),
        ("Array", "a cost must be one number"),
        ("Forget", "the task reports no cost"),
        ("Nan", "a reward is NaN or infinite in iteration 3"),
    ],
)
def test_a_task_that_fails_in_mid_run_gets_one_line(script, task, says, tmp_path):
    process = start(script, flags(script, tmp_path, task=task, save_every=1, more=["--step-timeout", "1"]))
    out, err = process.communicate(timeout=120)
    told = [
        line
        for line in err.replace("\r", "\n").splitlines()
        if line.strip() and "/iteration" not in line and "iteration/s" not in line
    ]
    assert process.returncode == 1 and len(told) == 1 and says in told[0], err
    assert len(rows(only(tmp_path) / "progress.csv")) == 2
    assert torch.load(only(tmp_path) / "last.pt", weights_only=True)["iteration"] == 2


@pytest.mark.parametrize("script", ["scpo_continuous", "baselines/pcpo"])
def test_a_full_disk_gets_one_line_and_leaves_the_last_checkpoint(script, tmp_path):
    """The kernel refuses every further byte."""
    process = start(script, flags(script, tmp_path, task="Slow", iterations=1000, save_every=1))
    wait_for_rows(tmp_path, 3)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100, 100))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in err and "OSError: [Errno 27] File too large" in err
    last = torch.load(only(tmp_path) / "last.pt", weights_only=True)
    process = start(script, ["--resume", only(tmp_path), "--total-timesteps", 128 * (last["iteration"] + 2)])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert [int(x["iteration"]) for x in rows(only(tmp_path) / "progress.csv")] == list(range(1, last["iteration"] + 3))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    run("scpo_continuous", flags("scpo_continuous", folder))
    return only(folder)


def spoil(finished, tmp_path, what):
    folder = tmp_path / "spoiled"
    folder.mkdir()
    (folder / "config.json").write_text((finished / "config.json").read_text())
    whole = (finished / "last.pt").read_bytes()
    if what == "truncated":
        (folder / "last.pt").write_bytes(whole[: len(whole) // 2])
    elif what == "foreign":
        torch.save({"weights": torch.zeros(3)}, folder / "last.pt")
    elif what == "pickled":
        torch.save({"script": Path("x")}, folder / "last.pt")
    elif what == "whole":
        (folder / "last.pt").write_bytes(whole)
    return folder


@pytest.mark.parametrize(
    "script, what, more, says",
    [
        ("scpo_continuous", "nothing", (), "there is no"),
        ("scpo_continuous", "truncated", (), "is truncated or not a checkpoint of ours"),
        ("scpo_continuous", "foreign", (), "is truncated or not a checkpoint of ours"),
        ("scpo_continuous", "pickled", (), "is truncated or not a checkpoint of ours"),
        ("scpo_discrete", "whole", (), "that run was made by scpo_continuous.py"),
        ("baselines/cpo", "whole", (), "that run was made by scpo_continuous.py"),
        (
            "scpo_continuous",
            "whole",
            ("--env-id", "SafetyBallRun-v0"),
            "--env-id is SafetyBallRun-v0, but must be toy_env:Toy-v0",
        ),
        ("scpo_continuous", "whole", ("--seed", "5"), "--seed is 5, but must be 1"),
        ("scpo_continuous", "whole", (), "is complete; more --total-timesteps than 1024 make it longer"),
        ("scpo_continuous", "whole", ("--total-timesteps", "512"), "is complete"),
    ],
)
def test_what_can_not_be_resumed_gets_one_line_and_status_2(script, what, more, says, finished, tmp_path, capsys):
    folder = spoil(finished, tmp_path, what)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SystemExit) as stop:
        run(script, ["--resume", folder, *more])
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and says in said and "\n" not in said
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_two_processes_can_not_be_at_work_on_one_run(tmp_path):
    script = "baselines/trpo"
    first = start(script, flags(script, tmp_path, task="Slow", iterations=1000, save_every=1))
    wait_for_rows(tmp_path, 1)
    second = start(script, ["--resume", only(tmp_path)])
    out, err = second.communicate(timeout=60)
    first.kill()
    first.communicate()
    assert second.returncode == 2 and "another process is at work on that run" in err and len(err.strip().splitlines()) == 1


def test_two_runs_of_one_name_get_one_line(tmp_path, monkeypatch, capsys):
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "time", lambda: 1e9 + next(clock) / 1e6)
    run("baselines/trpo", flags("baselines/trpo", tmp_path))
    before = (only(tmp_path) / "progress.csv").read_text()
    with pytest.raises(SystemExit) as stop:
        run("baselines/trpo", flags("baselines/trpo", tmp_path))
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and said.startswith("trpo.py: --runs-dir: can't write") and "File exists" in said
    assert (only(tmp_path) / "progress.csv").read_text() == before


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_folder_that_can_not_be_written_gets_one_line(script, capsys):
    with pytest.raises(SystemExit) as stop:
        run(script, flags(script, "/proc/nowhere"))
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and "--runs-dir: can't write /proc/nowhere" in said and "\n" not in said


def test_track_without_wandb_gets_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        run("baselines/trpo", flags("baselines/trpo", tmp_path, more=["--track"]))
    assert stop.value.code == 2 and "pip install wandb" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["scpo_continuous", "baselines/trpo"])
def test_track_logs_offline(script, tmp_path):
    pytest.importorskip("wandb")
    process = start(script, flags(script, tmp_path, iterations=2, more=["--track"]), WANDB_MODE="offline", WANDB_SILENT="true")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert list(only(tmp_path).glob("wandb/offline-run-*/*.wandb"))


def test_config_tells_the_settings_and_where_they_come_from(finished):
    config = json.loads((finished / "config.json").read_text())
    assert config["script"] == "scpo_continuous.py" and config["save_every"] == 2 and config["k"] == 4


def test_a_runs_revision_is_that_of_the_code(tmp_path, monkeypatch):
    module = importlib.import_module("scpo_continuous")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "scripts" / "copy.py"))
    (tmp_path / "scripts").mkdir()
    assert module.git_revision() == "unknown"
    for name in ("scripts/copy.py", "env.py", "results.csv"):
        (tmp_path / name).write_text("1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout[:12]
    (tmp_path / "results.csv").write_text("2\n")  # what a campaign writes while it goes on
    assert module.git_revision() == commit
    (tmp_path / "env.py").write_text("2\n")  # beside the script's folder
    assert module.git_revision() == commit + "-dirty"
