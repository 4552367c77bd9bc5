// A checked bundle in an ONNX Runtime session: what all sequences of an engine share.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <optional>

#include "batch/networks.h"
#include "bundle.h"

namespace tide {

class Session {
 public:
  // Throws BundleError: the graph does not load, or its inputs and outputs are not those of the manifest. ConfigError:
  // threads below 1. ProviderError: ONNX Runtime is too old.
  Session(Bundle bundle, std::optional<std::int64_t> threads);

  Bundle const& bundle() const { return bundle_; }
  Manifest const& manifest() const { return bundle_.manifest; }

  // `Run` of several threads at once is safe; it is what ONNX Runtime's C++ interface wants to have as not const.
  Ort::Session& onnxruntime() { return session_; }

  // For several sequences at once.
  BatchNetworks& batch_networks() { return batch_networks_; }

 private:
  Bundle bundle_;
  Ort::Env env_{nullptr};
  Ort::Session session_{nullptr};
  BatchNetworks batch_networks_;
};

}  // namespace tide
