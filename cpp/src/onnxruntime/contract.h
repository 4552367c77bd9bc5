// Whether a network that was loaded is the one that the manifest calls for.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <filesystem>
#include <map>
#include <string>

namespace tide {

using TensorTypes = std::map<std::string, ONNXTensorElementDataType>;  // by name

// Loads a network and checks that it takes and gives just these tensors: buffers are bound by name, raw type and shape,
// so a network that is another must not get that far. Throws BundleError.
Ort::Session open_network(Ort::Env const& env, std::filesystem::path const& file, Ort::SessionOptions const& options,
                          TensorTypes const& inputs, TensorTypes const& outputs);

}  // namespace tide
