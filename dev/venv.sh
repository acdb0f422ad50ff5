#!/bin/sh
# Makes .venv at the repository root from dev/requirements.txt; does nothing when it is there and up to date.
set -eu
cd "$(dirname "$0")/.."
stamp=.venv/requirements.stamp  # the requirements that were installed completely

fail() {
    echo "venv.sh: $1" >&2
    exit 1
}

cmp -s dev/requirements.txt "$stamp" && exit 0
echo "venv.sh: installing dev/requirements.txt into .venv (a few minutes the first time)"
[ -x .venv/bin/python ] || python3 -m venv .venv || fail "python3 -m venv failed: install Python 3.11 with its venv module"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r dev/requirements.txt ||
    fail "pip could not install dev/requirements.txt (see above): run dev/venv.sh again when online"
cp dev/requirements.txt "$stamp"
