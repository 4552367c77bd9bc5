#include "tensorrt/kernel_cache.h"

#include <NvInferVersion.h>

#ifdef TRT_MAJOR_RTX

#include <fstream>
#include <iterator>

#include "bundle/user_cache.h"
#include "formatting.h"
#include "segmented/cudart.h"
#include "tensorrt/flavours.h"

namespace tide {

namespace fs = std::filesystem;

struct KernelCache::Kernels {
  fs::path path;       // of the file; empty: there is no home
  std::string stored;  // what is in it; empty: nothing of use
  std::unique_ptr<nvinfer1::IRuntimeCache> cache;

  void read(std::function<void(std::string const&)> const& log) {
    std::ifstream file(path, std::ios::binary);
    stored.assign(std::istreambuf_iterator<char>(file), {});
    if (stored.empty() || cache->deserialize(stored.data(), stored.size())) return;
    log("the kernels in " + quoted(path) +
        " are damaged, or of another GPU, driver or version: they are compiled again");
    stored.clear();
  }

  // Replaces the file, if there is anything new; a cache that cannot be saved is not worth an error.
  void save() const {
    std::unique_ptr<nvinfer1::IHostMemory> const data(cache->serialize());
    if (path.empty() || data == nullptr) return;
    std::string const kernels(static_cast<char const*>(data->data()), data->size());
    if (kernels != stored) replace_cached(path, kernels);
  }
};

KernelCache::KernelCache(nvinfer1::ICudaEngine& plan, std::string const& version, int gpu,
                         std::function<void(std::string const&)> const& log) {
  std::unique_ptr<nvinfer1::IRuntimeConfig> const config(plan.createRuntimeConfig());
  if (config == nullptr) return;
  std::unique_ptr<nvinfer1::IRuntimeCache> cache(config->createRuntimeCache());
  if (cache == nullptr) return;
  fs::path const folder = user_cache();
  std::string const file = std::string(kFlavour) + "-" + version + "-" + cuda::device_name(gpu) + ".kernels";
  kernels_.reset(new Kernels{folder.empty() ? fs::path() : folder / file, "", std::move(cache)});
  kernels_->read(log);
}

KernelCache::~KernelCache() {
  try {
    if (kernels_ != nullptr) kernels_->save();
  } catch (...) {  // no memory: they are compiled again
  }
}

void KernelCache::attach(nvinfer1::IRuntimeConfig& config) const {
  if (kernels_ != nullptr) config.setRuntimeCache(*kernels_->cache);
}

}  // namespace tide

#else

namespace tide {

struct KernelCache::Kernels {};

KernelCache::KernelCache(nvinfer1::ICudaEngine&, std::string const&, int,
                         std::function<void(std::string const&)> const&) {}
KernelCache::~KernelCache() = default;
void KernelCache::attach(nvinfer1::IRuntimeConfig&) const {}

}  // namespace tide

#endif
