# Source this on a GPU host, in the repository's root:  . tests/benchmarks/gpu_host.sh [FOLDER]
# FOLDER (.gpu if not given) holds what the host lacks, if anything: vllm-gpu.tar.xz and env.sh (stock vLLM without a
# package registry), whl/*.whl (headgate, pytest, hypothesis, ...), whl/extra/*.whl (taken only if the host lacks them)
# and commit (of headgate). tests/benchmarks/gpu_bundle.sh fills it. What cannot work ends a script; at a prompt, this file.
_dir=${1:-.gpu}
_site=${TMPDIR:-/tmp}/headgate-site
if [ -r "${TMPDIR:-/tmp}/headgate-vllm/env.sh" ]; then . "${TMPDIR:-/tmp}/headgate-vllm/env.sh"; fi   # what gpu_part.sh put together
if ! python3 -c "import vllm" 2>/dev/null; then
  if ! [ -r "$_dir/env.sh" ]; then
    echo "gpu_host.sh: python3 here has no vllm, and there is no $_dir/env.sh that brings one: name the folder that has it" >&2
    case $- in *i*) return 1 ;; *) exit 1 ;; esac
  fi
  . "$_dir/env.sh" "$_dir"
fi
_install() { python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$_site" "$@" 2>&1 | grep -vi "warning\|notice"; }
if ls "$_dir"/whl/*.whl > /dev/null 2>&1; then _install "$_dir"/whl/*.whl; fi
export PYTHONPATH=$_site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
for _module in rich typer fsspec; do
  python3 -c "import $_module" 2>/dev/null || { echo "$_module is missing here: the one that was brought along is used"; _install "$_dir"/whl/extra/*.whl; break; }
done
# Without bytecode each of an engine's processes compiles all sources for itself.
unset PYTHONDONTWRITEBYTECODE
_folders=$(python3 -c 'from importlib.util import find_spec as f; print(*(p for m in map(f, ("vllm", "headgate", "torch", "transformers")) if m for p in m.submodule_search_locations))')
[ -z "$_folders" ] || python3 -m compileall -qq -j 0 $_folders || echo "not all sources could be compiled to bytecode: starts may take longer"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 BENCH_COMMIT=$(cat "$_dir/commit" 2>/dev/null)
export VLLM_ALLREDUCE_USE_SYMM_MEM=0   # it uses NVLink multicast, which a shared host may not allow
python3 -c "import flashinfer" 2>/dev/null || export VLLM_USE_FLASHINFER_SAMPLER=0
python3 - <<'P'
import aiohttp, hypothesis, psutil, pytest, torch, triton, vllm
import headgate.capture.session, headgate.consumers.filesystem, headgate.steering.worker.steering_part
import tests.benchmarks.gpu_call  # fails where some package called tests is installed
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print("torch", torch.__version__, "triton", triton.__version__, "vllm", vllm.__version__, "on", ", ".join(gpus) or "no GPU")
print("headgate from", headgate.capture.session.__file__)
P
