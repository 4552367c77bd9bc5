// Reads the low-rank adapters (LoRA) of an engine, as peft writes them: one row of numbers each, in the order of the manifest's
// targets. Networks read the row of each sequence; row 0, zeros, is for sequences without an adapter.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bundle/store.h"
#include "onnxruntime/session.h"

namespace tide {

using AdapterFolders = std::map<std::string, std::filesystem::path>;  // by name

class Adapters {
 public:
  // Reads each folder's adapter_config.json and adapter_model.safetensors. Throws ConfigError: one cannot be read,
  // is of another model or kind, or has a higher rank than the bundle has room for.
  Adapters(Bundle const& bundle, AdapterFolders const& folders);

  std::int64_t row(std::string const& name) const;  // 0: there is none of this name
  Ort::Value tensor() const;                        // float32 [1 + adapters, numbers of each]

 private:
  struct Free {
    void operator()(float* numbers) const { std::free(numbers); }
  };

  std::vector<std::string> names_;
  std::int64_t size_ = 0;  // of a row
  std::unique_ptr<float[], Free> numbers_;
};

}  // namespace tide
