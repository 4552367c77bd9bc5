// The operator TideExit for CUDA: a launch of the kernel of plugins/tide_exit, which the library holds as PTX.
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "../../../plugins/tide_exit/plan.h"
#include "../../ops/kernel.h"
#include "onnxruntime/exit_kernel.ptx.h"
#include "onnxruntime/operators.h"
#include "segmented/cuda.h"

namespace tide {
namespace {

namespace abi = tide_ops::abi;

constexpr std::size_t kRequired = 6;  // inputs, after which there are any number
constexpr int kStateTypes[] = {abi::kFloat, abi::kFloat16, abi::kBFloat16};  // of TideType
constexpr std::int64_t kCounterBytes = 1024;

static_assert(TIDE_EXIT_COUNTERS * sizeof(std::uint32_t) <= kCounterBytes, "the counters come before the workspace");

// The operator for one type of states.
struct ExitOperator : abi::Operator {
  TideType type;
};

int type_of(abi::Operator const* op) { return kStateTypes[static_cast<ExitOperator const*>(op)->type]; }

abi::Api& api() {
  static abi::Api* const opened = [] {
    auto* const made = new abi::Api();
    made->set(Ort::functions().table);
    return made;
  }();
  return *opened;
}

template <typename Work>
abi::Status* guarded(Work const& work) {
  try {
    work();
    return nullptr;
  } catch (std::exception const& error) {
    return api().CreateStatus(abi::kInvalidArgument, error.what());
  }
}

cuda::Library load_library() {
  cuda::Functions const& functions = cuda::functions();
  if (functions.LibraryLoadData == nullptr) throw GenerationError("the CUDA runtime is older than 12.8: install CUDA 13");
  cuda::Library library = nullptr;
  cuda::require(functions.LibraryLoadData(&library, kExitKernel, nullptr, nullptr, 0, nullptr, nullptr, 0),
                "cudaLibraryLoadData");
  return library;
}

cuda::Kernel kernel_of(TideType type) {
  static cuda::Library const library = load_library();  // which stays loaded
  cuda::Kernel kernel = nullptr;
  cuda::require(cuda::functions().LibraryGetKernel(&kernel, library, exits::kKernels[type]), "cudaLibraryGetKernel");
  return kernel;
}

// What a node of a network keeps.
class ExitNode {
 public:
  ExitNode(TideType type, void const* info) : kernel_(kernel_of(type)) {
    char norm[8];
    std::size_t size = sizeof norm;
    std::int64_t lens = 0, shortlist = 0;
    Ort::require(api().KernelInfoGetAttribute_int64(info, "lens", &lens));
    Ort::require(api().KernelInfoGetAttribute_int64(info, "shortlist", &shortlist));
    Ort::require(api().KernelInfoGetAttribute_float(info, "epsilon", &args_.norm.epsilon));
    Ort::require(api().KernelInfoGetAttribute_string(info, "norm", norm, &size));
    args_.states_type = type;
    std::string const kind = norm;
    args_.norm.kind = kind == "rms" ? TIDE_NORM_RMS : kind == "layer" ? TIDE_NORM_LAYER : TIDE_NORM_NONE;
    lens_ = lens != 0;
    shortlist_ = shortlist != 0;
  }
  ~ExitNode() {
    for (auto const& [stream, memory] : memory_) {
      for (void* const block : memory.blocks) cuda::functions().Free(block);
    }
  }

  void run(abi::Context* context) {
    TideExitArgs args = args_;
    std::size_t index = 0, count = 0;
    std::vector<std::int64_t> dims;  // of the last input
    auto const next = [&](auto& pointer) {
      abi::Value const* value = nullptr;
      Ort::RawShape* shape = nullptr;
      void* data = nullptr;
      Ort::require(api().KernelContext_GetInput(context, index++, &value));
      Ort::require(api().GetTensorMutableData(const_cast<abi::Value*>(value), &data));
      Ort::require(api().GetTensorTypeAndShape(value, &shape));
      dims = Ort::Shape(shape).dims();
      pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(data);
    };
    Ort::require(api().KernelContext_GetInputCount(context, &count));
    next(args.states);
    args.slots = dims.at(0), args.tokens = dims.at(1), args.hidden = dims.at(2);
    next(args.last_tokens);
    next(args.thresholds);
    void* given = nullptr;
    next(given);
    std::vector<std::int64_t> const rows = dims;  // [slots, 1, rows, hidden]
    args.exit_rows = rows.at(2);
    next(args.down);
    args.bottleneck = dims.at(1);
    next(args.up);
    next(args.bias);
    if (shortlist_) {
      next(args.shortlist_weight);
      args.shortlist = dims.at(1);
      next(args.confidence);
    }
    if (lens_) {
      next(args.lens_down);
      args.lens_rank = dims.at(1);
      next(args.lens_up);
      next(args.lens_bias);
    }
    if (args.norm.kind != TIDE_NORM_NONE) next(args.norm.scale);
    if (index < count) next(args.norm.shift);
    if (index != count || !exits::usable(args)) throw std::invalid_argument("TideExit has other inputs than it takes");
    auto const output = [&](std::size_t number, std::vector<std::int64_t> const& shape, auto& pointer) {
      abi::Value* value = nullptr;
      Ort::require(api().KernelContext_GetOutput(context, number, shape.data(), shape.size(), &value));
      Ort::require(api().GetTensorMutableData(value, reinterpret_cast<void**>(&pointer)));
    };
    output(0, rows, args.exit_states);
    output(1, {args.slots}, args.scores);
    output(2, {args.slots}, args.exits);
    cuda::Stream stream = nullptr;
    Ort::require(api().KernelContext_GetGPUComputeStream(context, &stream));
    if (args.exit_states != given) {
      auto const bytes = static_cast<std::size_t>(args.slots * args.exit_rows * args.hidden) *
                         (args.states_type == TIDE_FLOAT32 ? 4 : 2);
      cuda::require(cuda::functions().MemcpyAsync(args.exit_states, given, bytes, cuda::kDeviceToDevice, stream),
                    "cudaMemcpyAsync");
    }
    launch(args, stream);
  }

