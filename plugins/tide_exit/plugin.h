// The TensorRT side of TideExit; inputs, outputs and attributes are in plugins/README.md.
#pragma once

#include "common/plugin.h"
#include "tide_exit/kernel.cuh"

namespace tide {

// The kernel's counters, in the device's memory from the first call on. A copy of them is none yet: TensorRT gives each context
// a clone of the plugin, and runs of one context follow each other.
class Counters {
 public:
  Counters() = default;
  Counters(Counters const&) {}
  Counters& operator=(Counters const&) = delete;
  ~Counters() { cudaFree(memory_); }

  uint32_t* get(cudaStream_t stream);  // throws Misuse: CUDA has no memory

 private:
  void* memory_ = nullptr;
};

class TideExit final : public Plugin {
 public:
  static constexpr char const* kName = "TideExit";
  static Attributes defaults();

  explicit TideExit(Attributes attributes);

  nvinfer1::IPluginV3* clone() noexcept override;
  int32_t getNbOutputs() const noexcept override { return 3; }
  int32_t getAliasedInput(int32_t output) noexcept override;

 private:
  bool takes_inputs(int32_t count) const override;
  nvinfer1::DataType output_type(int32_t output, nvinfer1::DataType const* inputs) const override;
  void output_shapes(nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
                     nvinfer1::IExprBuilder& builder) const override;
  bool supports(int32_t position, nvinfer1::DynamicPluginTensorDesc const* inputs) const override;
  int64_t workspace_size(nvinfer1::PluginTensorDesc const* inputs, int32_t input_count) const override;
  void launch(nvinfer1::PluginTensorDesc const* input_desc, nvinfer1::PluginTensorDesc const* output_desc,
              void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) const override;

  TideExitArgs sizes(nvinfer1::PluginTensorDesc const* inputs) const;

  TideNormArgs norm_;
  // The inputs after the fixed ones: where the shortlist's two, the lens's three and the norm's begin.
  int32_t shortlist_, lens_, norm_weights_;
  mutable Counters counters_;
};

}  // namespace tide
