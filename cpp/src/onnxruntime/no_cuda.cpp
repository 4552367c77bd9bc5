// Replaces `cuda_segments.cpp` where tide_runtime is built without CUDA.
#include "onnxruntime/segments.h"
#include "tide/errors.h"

namespace tide {

bool has_gpu() { return false; }

std::shared_ptr<Backend> open_cuda(Bundle, int) {
  throw ProviderError(
      "this tide_runtime was built without CUDA: configure it with -DTIDE_WITH_CUDA=ON, or use provider 'cpu'");
}

}  // namespace tide
