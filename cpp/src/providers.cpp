// Chooses the provider that runs a bundle: the one that is named, or for "auto" the bundle's TensorRT engines if they
// run here, else ONNX Runtime on the CPU. Messages are those of tide_export/runtime/providers.py.
#include <iostream>

#include "branched/backend.h"
#include "tensorrt/engines.h"
#include "formatting.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::int64_t kMaxThreads = 1024;  // above the cores of most machines; ONNX Runtime starts all of them
constexpr std::int64_t kMaxDevice = 1023;

using Log = std::function<void(std::string const&)>;

void check(Bundle const& bundle, LoadOptions const& options) {
  std::string const& provider = options.provider;
  if (provider != "auto" && provider != "cpu" && !is_flavour(provider)) {
    throw ProviderError("provider must be one of auto, cpu, tensorrt, tensorrt-rtx, not '" + provider + "'");
  }
  if (auto const& threads = options.threads; threads) {
    if (*threads < 1 || *threads > kMaxThreads) {
      throw ConfigError("threads must be a whole number from 1 to " + std::to_string(kMaxThreads) + ", not " +
                        std::to_string(*threads));
    }
  }
  if (options.plugins && *options.plugins != kNoPlugins) {
    auto const& engines = bundle.manifest.engines;
    if (!engines || !engines->plugins) {
      throw ProviderError("no engine of bundle " + quoted(bundle.path) + " holds plugins: omit plugins");
    }
    if (provider == "cpu") {
      throw ProviderError("provider 'cpu' runs no engine that could hold plugins: omit plugins");
    }
  }
  if (options.threads && is_flavour(provider)) {
    throw ProviderError("threads are for the CPU, and provider '" + provider + "' runs on the GPU: omit threads");
  }
  if (auto const& device = options.device; device) {
    if (*device < 0 || *device > kMaxDevice) {
      throw ConfigError("device must be a whole number from 0 to " + std::to_string(kMaxDevice) + ", not " +
                        std::to_string(*device));
    }
    if (!is_flavour(provider)) {
      throw ProviderError("device is the number of a GPU: name a provider that runs on one");
    }
  }
}

}  // namespace

std::shared_ptr<Backend> open_backend(Bundle bundle, LoadOptions const& options) {
  check(bundle, options);
  Log const log = options.log ? options.log : [](std::string const& sentence) {
    std::cerr << "tide_runtime: " + sentence + "\n";
  };
  if (is_flavour(options.provider)) {
    int const gpu = static_cast<int>(options.device.value_or(0));
    return open_engines(std::move(bundle), options.provider, options.plugins, log, gpu);
  }
  if (options.provider == "auto" && bundle.manifest.engines) {
    std::string const flavour = bundle.manifest.engines->flavour, path = quoted(bundle.path);
    std::vector<std::string> sentences;  // logged after the `try`: exceptions of the caller's function are passed on
    std::shared_ptr<Backend> opened;
    try {
      opened = open_engines(bundle, flavour, options.plugins,
                            [&](std::string const& sentence) { sentences.push_back(sentence); });
      sentences.push_back("running " + path + " with " + title_of(flavour));
    } catch (ProviderError const& error) {
      sentences.push_back("running " + path + " with ONNX Runtime on the CPU, not with " + flavour + ": " +
                          error.what());
    }
    for (std::string const& sentence : sentences) log(sentence);
    if (opened) return opened;
  }
  return std::make_shared<BranchedBackend>(std::move(bundle), options.threads);
}

}  // namespace tide
