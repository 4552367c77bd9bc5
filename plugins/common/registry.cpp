// The plugin library's entry points.
//
// TensorRT's `IPluginRegistry::loadLibrary` opens the library, calls `getCreators` and registers the creators; it fails
// if one is registered already. Other programs, Triton among them, only dlopen the library, so that it also registers
// its creators itself, in the TensorRT that the process has loaded. `getCreators` first undoes that, because its caller
// registers them.
#include "common/registry.h"

#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <mutex>

#include "tide_exit/plugin.h"

namespace tide {
namespace {

using namespace nvinfer1;

constexpr int kCount = 1;

std::array<IPluginCreatorInterface*, kCount> const& creators() {
  static Creator<TideExit> exit;
  static std::array<IPluginCreatorInterface*, kCount> const all{&exit};
  return all;
}

// The registry of the TensorRT that this process has loaded; nullptr: none. Not linked, so that the library also opens
// without TensorRT and finds one that was loaded privately. TIDE_TENSORRT_LIBRARY names another library than the full
// TensorRT. TensorRT-RTX is not searched: it would prefer the plugins to the functions' bodies and then abort.
IPluginRegistry* loaded_registry() {
  char const* const named = std::getenv("TIDE_TENSORRT_LIBRARY");
  std::string const library = named != nullptr ? named : "libnvinfer.so." + std::to_string(NV_TENSORRT_MAJOR);
  void* const handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  auto const get = reinterpret_cast<IPluginRegistry* (*)()>(dlsym(handle, "getPluginRegistry"));
  return get == nullptr ? nullptr : get();
}

class Registration {
 public:
  Registration() noexcept {
    guarded("registration", 0, [&] {
      registry_ = loaded_registry();
      if (registry_ == nullptr) return 0;
      for (int i = 0; i < kCount; ++i) registered_[i] = registry_->registerCreator(*creators()[i], kNamespace);
      return 0;
    });
  }
  void undo() {
    std::lock_guard<std::mutex> const lock(mutex_);
    for (int i = 0; i < kCount; ++i) {
      if (registered_[i]) registry_->deregisterCreator(*creators()[i]);
      registered_[i] = false;
    }
  }

 private:
  IPluginRegistry* registry_ = nullptr;
  std::array<bool, kCount> registered_{};
  std::mutex mutex_;
};

std::mutex finder_mutex;
ILoggerFinder* finder = nullptr;
Registration registration;

}  // namespace

void log_error(char const* plugin, char const* text) noexcept {
  try {
    std::lock_guard<std::mutex> const lock(finder_mutex);
    ILogger* const logger = finder == nullptr ? nullptr : finder->findLogger();
    if (logger != nullptr)
      logger->log(ILogger::Severity::kERROR, (std::string(plugin) + ": " + text).c_str());
  } catch (...) {  // the logger threw
  }
}

}  // namespace tide

extern "C" TIDE_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  tide::guarded("getCreators", 0, [] {
    tide::registration.undo();
    return 0;
  });
  count = tide::kCount;
  return tide::creators().data();
}

extern "C" TIDE_API void setLoggerFinder(nvinfer1::ILoggerFinder* new_finder) {
  std::lock_guard<std::mutex> const lock(tide::finder_mutex);
  if (tide::finder == nullptr) tide::finder = new_finder;
}

// The release of tide_export that this library belongs to.
extern "C" TIDE_API char const* tide_plugins_version() { return TIDE_EXPORT_VERSION; }

// The version of TensorRT's headers it was compiled with, such as "11.1"; a major version has one plugin interface.
extern "C" TIDE_API char const* tide_plugins_tensorrt_version() {
  static std::string const version = std::to_string(NV_TENSORRT_MAJOR) + "." + std::to_string(NV_TENSORRT_MINOR);
  return version.c_str();
}

// The bytes that the plugins have copied in this thread since the last call, because TensorRT gave other memory than the
// input's to an output that is meant to be there; 0: it was in place. Replays of a recorded run are not counted.
extern "C" TIDE_API int64_t tide_plugins_copied_bytes() { return tide::take_copied_bytes(); }
