#!/bin/sh
# Makes the folder that gpu_host.sh wants on a GPU host without a package registry: headgate's wheel as the tree is now,
# and wheels of what its tests need. Run in the repository's root:  sh tests/benchmarks/gpu_bundle.sh [FOLDER]
# The bundle with vLLM itself (vllm-gpu.tar.xz, env.sh) is not made here: put it there once, or have vLLM on the host.
# With --vllm VERSION FOLDER it makes FOLDER/host, and parts of another vLLM and its torch beside it (gpu_vllm.sh).
set -eu
if [ "${1:-}" = --vllm ]; then
  sh "$0" "$3/host"
  exec sh "$(dirname "$0")/gpu_vllm.sh" "$2" "$3"
fi
dir=${1:-.gpu}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$dir/whl/extra"
rm -f "$dir"/whl/headgate-*.whl
$python -m pip --version > /dev/null 2>&1 && build="$python -m pip wheel -q --no-deps -w $dir/whl ." \
  || build=".venv/bin/uv build -q --wheel -o $dir/whl ."
$build
rm -rf build
git rev-parse --short HEAD > "$dir/commit"
git diff --quiet HEAD || echo "$(cat "$dir/commit")+changes" > "$dir/commit"
fetch() {
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "$@"
}
ls "$dir"/whl/pytest-*.whl > /dev/null 2>&1 || fetch -d "$dir/whl" pytest iniconfig packaging pluggy pygments hypothesis sortedcontainers
ls "$dir"/whl/extra/typer-*.whl > /dev/null 2>&1 || fetch -d "$dir/whl/extra" rich typer fsspec click markdown-it-py mdurl shellingham
ls -l "$dir"/whl/headgate-*.whl
du -sh "$dir"
