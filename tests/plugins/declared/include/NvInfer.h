// What plugins/ and the C++ of these tests use of TensorRT 11's plugin interface, for machines without TensorRT's
// public headers: types, values of enumerators, and virtual functions, in TensorRT's order. With TENSORRT_ROOT the
// tests use NVIDIA's headers, and compare (test_declared_tensorrt.py). What is compiled with this is loaded into
// NVIDIA's own library by test_real_tensorrt.py. For tests alone: libraries for users are compiled with NVIDIA's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#define NV_TENSORRT_MAJOR 11
#define NV_TENSORRT_MINOR 1

namespace nvinfer1 {

using AsciiChar = char;

enum class DataType : int32_t { kFLOAT = 0, kHALF = 1, kINT32 = 3, kBF16 = 7, kINT64 = 8 };
enum class TensorFormat : int32_t { kLINEAR = 0, kCHW32 = 5 };
enum class DimensionOperation : int32_t { kCEIL_DIV = 8 };
enum class PluginFieldType : int32_t { kFLOAT32 = 1, kFLOAT64 = 2, kINT32 = 5, kCHAR = 6, kUNKNOWN = 8, kINT64 = 10 };
enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };
enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };
enum class APILanguage : int32_t { kCPP = 0 };
using PluginFormat = TensorFormat;

struct Dims64 {
  static constexpr int32_t MAX_DIMS{8};
  int32_t nbDims;
  int64_t d[MAX_DIMS];
};
using Dims = Dims64;

struct PluginField {
  AsciiChar const* name;
  void const* data;
  PluginFieldType type;
  int32_t length;
  PluginField(AsciiChar const* name_ = nullptr, void const* data_ = nullptr,
              PluginFieldType type_ = PluginFieldType::kUNKNOWN, int32_t length_ = 0) noexcept
      : name(name_), data(data_), type(type_), length(length_) {}
};

struct PluginFieldCollection {
  int32_t nbFields{};
  PluginField const* fields{};
};

struct PluginTensorDesc {
  Dims dims;
  DataType type;
  TensorFormat format;
  float scale;
};

struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;
  Dims min;
  Dims max;
  Dims opt;
};

struct InterfaceInfo {
  char const* kind;
  int32_t major;
  int32_t minor;
};

class IVersionedInterface {
 public:
  virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
  virtual ~IVersionedInterface() noexcept = default;
};

namespace apiv {

class VRoot;
class VDimensionExpr;
class VExprBuilder;

}  // namespace apiv

// What TensorRT gives: calls go to the implementation.
class INoCopy {
 protected:
  virtual ~INoCopy() = default;
};

class IDimensionExpr : public INoCopy {
 public:
  inline bool isConstant() const noexcept;
  inline int64_t getConstantValue() const noexcept;
  inline bool isSizeTensor() const noexcept;

 protected:
  apiv::VDimensionExpr* mImpl;
};

class IExprBuilder : public INoCopy {
 public:
  inline IDimensionExpr const* constant(int64_t value) noexcept;
  inline IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first,
                                         IDimensionExpr const& second) noexcept;
  inline IDimensionExpr const* declareSizeTensor(int32_t output, IDimensionExpr const& opt,
                                                 IDimensionExpr const& upper);

 protected:
  apiv::VExprBuilder* mImpl;
};

struct DimsExprs {
  int32_t nbDims;
  IDimensionExpr const* d[Dims::MAX_DIMS];
};

namespace apiv {

class VRoot {
 public:
  virtual ~VRoot() noexcept = default;
};

class VDimensionExpr : public VRoot {
 public:
  virtual bool isConstant() const = 0;
  virtual int64_t getConstantValue() const = 0;
  virtual bool isSizeTensor() const = 0;
};

class VExprBuilder : public VRoot {
 public:
  virtual IDimensionExpr const* constant(int64_t value) = 0;
  virtual IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& first,
                                          IDimensionExpr const& second) = 0;
  virtual IDimensionExpr const* declareSizeTensor(int32_t outputIndex, IDimensionExpr const& opt,
                                                  IDimensionExpr const& upper) = 0;
};

}  // namespace apiv

bool IDimensionExpr::isConstant() const noexcept { return mImpl->isConstant(); }
int64_t IDimensionExpr::getConstantValue() const noexcept { return mImpl->getConstantValue(); }
bool IDimensionExpr::isSizeTensor() const noexcept { return mImpl->isSizeTensor(); }
IDimensionExpr const* IExprBuilder::constant(int64_t value) noexcept { return mImpl->constant(value); }
IDimensionExpr const* IExprBuilder::operation(DimensionOperation op, IDimensionExpr const& first,
                                              IDimensionExpr const& second) noexcept {
  return mImpl->operation(op, first, second);
}
IDimensionExpr const* IExprBuilder::declareSizeTensor(int32_t output, IDimensionExpr const& opt,
                                                      IDimensionExpr const& upper) {
  return mImpl->declareSizeTensor(output, opt, upper);
}

