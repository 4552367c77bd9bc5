// The branched graph in an ONNX Runtime session, on the CPU.
#pragma once

#include <onnxruntime_cxx_api.h>

#include "packed/networks.h"
#include "backend.h"

namespace tide {

class GraphSession final : public Session {
 public:
  // `threads` are checked. Throws BundleError: the graph does not load, or its inputs and outputs are not those of the
  // manifest. ProviderError: ONNX Runtime is too old.
  GraphSession(Bundle bundle, std::optional<std::int64_t> threads);

  std::unique_ptr<Sequence> start(std::vector<float> const& thresholds, std::int64_t max_pending,
                                  std::int64_t room) override;

  BatchNetworks* batch_networks() override { return &batch_networks_; }

  // `Run` of several threads at once is safe; it is what ONNX Runtime's C++ interface wants to have as not const.
  Ort::Session& onnxruntime() { return session_; }

 private:
  Ort::Env env_{nullptr};
  Ort::Session session_{nullptr};
  BatchNetworks batch_networks_;
};

}  // namespace tide