 private:
  // Counters and workspace of the runs on one stream, which follow each other. What was too small stays: recorded runs
  // use it.
  struct Memory {
    std::vector<void*> blocks;
    std::int64_t size = 0;
  };

  void* memory(std::int64_t size, cuda::Stream stream) {
    std::lock_guard<std::mutex> const lock(mutex_);
    Memory& of_stream = memory_[stream];
    if (size > of_stream.size) {
      void* made = nullptr;
      cuda::require(cuda::functions().Malloc(&made, static_cast<std::size_t>(size)), "cudaMalloc");
      of_stream.blocks.push_back(made);
      of_stream.size = size;
      cuda::require(cuda::functions().MemsetAsync(made, 0, kCounterBytes, stream), "cudaMemsetAsync");
    }
    return of_stream.blocks.back();
  }

  void launch(TideExitArgs args, cuda::Stream stream) {
    auto* const start = static_cast<std::byte*>(memory(kCounterBytes + exits::workspace_bytes(args), stream));
    auto const status = exits::launch_all(
        args, start + kCounterBytes, reinterpret_cast<std::uint32_t*>(start), [&](unsigned blocks, exits::Plan plan) {
          void* arguments[] = {&args, &plan};
          return cuda::functions().LaunchKernel(kernel_, {blocks, 1, 1}, {TIDE_BLOCK_THREADS, 1, 1}, arguments,
                                                exits::kShared * sizeof(float), stream);
        });
    cuda::require(status, "cudaLaunchKernel");
  }

  cuda::Kernel const kernel_;
  TideExitArgs args_{};
  bool lens_, shortlist_;
  std::mutex mutex_;
  std::map<cuda::Stream, Memory> memory_;
};

ExitOperator exit_operator(TideType type) {
  ExitOperator op{tide_ops::cpu_operator(), type};
  op.GetExecutionProviderType = [](abi::Operator const*) { return "CUDAExecutionProvider"; };
  op.GetName = [](abi::Operator const*) { return "TideExit"; };
  op.GetInputTypeCount = [](abi::Operator const*) { return kRequired + 1; };
  op.GetInputType = [](abi::Operator const* self, std::size_t index) {
    constexpr int kAny = 0;
    if (index == kRequired) return kAny;
    return index == 0 || index == 3 ? type_of(self) : index == 1 ? abi::kInt64 : abi::kFloat;
  };
  op.GetInputCharacteristic = [](abi::Operator const*, std::size_t index) { return index < kRequired ? 0 : abi::kVariadic; };
  op.GetVariadicInputHomogeneity = [](abi::Operator const*) { return 0; };
  op.GetOutputTypeCount = [](abi::Operator const*) -> std::size_t { return 3; };
  op.GetOutputType = [](abi::Operator const* self, std::size_t index) {
    return index == 0 ? type_of(self) : index == 1 ? abi::kFloat : abi::kInt32;
  };
  op.CreateKernelV2 = [](abi::Operator const* self, void const*, void const* info, void** kernel) {
    return guarded([&] { *kernel = new ExitNode(static_cast<ExitOperator const*>(self)->type, info); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<ExitNode*>(kernel); };
  op.KernelComputeV2 = [](void* kernel, abi::Context* context) {
    return guarded([&] { static_cast<ExitNode*>(kernel)->run(context); });
  };
  return op;
}

abi::Domain* make_domain() {
  abi::Domain* domain = nullptr;
  Ort::require(api().CreateCustomOpDomain("tide", &domain));
  for (TideType const type : {TIDE_FLOAT32, TIDE_FLOAT16, TIDE_BFLOAT16}) {
    Ort::require(api().CustomOpDomain_Add(domain, new ExitOperator(exit_operator(type))));
  }
  return domain;
}

}  // namespace

void register_cuda_operators(Ort::SessionOptions& options) {
  static abi::Domain* const domain = make_domain();  // sessions refer to it as long as they live
  Ort::require(api().AddCustomOpDomain(options.get(), domain));
}

}  // namespace tide
