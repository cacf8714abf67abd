#!/usr/bin/env bash
# Reproduces the paper: makes .venv, every run of its figure and of CartSafe, then figures and table. See --help.
set -eu
cd "$(dirname "$0")"
make -s .venv/installed-dev
exec .venv/bin/python -m reproduce.benchmark "$@"
