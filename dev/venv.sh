#!/bin/sh
# Makes .venv at the repository root from dev/requirements.txt and dev/requirements-alone.txt; does nothing when it is
# there and up to date. Of the latter only files are needed, a vocabulary, and not the packages that they name.
set -eu
cd "$(dirname "$0")/.."
stamp=.venv/requirements.stamp  # the requirements that were installed completely

fail() {
    echo "venv.sh: $1" >&2
    exit 1
}

cat dev/requirements.txt dev/requirements-alone.txt | cmp -s - "$stamp" && exit 0
if [ -e .venv ]; then folder=.venv; else folder=.; fi
probe=$(mktemp "$folder/.probe-XXXXXX" 2>/dev/null) || fail "cannot write in $(cd "$folder" && pwd), where Python's packages go"
rm -f "$probe"
python3 -c 'import ensurepip, venv' 2>/dev/null || fail "there is no Python 3 with its venv module: make test-deps installs it"
echo "venv.sh: installing dev/requirements*.txt into .venv (a few minutes the first time)"
[ -x .venv/bin/python ] || python3 -m venv .venv || fail "python3 -m venv failed (see above)"
install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" ||
        fail "pip could not install $* (see above): run dev/venv.sh again when online"
}
install -r dev/requirements.txt
install --no-deps -r dev/requirements-alone.txt
cat dev/requirements.txt dev/requirements-alone.txt >"$stamp"
