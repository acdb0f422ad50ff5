#!/bin/sh
# Makes .venv at the repository root from dev/requirements.txt and dev/requirements-alone.txt; does nothing if it is
# there and up to date. The packages in the latter are installed without those that they depend on: the tests need only
# files of theirs, a vocabulary.
set -eu
cd "$(dirname "$0")/.."
stamp=.venv/requirements.stamp  # a copy of the requirements, written when all are installed

fail() {
    echo "venv.sh: $1" >&2
    exit 1
}

cat dev/requirements.txt dev/requirements-alone.txt | cmp -s - "$stamp" && exit 0
if [ -e .venv ]; then folder=.venv; else folder=.; fi
[ -w "$folder" ] || fail "cannot write in $(cd "$folder" && pwd), where Python's packages go"
python3 -c 'import ensurepip, venv' 2>/dev/null || fail "there is no Python 3 with its venv module: make test-deps installs it"
# Sizes as of 2026-11-28, of PyPI's files for Python 3.11 on x86-64.
echo "venv.sh: installing dev/requirements*.txt into .venv: downloads about 3.3 GB, most of it PyTorch with CUDA, and takes 6 GB there"
# A run that was interrupted may have left a .venv without pip.
.venv/bin/python -m pip --version >/dev/null 2>&1 || python3 -m venv --clear .venv || fail "python3 -m venv failed (see above)"
install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" ||
        fail "pip could not install $* (see above): run dev/venv.sh again when online"
}
install -r dev/requirements.txt
install --no-deps -r dev/requirements-alone.txt
cat dev/requirements.txt dev/requirements-alone.txt >"$stamp"
