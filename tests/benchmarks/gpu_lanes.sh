# Source this after gpu_host.sh where a host has several GPUs and what is to run needs one: two calls take the time of one.
#   LIMIT=585                             seconds that the shell may take, set before
#   lane GPU COMMAND...                   runs a command on one GPU, with its share of the processors and a compile cache of its own
#   call GPU SECONDS CALL [MODEL] [ARGUMENT...]   gpu_call in a lane; what it prints and keeps goes to $OUT/CALL
#   left                                  seconds until LIMIT
#   await_lanes                           waits for what runs in the background, until LIMIT; prints the ends of what calls printed
# One sequence of calls for each lane, in the background:  (call 0 330 soak; call 0 $(left) race) & (call 1 $(left) http-parts) & await_lanes
lane() {
  _gpu=$1; shift
  _share=$(( $(nproc) / $(nvidia-smi -L | wc -l) ))
  CUDA_VISIBLE_DEVICES=$_gpu VLLM_CACHE_ROOT=/tmp/lane$_gpu taskset -c $(( _gpu * _share ))-$(( _gpu * _share + _share - 1 )) "$@"
}
left() { echo $(( LIMIT - SECONDS )); }
call() {
  _lane=$1 _seconds=$2 _call=$3 _model=gemma3-4b; shift 3
  case "$1" in ''|-*) ;; *) _model=$1; shift ;; esac
  mkdir -p "$OUT/$_call"
  lane "$_lane" python3 -m tests.benchmarks.gpu_call "$_call" "$_model" --out "$OUT/$_call" --seconds "$_seconds" "$@" > "$OUT/$_call/printed.txt" 2>&1
  echo "ended after $SECONDS s with status $?" >> "$OUT/$_call/printed.txt"
}
await_lanes() {
  while [ "$SECONDS" -lt "$LIMIT" ] && [ -n "$(jobs -rp)" ]; do sleep 1; done
  for _printed in "$OUT"/*/printed.txt; do echo "##### $_printed"; tail -c 4000 "$_printed"; done
}
