#!/bin/bash
# Takes a part that gpu_vllm.sh made, on a GPU host:  bash tests/benchmarks/gpu_part.sh FOLDER/partN
# With the last one it unpacks them all into /tmp/headgate-vllm, where gpu_host.sh finds vLLM, and tries torch, Triton and
# vLLM on the GPU. Without an argument it only tries them.
set -eu
home=${TMPDIR:-/tmp}/headgate-vllm
site=$home/site
mkdir -p "$home/parts"
if [ $# -gt 0 ]; then cp "$1"/vllm-* "$1/sums" "$home/parts"; fi
cd "$home/parts"
missing=$(sha256sum -c sums 2>/dev/null | grep -v ': OK$' | sed 's/:.*//' || true)
if [ -n "$missing" ]; then echo "not here yet, or not whole:" $missing; exit 0; fi
if ! [ -e "$home/env.sh" ]; then
  rm -rf "$site"
  mkdir -p "$site"
  cat $(sed 's/.* //' sums) | xz -dc -T0 | tar x -i --no-same-owner -C "$site"
  echo "unpacked after $SECONDS s: $(du -sh "$site" | cut -f 1)"
  nvidia=$(python3 -c 'import os, torch; print(os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "nvidia"))')
  for part in "$nvidia"/*; do
    [ "${part##*/}" = nccl ] || ln -sfn "$part" "$site/nvidia/"
  done
  ln -sfn "$nvidia/nccl/lib/libnccl.so.2" "$site/nvidia/nccl/lib/libnccl_host.so.2"
  python3 -m compileall -qq -j 0 "$site/torch" "$site/vllm" "$site/triton" || true
  cat > "$home/env.sh" <<END
export PYTHONPATH=$site\${PYTHONPATH:+:\$PYTHONPATH}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_DEEP_GEMM=0 VLLM_USE_FLASHINFER_SAMPLER=0
export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1   # the host's cuDNN is older than the one that torch was built with
END
  echo "set up after $SECONDS s"
fi
. "$home/env.sh"
cd /
python3 - <<'P'
import sys
import time
began = time.monotonic()
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
failed = []

def attempt(name, check):
    try:
        print(f"{name}: {check()} ({time.monotonic() - began:.0f} s)", flush=True)
    except Exception as error:
        failed.append(name)
        print(f"{name} FAILED: {error!r}"[:2000], flush=True)

def drawn(*size):
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

def worst(found, wanted):
    return f"greatest error {(found.float() - wanted.float()).abs().max().item():.2g}"

def matmul():
    x = drawn(512, 512)
    return worst(x @ x, x.float() @ x.float())

def compiled():
    x = drawn(512, 512)
    return worst(torch.compile(lambda a: silu(a).sum(-1), dynamic=False)(x), silu(x.float()).sum(-1))

def import_vllm():
    import vllm
    from vllm.platforms import current_platform
    return vllm.__version__, current_platform.get_device_name()

def attention():
    from vllm.vllm_flash_attn import flash_attn_varlen_func
    q, starts = drawn(64, 8, 256), torch.tensor([0, 64], device="cuda", dtype=torch.int32)
    found = flash_attn_varlen_func(q, q, q, max_seqlen_q=64, cu_seqlens_q=starts, max_seqlen_k=64,
                                   cu_seqlens_k=starts, causal=True, fa_version=3)
    heads = q.float().transpose(0, 1)[None]
    return worst(found, scaled_dot_product_attention(heads, heads, heads, is_causal=True)[0].transpose(0, 1))

def norm():
    x, weight = drawn(64, 512), drawn(512)
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, 1e-6)
    return worst(out, rms_norm(x.float(), (512,), weight.float(), 1e-6))

attempt("torch", lambda: (torch.__version__, torch.version.cuda, torch.cuda.get_device_name()))
attempt("cuDNN and NCCL", lambda: (torch.backends.cudnn.version(), torch.cuda.nccl.version()))
attempt("matmul", matmul)
attempt("torch.compile", compiled)
attempt("vllm", import_vllm)
attempt("FlashAttention 3", attention)
attempt("rms_norm of vLLM", norm)
sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
P
