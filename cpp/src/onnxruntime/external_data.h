// Finds a network's external weights, so that a session reads them from memory instead of a path. Parses only these fields of
// onnx.proto from the protobuf wire format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tide {

// An initializer whose data are in the file `location`; `type` is a TensorProto.DataType, which is also ONNX Runtime's.
struct ExternalTensor {
  std::string name;
  int type = 0;
  std::vector<std::int64_t> shape;
  std::string location;
  std::uint64_t offset = 0;

  // Bytes of all elements, the largest number if they cannot be counted; none for a type that no bundle has.
  std::optional<std::size_t> size() const;
};

// The initializers of a model's graph that are stored in other files; none where `model` is no ONNX model.
std::vector<ExternalTensor> external_tensors(std::string_view model);

}  // namespace tide
