// The kernel of checkpoints on the host, each of its threads a fibre (tests/plugins/fibres), for fake_cudart.cpp.
#include "tide_exit/kernel.cu"

extern "C" int fake_exit(int type, unsigned blocks, TideExitArgs const* args, tide::exits::Plan const* plan) {
  void (*const kernels[])(TideExitArgs, tide::exits::Plan) = {tide_exit_float32, tide_exit_float16, tide_exit_bfloat16};
  cudaLaunchConfig_t const config{dim3(blocks), dim3(TIDE_BLOCK_THREADS), tide::exits::kShared * sizeof(float), nullptr};
  return cudaLaunchKernelEx(&config, kernels[type], *args, *plan);
}
