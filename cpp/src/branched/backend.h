// The branched graph in an ONNX Runtime session, on the CPU.
#pragma once

#include "onnxruntime/session.h"
#include "sequence.h"
#include "packed/networks.h"

namespace tide {

class BranchedBackend final : public Backend {
 public:
  // Loads the graph; `threads` are checked. Throws BundleError: the graph does not load, or its inputs and outputs do
  // not match the manifest. ProviderError: ONNX Runtime is missing or too old. replacement: as of `load_network`.
  BranchedBackend(Bundle bundle, std::optional<std::int64_t> threads, std::string const* replacement = nullptr);

  std::unique_ptr<Sequence> start(std::vector<float> const& thresholds, std::int64_t max_pending,
                                  std::int64_t room) override;

  std::size_t max_batch_size() const override { return batch_networks_.max_batch_size(); }
  std::unique_ptr<Batch> start_batch(double compaction_threshold, std::size_t slots) override;

  // Not const, because ONNX Runtime's C++ interface has no const `Run`, which is safe to call from several threads.
  Ort::Session& session() { return session_; }

 private:
  std::unique_ptr<LoneSequence> start_lone(ExitRule const& rule, KvBuffers& kv);

  ReturnsFreeMemory returns_free_memory_;
  Ort::Env env_{nullptr};
  NetworkSession session_;
  BatchNetworks batch_networks_;
};

}  // namespace tide