// The namespaces are part of the types' names in the binary.
namespace v_1_0 {

class IErrorRecorder;

class ILogger : public IVersionedInterface {
 public:
  enum class Severity : int32_t { kERROR = 1 };
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILogger", 1, 0}; }
  virtual void log(Severity severity, AsciiChar const* msg) noexcept = 0;
};

class IPluginCapability : public IVersionedInterface {};
class IPluginResource;
class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
  virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
  virtual IPluginV3* clone() noexcept = 0;
};

}  // namespace v_1_0

using v_1_0::IErrorRecorder;
using v_1_0::ILogger;
using v_1_0::IPluginCapability;
using v_1_0::IPluginCreatorInterface;
using v_1_0::IPluginResource;
using v_1_0::IPluginV3;

class IPluginResourceContext;

namespace v_1_0 {

class ILoggerFinder : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILoggerFinder", 1, 0}; }
  virtual ILogger* findLogger() = 0;
};

class IPluginV3OneCore : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
  virtual AsciiChar const* getPluginName() const noexcept = 0;
  virtual AsciiChar const* getPluginVersion() const noexcept = 0;
  virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
  virtual int32_t configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs,
                                  DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept = 0;
  virtual int32_t getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes,
                                     int32_t nbInputs) const noexcept = 0;
  virtual int32_t getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const* shapeInputs,
                                  int32_t nbShapeInputs, DimsExprs* outputs, int32_t nbOutputs,
                                  IExprBuilder& exprBuilder) noexcept = 0;
  virtual bool supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
                                         int32_t nbOutputs) noexcept = 0;
  virtual int32_t getNbOutputs() const noexcept = 0;
  virtual size_t getWorkspaceSize(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                                  int32_t) const noexcept {
    return 0;
  }
  virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
  virtual int32_t getNbTactics() noexcept { return 0; }
  virtual char const* getTimingCacheID() noexcept { return nullptr; }
  virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
  virtual char const* getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
  virtual int32_t setTactic(int32_t) noexcept { return 0; }
  virtual int32_t onShapeChange(PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out,
                                int32_t nbOutputs) noexcept = 0;
  virtual int32_t enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const* outputDesc,
                          void const* const* inputs, void* const* outputs, void* workspace,
                          cudaStream_t stream) noexcept = 0;
  virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
  virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
  virtual IPluginV3* createPlugin(AsciiChar const* name, PluginFieldCollection const* fc,
                                  TensorRTPhase phase) noexcept = 0;
  virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
  virtual AsciiChar const* getPluginName() const noexcept = 0;
  virtual AsciiChar const* getPluginVersion() const noexcept = 0;
  virtual AsciiChar const* getPluginNamespace() const noexcept = 0;
};

}  // namespace v_1_0

namespace v_2_0 {

class IPluginV3OneBuild : public v_1_0::IPluginV3OneBuild {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 2, 0}; }
  virtual int32_t getAliasedInput(int32_t) noexcept { return -1; }
};

}  // namespace v_2_0

using v_1_0::ILoggerFinder;
using v_1_0::IPluginCreatorV3One;
using v_1_0::IPluginV3OneCore;
using v_1_0::IPluginV3OneRuntime;
using IPluginV3OneBuildV2 = v_2_0::IPluginV3OneBuild;

class IPluginRegistry {
 public:
  using PluginLibraryHandle = void*;

 protected:
  virtual ~IPluginRegistry() noexcept = default;

 public:
  virtual void setErrorRecorder(IErrorRecorder* recorder) noexcept = 0;
  virtual IErrorRecorder* getErrorRecorder() const noexcept = 0;
  virtual bool isParentSearchEnabled() const = 0;
  virtual void setParentSearchEnabled(bool enabled) = 0;
  virtual PluginLibraryHandle loadLibrary(AsciiChar const* pluginPath) noexcept = 0;
  virtual void deregisterLibrary(PluginLibraryHandle handle) noexcept = 0;
  virtual bool registerCreator(IPluginCreatorInterface& creator, AsciiChar const* pluginNamespace) noexcept = 0;
  virtual IPluginCreatorInterface* const* getAllCreators(int32_t* numCreators) const noexcept = 0;
  virtual IPluginCreatorInterface* getCreator(AsciiChar const* pluginName, AsciiChar const* pluginVersion,
                                              AsciiChar const* pluginNamespace = "") noexcept = 0;
  virtual bool deregisterCreator(IPluginCreatorInterface const& creator) noexcept = 0;
  virtual IPluginResource* acquirePluginResource(AsciiChar const* key, IPluginResource* resource) noexcept = 0;
  virtual int32_t releasePluginResource(AsciiChar const* key) noexcept = 0;
  virtual IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t* numCreators) noexcept = 0;
};

}  // namespace nvinfer1
