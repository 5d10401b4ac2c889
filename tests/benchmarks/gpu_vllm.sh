#!/bin/sh
# Makes parts of a stock vLLM, with the torch and Triton that it wants, for a GPU host that has another torch, no package
# registry, and takes 64 MiB at a time:  sh tests/benchmarks/gpu_vllm.sh VERSION FOLDER
# Each FOLDER/partN has a part and the checksums of all; gpu_part.sh puts them together there. Needs Python 3.12 (PYTHON),
# uv, gcc, strip, xz, 5 GB in TMPDIR and some 15 minutes of two processors. What an sm_90 GPU does not load is left out:
# other GPUs' code, debug symbols, FlashAttention 2, sources of kernels, Triton's profiler. NVIDIA's libraries are the
# host's own.
set -eu
version=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/site
${UV:-.venv/bin/uv} pip install -q --target "$site" --no-deps --link-mode copy --python-version 3.12 \
  --python-platform x86_64-manylinux_2_39 --only-binary :all: -r "$here/gpu_vllm.txt" "vllm==$version"
cd "$site"
rm -rf vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/vllm-rs vllm/_qutlass_C.abi3.so vllm/third_party/*/include \
  vllm/third_party/*/cutlass pycountry/locales mistral_common/data torch/test bin \
  triton/plugins triton/instrumentation triton/FileCheck triton/_C/libproton.so triton/backends/amd/lib \
  triton/backends/nvidia/lib/cupti* triton/backends/nvidia/bin/ptxas-blackwell \
  triton/backends/nvidia/bin/nvdisasm triton/backends/nvidia/bin/cuobjdump
find torch/bin -type f ! -name torch_shm_manager -delete   # torch wants that one when it is imported
find . -name __pycache__ -type d -prune -exec rm -rf {} +
python3 "$here/thin_cuda.py" vllm/_C_stable_libtorch.abi3.so vllm/_flashmla_C.abi3.so
python3 "$here/thin_cuda.py" --no-ptx vllm/_moe_C_stable_libtorch.abi3.so torch/lib/libtorch_cuda*.so torch/lib/libtorch_nvshmem.so
find torch triton vllm -name '*.so' -exec strip --strip-unneeded {} +
# The host's NCCL may be older than torch's: what it lacks returns an error. That serves one GPU, which never calls it.
mkdir -p nvidia/nccl/lib
for name in CommGetUniqueId CommGrow CommMemStats CommResume CommSuspend GetLsaMultimemDevicePointer \
  GetPeerDevicePointer PutSignal Signal WaitSignal WinGetUserPtr; do echo "int nccl$name(void) { return 5; }"; done > "$work/nccl.c"
echo | gcc -shared -x c - -o "$work/libnccl_host.so.2" -Wl,-soname,libnccl_host.so.2
gcc -shared -fPIC -nostdlib -o nvidia/nccl/lib/libnccl.so.2 "$work/nccl.c" -Wl,-soname,libnccl.so.2 \
  -Wl,-rpath,'$ORIGIN' -Wl,--no-as-needed "$work/libnccl_host.so.2"
rm -rf "$folder"/part*
tar c --sort=name . | xz -T0 "-${LEVEL:-3}" | split -b "${PART_MIB:-50}M" --numeric-suffixes=1 -a 2 - "$work/vllm-$version."
cd "$work"
sha256sum "vllm-$version".* > sums
for part in "vllm-$version".*; do
  mkdir -p "$folder/part${part##*.}"
  cp "$part" sums "$folder/part${part##*.}"
done
ls -l "$folder"/part*/vllm-*
