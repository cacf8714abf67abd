"""scpo_workers.py: the same run in any number of workers, which end with their parent and leave the signals to it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import toy_workers
from test_scpo_run import SCRIPTS, Crash, assert_same_run, crash_at, flags, only, refused, run_script

from scpo_workers import with_workers

ROOT = Path(__file__).parent.parent


def environments(num_workers, num_envs, fault=None, folder=None, seed=1):
    args = SimpleNamespace(num_workers=num_workers, num_envs=num_envs, fault=fault, folder=folder, seed=seed)
    return with_workers(toy_workers.train, args)(args)


def unpacked(answers):
    return [tuple(answer) for answer in answers]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@pytest.mark.parametrize("script", SCRIPTS[:3])  # the other baselines' loop is trpo.py's to the byte
def test_a_run_is_the_same_with_workers_and_goes_on_with_another_number_of_them(script, tmp_path):
    """Two environments, an episode of 20 steps: resets in the workers, new seeds at a checkpoint, a resumed run."""
    task = flags(script, task="Noise")  # draws from the action space, so its seed has to reach the worker
    task += ["--limit-factor", 8] if script.startswith("scpo") else []  # so do the limits of the iterations
    run_script(script, *task, "--runs-dir", tmp_path / "one")
    with pytest.raises(Crash), crash_at(13):  # in iteration 3 or 4
        run_script(script, *task, "--runs-dir", tmp_path / "two", "--num-workers", 2)
    run_script(script, "--resume", only(tmp_path / "two"), "--num-workers", 1)
    assert_same_run(only(tmp_path / "one"), only(tmp_path / "two"))


def test_environments_live_in_the_workers_in_turn_and_keep_their_order():
    envs, plain = environments(2, 5), toy_workers.train(SimpleNamespace(fault=None, folder=None, num_envs=5))
    assert envs[0].spec.max_episode_steps == 5 and envs[0].action_space == toy_workers.Env.action_space
    firsts = unpacked([env.reset(seed=7 + i) for i, env in enumerate(envs)])
    assert firsts == [env.reset(seed=7 + i) for i, env in enumerate(plain)]
    for i, env in enumerate(envs):
        env.cost_limit = 3 + i
    assert [obs for obs, *_ in unpacked([env.step("limit") for env in envs])] == [3, 4, 5, 6, 7]
    for env in plain:
        env.step("limit")
    for step in range(11):
        answers = unpacked([env.step("go") for env in envs])
        pids = [answer[0][0] for answer in answers]
        assert pids[0] == pids[2] == pids[4] != pids[1] == pids[3] and os.getpid() not in pids
        for env, twin, (obs, *rest, info) in zip(envs, plain, answers):
            twin_obs, *twin_rest, twin_info = twin.step("go")
            assert obs[1] == twin_obs[1] and rest == twin_rest
            assert info == {"cost": 0.0, "safe": 1}  # what can't be sent stays
            if rest[1]:
                assert env.reset() == twin.reset()


def test_all_workers_step_at_once(tmp_path):
    envs = environments(3, 3, folder=tmp_path)
    unpacked([env.reset(seed=1) for env in envs])
    assert len(unpacked([env.step("meet") for env in envs])) == 3


def test_tasks_that_draw_from_the_global_generators_do_so_by_the_seed():
    def drawn(seed):
        envs = environments(2, 2, seed=seed)
        unpacked([env.reset(seed=1) for env in envs])
        return [answer[:2] for answer in unpacked([env.step("global") for env in envs])]

    one, two = drawn(1), drawn(2)
    assert one == drawn(1)
    assert len({*one[0], *one[1], *two[0], *two[1]}) == 8  # each worker of each run has a seed of its own


def test_what_fails_in_a_worker_is_told():
    with pytest.raises(ValueError, match="^--env-id Toy: no such task$"):
        environments(2, 2, fault="make")
    envs = environments(2, 2)
    unpacked([env.reset(seed=1) for env in envs])
    with pytest.raises(ChildProcessError, match="environment 1 failed in its worker: RuntimeError.*motor is on fire"):
        unpacked([envs[0].step("go"), envs[1].step("fail")])
    with pytest.raises(ChildProcessError, match="environment 1 failed in its worker: ConnectionResetError.*hung up"):
        unpacked([envs[0].step("go"), envs[1].step("offline")])
    assert unpacked([env.step("go") for env in envs])  # the worker lives on
    (pid, _), *_ = envs[0].step("go")
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):  # while it is asked, or before
        with pytest.raises(ChildProcessError, match="a worker has died"):
            unpacked([envs[0].step("go")])


def test_workers_that_are_no_longer_needed_end():
    envs = environments(2, 2)
    unpacked([env.reset(seed=1) for env in envs])
    pids = [answer[0][0] for answer in unpacked([env.step("go") for env in envs])]
    assert all(is_alive(pid) for pid in pids)
    del envs
    until(lambda: not any(is_alive(pid) for pid in pids))


PARENT = """
import sys, time, toy_workers
from types import SimpleNamespace
from scpo_workers import with_workers
if __name__ == "__main__":
    args = SimpleNamespace(num_workers=2, num_envs=2, fault=None, folder=None, seed=1)
    envs = with_workers(toy_workers.train, args)(args)
    for env in envs:
        obs, _ = env.reset(seed=1)
    answers = [tuple(env.step("go")) for env in envs]
    print(*(answer[0][0] for answer in answers), flush=True)
    {then}
