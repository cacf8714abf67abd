"""docs/your-own-env.md: its task, saved as it says, trains with the commands it gives; so do tasks of other packages."""

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "your-own-env.md").read_text()
TASK = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
COMMANDS = [line for line in re.search(r"```bash\n(.*?)```", PAGE, re.S)[1].splitlines() if "my_task:" in line]


def train(tmp_path, words):
    env = dict(os.environ, PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1")
    command = [sys.executable, str(ROOT / words[0]), *words[1:], "--runs-dir", str(tmp_path / "runs")]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    (progress,) = tmp_path.glob("runs/*/progress.csv")
    with open(progress) as file:
        return list(csv.DictReader(file))


def test_the_task_is_twenty_lines_and_every_script_has_its_command():
    assert len([line for line in TASK.splitlines() if line.strip()]) <= 22
    assert len(COMMANDS) == 7 and len({command.split()[1] for command in COMMANDS}) == 7


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: Path(command.split()[1]).stem)
def test_the_task_trains_with_each_script(command, tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    words = shlex.split(command)[1:]
    words[words.index("--total-timesteps") + 1] = "98304"
    words += ["--no-compile", "--update-epochs", "1"] if "scpo_" in words[0] else []
    progress = train(tmp_path, words)
    assert len(progress) == 3
    assert float(progress[-1]["episodic_return"]) > float(progress[0]["episodic_return"])


@pytest.mark.parametrize("env_id", ["SafetyCarCircle-v0", "SafetyDroneRun-v0"])
@pytest.mark.parametrize("script", ["scpo_continuous.py", "baselines/cpo.py"])
def test_bullet_safety_gyms_other_robots_train(env_id, script, tmp_path):
    words = f"{script} --env-id {env_id} --cost-limit 25 --num-envs 2 --num-steps 512 --total-timesteps 3072".split()
    words += ["--no-compile"] if "scpo_" in script else []
    assert len(train(tmp_path, words)) == 3
