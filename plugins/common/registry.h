// The creators of plugin classes, which registry.cpp lists for TensorRT.
#pragma once

#include <memory>

#include "common/plugin.h"

namespace tide {

// The creator of plugin class `P`, which has `kName` and `static Attributes defaults()`.
template <class P>
class Creator : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() : defaults_(P::defaults()), fields_(defaults_.fields()) {
    for (nvinfer1::PluginField& field : fields_) field.data = nullptr;  // TensorRT reads names and types, not values
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }

  nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const*, nvinfer1::PluginFieldCollection const* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    return guarded(P::kName, static_cast<nvinfer1::IPluginV3*>(nullptr), [&]() -> nvinfer1::IPluginV3* {
      Attributes attributes = P::defaults();
      if (fields != nullptr) attributes.take(*fields);
      return std::make_unique<P>(std::move(attributes)).release();
    });
  }

  nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &collection_; }
  nvinfer1::AsciiChar const* getPluginName() const noexcept override { return P::kName; }
  nvinfer1::AsciiChar const* getPluginVersion() const noexcept override { return kVersion; }
  nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  Attributes defaults_;  // `fields_` points into it
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace tide
