// Replaces `trt_networks.cpp` where tide_runtime is built without TensorRT.
#include "tensorrt/plans.h"
#include "tide/errors.h"

namespace tide {

std::shared_ptr<Backend> open_plans(Bundle bundle, std::string const& flavour,
                                      std::optional<std::filesystem::path> const&,
                                      std::function<void(std::string const&)> const&, int) {
  check_plans(bundle, flavour);
  throw ProviderError("this tide_runtime was built without TensorRT: configure it with -DTIDE_WITH_TENSORRT=ON and " +
                      title_of(flavour) + "'s headers in TENSORRT_ROOT, or use provider 'cpu'");
}

}  // namespace tide
