// Caches the kernels that TensorRT for RTX compiles when plans are loaded, across processes, in the file that the Python
// package uses (tide_export/runtime/tensorrt/kernel_cache.py). TensorRT for RTX accepts only files that the same version wrote
// for the same GPU and driver. TensorRT compiles no kernels then, so nothing is cached.
#pragma once

#include <NvInferRuntime.h>

#include <functional>
#include <memory>
#include <string>

namespace tide {

class KernelCache {
 public:
  // Reads what earlier processes have compiled.
  //
  // plan: any that uses the cache; the GPU must be in use already. version: of the library. gpu: its number. log:
  // receives a sentence if the file is of no use here.
  KernelCache(nvinfer1::ICudaEngine& plan, std::string const& version, int gpu,
              std::function<void(std::string const&)> const& log);
  KernelCache(KernelCache const&) = delete;
  KernelCache& operator=(KernelCache const&) = delete;
  // Saves the kernels, if there are new ones; the contexts that compile them must be gone.
  ~KernelCache();

  // Makes a configuration of execution contexts use the cache.
  void attach(nvinfer1::IRuntimeConfig& config) const;

 private:
  struct Kernels;
  std::unique_ptr<Kernels> kernels_;  // none: not of this flavour
};

}  // namespace tide