"""


@pytest.mark.parametrize(
    "then, signals, status",
    [
        ("time.sleep(1000)", [signal.SIGKILL], -signal.SIGKILL),  # as idle as workers can be
        ("tuple(envs[0].step('hang'))", [signal.SIGKILL], -signal.SIGKILL),  # one of them doesn't listen
        ("1 / 0", [], 1),
        ("sys.exit(0)", [], 0),
        ("envs[0].step('hang'); sys.exit(3)", [], 3),
    ],
)
def test_workers_end_with_their_parent(then, signals, status, tmp_path):
    (tmp_path / "parent.py").write_text(PARENT.format(then=then))
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    argv = [sys.executable, tmp_path / "parent.py"]
    parent = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.2)
    for number in signals:
        assert all(is_alive(pid) for pid in pids)
        parent.send_signal(number)
    assert parent.wait(60) == status
    until(lambda: not any(is_alive(pid) for pid in pids))
    said = parent.communicate()[1]
    assert said.count("Traceback") == (status == 1)  # the parent's own


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_is_the_parents(number, tmp_path):
    """As Ctrl-C sends it, or a cluster: the iteration ends, all is saved, and no worker says a word."""
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", OMP_NUM_THREADS="1")
    argv = [sys.executable, ROOT / "scpo_continuous.py", *flags("scpo_continuous", tmp_path, "Slow", 5000, 1)]
    argv += ["--num-workers", "2"]
    parent = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    until(lambda: list(tmp_path.glob("*/episodes.csv")))
    os.killpg(parent.pid, number)
    said, complained = (text.decode() for text in parent.communicate(timeout=60))
    assert parent.returncode == 128 + number and "go on with --resume" in said
    assert all(" return " in line or "Stopped" in line for line in complained.splitlines() if line.strip()), complained


def test_a_run_whose_worker_fails_ends_with_one_line_and_keeps_what_is_saved(tmp_path, capfd):
    with pytest.raises(SystemExit) as stop:
        argv = flags("scpo_continuous", tmp_path, "Raise", iterations=5, save_every=1)
        run_script("scpo_continuous", *argv, "--num-workers", 2)
    line = str(stop.value).strip()
    assert "\n" not in line and "RuntimeError" in line and "on fire" in line and "--num-workers 1" in line
    assert str(only(tmp_path)) in line and (only(tmp_path) / "last.pt").exists()
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_that_dies_before_its_environments_are_made_is_told(tmp_path, capsys):
    argv = [*flags("scpo_continuous", tmp_path, "Killed"), "--num-workers", 2]
    assert "a worker has died; it was killed, or memory ran out" in refused(
        capsys, run_script, "scpo_continuous", *argv
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [0, 3, -1])
def test_there_are_as_many_workers_as_environments_at_most(number, capsys, tmp_path):
    argv = [*flags("scpo_continuous", tmp_path / "runs"), "--num-workers", number]
    says = f"--num-workers is {number}, but must be in [1, 2]"
    assert says in refused(capsys, run_script, "scpo_continuous", *argv)


def test_no_environments_are_refused_as_such(capsys, tmp_path):
    argv = [*flags("scpo_continuous", tmp_path / "runs"), "--num-envs", 0, "--num-workers", 2]
    assert "--num-envs is 0, but must be" in refused(capsys, run_script, "scpo_continuous", *argv)


@pytest.mark.parametrize("flag, value", [("--seed", "-1"), ("--num-steps", "0")])
def test_no_worker_is_started_for_wrong_flags(flag, value, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", lambda process: pytest.fail("it started"))
    argv = [*flags("scpo_continuous", tmp_path / "runs"), flag, value, "--num-workers", 2]
    assert f"{flag} is {value}, but must be" in refused(capsys, run_script, "scpo_continuous", *argv)


def test_a_worker_has_32_environments_at_most(capsys, tmp_path):
    """Otherwise the actions that wait for it fill its pipe while it fills the other one, and both wait for ever."""
    argv = [*flags("scpo_continuous", tmp_path / "runs"), "--num-envs", 300, "--num-steps", 20, "--num-workers", 2]
    says = "--num-workers is 2, but must be in [1, 300] with at most 32 num-envs each"
    assert says in refused(capsys, run_script, "scpo_continuous", *argv)


def test_the_wrappers_of_a_task_in_a_worker_are_known():
    assert str(environments(2, 2)[1]) == "<Env of the tests>"


def test_a_task_that_a_worker_can_not_make_gets_the_usual_line(capsys, tmp_path):
    argv = flags("scpo_continuous", tmp_path / "runs", task="NoCost")
    lines = [refused(capsys, run_script, "scpo_continuous", *argv, "--num-workers", n) for n in (1, 2)]
    assert lines[0] == lines[1] and 'info["cost"] is None' in lines[0]


def test_exp_name_names_the_folder(tmp_path):
    run_script(
        "scpo_continuous", *flags("scpo_continuous", tmp_path, iterations=1), "--exp-name", "k/4: mine, 'no #2?'"
    )
    assert only(tmp_path).name.split("__")[:3] == ["toy_env-Toy-v0", "k-4- mine- -no -2--", "1"]
