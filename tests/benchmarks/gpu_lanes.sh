# Source this after gpu_host.sh where a host has several GPUs and what is to run needs one:  two calls take the time of one.
#   lane GPU COMMAND...   runs a command on one GPU, with its share of the processors and a compile cache of its own
lane() {
  _gpu=$1; shift
  _share=$(( $(nproc) / $(nvidia-smi -L | wc -l) ))
  CUDA_VISIBLE_DEVICES=$_gpu VLLM_CACHE_ROOT=/tmp/lane$_gpu taskset -c $(( _gpu * _share ))-$(( _gpu * _share + _share - 1 )) "$@"
}
