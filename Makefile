# make train [ARGS="--env-id SafetyBallRun-v0 --seed 2"]   installs what is missing into .venv and trains
# make test                                                 the tests CI runs
# make lint                                                 ruff
# make test-modern                                          the tests with Gymnasium 1.x and pybullet-arm64; the tasks' alone on
#                                                           Python 3.12 and 3.13 where these are installed (no torch needed)
# make test-field                                           Safety-Gymnasium by the recipe of docs/field.md, and its test
# make test-ray                                             benchmark.sh --engine ray, on a cluster of two workers on this machine
PYTHON ?= python3
ARGS ?=

# pybullet and the Gymnasium that bullet-safety-gym pins install on Linux with Python 3.9 to 3.11; elsewhere the modern way
MODERN := $(shell $(PYTHON) -c "import sys; print(int(sys.version_info >= (3, 12) or sys.platform == 'darwin'))")
ifeq ($(MODERN),1)
REQUIREMENTS := requirements-modern.txt
else
REQUIREMENTS := requirements.txt
endif

.PHONY: train test lint test-modern test-tasks test-field test-ray clean

train: .venv/installed
	.venv/bin/python scpo_continuous.py $(ARGS)

test: .venv/installed-dev
	.venv/bin/python -m pytest -n 2

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv/installed: requirements.txt requirements-modern.txt pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q --disable-pip-version-check -r $(REQUIREMENTS)
ifeq ($(MODERN),1)
	.venv/bin/pip install -q --disable-pip-version-check --no-deps bullet-safety-gym==1.4.0
endif
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	.venv/bin/pip install -q --disable-pip-version-check -r requirements-dev.txt
	touch $@

test-modern:
	$(PYTHON) -m venv .venv-modern
	.venv-modern/bin/pip install -q --disable-pip-version-check -r requirements-modern.txt -r requirements-dev.txt
	.venv-modern/bin/pip install -q --disable-pip-version-check --no-deps bullet-safety-gym==1.4.0
	.venv-modern/bin/python -m pytest
	@for version in 3.12 3.13; do \
		python=python$$version; \
		$$python -c "" 2>/dev/null || python=$$(ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version.*/bin/python 2>/dev/null | tail -n 1); \
		if [ -n "$$python" ]; then $(MAKE) test-tasks TASKS_PYTHON=$$python TASKS_VENV=.venv-$$version || exit 1; \
		else echo "Python $$version is not installed: skipped"; fi; \
	done

# the tasks' tests alone, in a virtual environment without torch
test-tasks:
	$(TASKS_PYTHON) -m venv $(TASKS_VENV)
	grep -E "^(gymnasium|numpy|pybullet-arm64)" requirements-modern.txt > $(TASKS_VENV)/requirements.txt
	$(TASKS_VENV)/bin/pip install -q --disable-pip-version-check -r $(TASKS_VENV)/requirements.txt pytest==8.4.2
	$(TASKS_VENV)/bin/pip install -q --disable-pip-version-check --no-deps bullet-safety-gym==1.4.0
	$(TASKS_VENV)/bin/python -m pytest tests/test_ball_tasks.py tests/test_cart_safe.py

test-field: .venv/installed-dev
	.venv/bin/pip install -q --disable-pip-version-check -r requirements.txt -r requirements-field.txt
	.venv/bin/pip install -q --disable-pip-version-check --no-deps safety-gymnasium==1.0.0 gymnasium-robotics==1.2.2
	.venv/bin/python -m pytest tests/test_field.py

test-ray: .venv/installed-dev
	.venv/bin/pip install -q --disable-pip-version-check "ray[default]==2.60.0"
	.venv/bin/python -m pytest tests/test_benchmark.py -k ray

clean:
	rm -rf .venv .venv-*
