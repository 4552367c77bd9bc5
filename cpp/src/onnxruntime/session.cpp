#include "onnxruntime/session.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>

#include "formatting.h"
#include "onnxruntime/external_data.h"
#include "onnxruntime/operators.h"
#include "tide/errors.h"

namespace tide {
namespace {

// How long a worker thread spins for the next operator before it sleeps. If it slept at once, waking it would take longer
// than its half of a small matmul: two threads are then no faster than one. ONNX Runtime's default is milliseconds, which
// starves whatever else runs on the cores, another engine first of all (tools/benchmarks/threads.py).
constexpr char const* kSpinMicroseconds = "20";
constexpr char const* kFloat32Matmuls = "1";  // the accuracy_level of MatMulNBits

namespace abi = Ort::abi;

std::map<std::string, Ort::ElementType> const kTypes = {
    {"float32", abi::kFloat}, {"float16", abi::kFloat16}, {"bfloat16", abi::kBFloat16}, {"float64", Ort::kDouble},
    {"int64", abi::kInt64},   {"int32", abi::kInt32},     {"int16", Ort::kInt16},       {"int8", abi::kInt8},
    {"uint8", abi::kUInt8},   {"bool", abi::kBool}};

Tensor tensor_of(Ort::TensorInfo const& info, bool is_input) {
  Tensor tensor{info.name, is_input, "another type", {}};
  if (!info.is_tensor) return tensor;
  for (auto const& [dtype, element] : kTypes) {
    if (element == info.type) tensor.dtype = dtype;
  }
  tensor.shape = info.shape;
  for (std::size_t d = 0; d < info.shape.size(); ++d) {
    if (tensor.shape[d] >= 0) continue;
    tensor.shape[d] = info.symbols[d] == "batch" ? kSequences : info.symbols[d] == "keys" ? kKeys : kTokens;
  }
  return tensor;
}

// threads: of one run, 1 or more; none: one per physical core.
Ort::SessionOptions session_options(std::optional<std::int64_t> threads) {
  Ort::SessionOptions options;
  options.set_threads(static_cast<int>(threads.value_or(0)));
  options.set("session.intra_op.spin_duration_us", kSpinMicroseconds);
  // By default it would round the inputs of dequantized matrices to 8 bits.
  options.set("session.qdq_matmulnbits_accuracy_level", kFloat32Matmuls);
  options.set_log_level(Ort::kFatal);  // errors reach the caller as exceptions
  return options;
}

// A folder with an empty file: ONNX Runtime insists on the file of weights that it is given from memory.
class EmptyFile {
 public:
  explicit EmptyFile(std::string const& name) {
    folder_ = (std::filesystem::temp_directory_path() / "tide-XXXXXX").string();
    if (::mkdtemp(folder_.data()) == nullptr) throw std::filesystem::filesystem_error(folder_, std::error_code());
    std::ofstream(std::filesystem::path(folder_) / name);
  }
  ~EmptyFile() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  EmptyFile(EmptyFile const&) = delete;
  EmptyFile& operator=(EmptyFile const&) = delete;

  std::string const& folder() const { return folder_; }

 private:
  std::string folder_;
};

}  // namespace

ReturnsFreeMemory::~ReturnsFreeMemory() {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
}

NetworkSession load_network(Ort::Env const& env, Bundle const& bundle, std::string const& name,
                            std::optional<std::int64_t> threads, char const* weights, std::optional<OnCuda> gpu,
                            std::string const* replacement) {
  BundleFile const& file = bundle.file(name);
  std::string const graph = replacement == nullptr ? file.read() : *replacement;
  std::string const location = std::filesystem::path(weights).filename().string();
  SharedWeights shared;
  std::vector<std::string> names;
  auto const cpu = Ort::MemoryInfo::cpu();
  // folder: where ONNX Runtime would look for weights that it is not given.
  auto const opened = [&](std::string const& folder, bool shares) {
    Ort::SessionOptions options = session_options(threads);
    options.set("session.model_external_initializers_file_folder_path", folder.c_str());
    (gpu ? register_cuda_operators : register_operators)(options);
    if (gpu) options.run_on_cuda(gpu->gpu, gpu->stream, gpu->records);
    for (std::size_t i = 0; shares && i < names.size(); ++i) options.add_initializer(names[i].c_str(), shared.weights[i]);
    if (!shares && !names.empty()) options.add_external_initializers(names, shared.weights);
    return Ort::Session(env, graph.data(), graph.size(), options);
  };
  try {
    for (ExternalTensor const& tensor : external_tensors(graph)) {
      if (tensor.location != location) continue;
      if (!shared.memory) shared.memory = bundle.file(weights).map();
      std::optional<std::size_t> const size = tensor.size();
      if (!size) {
        throw BundleError(quoted(file.path()) + " keeps " + tensor.name +
                          " in another file, in a type of tensor that no bundle has");
      }
      if (tensor.offset > shared.memory->size() || *size > shared.memory->size() - tensor.offset) {
        throw BundleError(quoted(file.path()) + " has the tensor " + tensor.name +
                          " outside of the file of its weights");
      }
      names.push_back(tensor.name);
      shared.weights.push_back(Ort::Value::on(cpu, shared.memory->data() + tensor.offset, *size, tensor.shape.data(),
                                              tensor.shape.size(), tensor.type));
    }
    Ort::Session session(nullptr);
    if (shared.memory && !gpu) {
      try {
        session = opened(EmptyFile(location).folder(), true);
      } catch (std::exception const&) {  // it computes something from a weight while it loads, and reads the empty file
      }
    }
    bool const shares{session};
    if (!shares) session = opened("/dev/null", false);
    if (shared.memory) {
      bundle.file(weights).check_unchanged();
      shared.memory->forget_pages();  // of weights that were packed; others are mapped again
    }
    return NetworkSession(shares ? std::move(shared) : SharedWeights(), std::move(session));
  } catch (Ort::Exception const& error) {
    throw BundleError("ONNX Runtime cannot load " + quoted(file.path()) + ": " + first_line(error));
  }
}

std::vector<Tensor> tensors_of(Ort::Session const& session) {
  std::vector<Tensor> tensors;
  for (Ort::TensorInfo const& info : session.inputs()) tensors.push_back(tensor_of(info, true));
  for (Ort::TensorInfo const& info : session.outputs()) tensors.push_back(tensor_of(info, false));
  return tensors;
}

Ort::ElementType element_type(std::string const& dtype) { return kTypes.at(dtype); }

}  // namespace tide
