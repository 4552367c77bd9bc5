// Chooses the provider that runs a bundle: the one that is named, or for "auto" the first that runs here of the bundle's
// TensorRT plans, its segment networks in ONNX Runtime on CUDA, and its graph in ONNX Runtime on the CPU.
#include <iostream>

#include "onnxruntime/segments.h"
#include "paged/backend.h"
#include "segmented/cudart.h"
#include "tensorrt/plans.h"
#include "formatting.h"
#include "tide/errors.h"

namespace tide {
namespace {

constexpr std::int64_t kMaxThreads = 1024;  // above the cores of most machines; ONNX Runtime starts all of them
constexpr std::int64_t kMaxDevice = 1023;

constexpr char const* kCuda = "cuda";

constexpr char const* kNetworks = "cpu-networks";

bool runs_on_cpu(std::string const& provider) { return provider == "cpu" || provider == kNetworks; }
bool runs_on_gpu(std::string const& provider) { return provider == kCuda || is_flavour(provider); }

using Log = std::function<void(std::string const&)>;

void check(Bundle const& bundle, LoadOptions const& options) {
  std::string const& provider = options.provider;
  if (provider != "auto" && !runs_on_cpu(provider) && !runs_on_gpu(provider)) {
    throw ProviderError("provider must be one of auto, cpu, cuda, tensorrt, tensorrt-rtx, not '" + provider + "'");
  }
  if (auto const& threads = options.threads; threads) {
    if (*threads < 1 || *threads > kMaxThreads) {
      throw ConfigError("threads must be a whole number from 1 to " + std::to_string(kMaxThreads) + ", not " +
                        std::to_string(*threads));
    }
  }
  if (options.plugins && *options.plugins != kNoPlugins) {
    auto const& plans = bundle.manifest.engines;
    if (!plans || !plans->plugins) {
      throw ProviderError("no plan of bundle " + quoted(bundle.path) + " holds plugins: omit plugins");
    }
    if (provider == "cpu" || provider == kCuda) {
      throw ProviderError("provider '" + provider + "' runs no plan that could hold plugins: omit plugins");
    }
  }
  if (!options.adapters.empty() && !bundle.manifest.model.lora) {
    throw ConfigError("bundle " + quoted(bundle.path) + " has no room for adapters: export it with --lora-rank");
  }
  if (!options.adapters.empty() && provider != "auto" && provider != "cpu") {
    throw ProviderError("adapters are for provider 'cpu', not '" + provider + "': omit adapters");
  }
  if (options.threads && runs_on_gpu(provider)) {
    throw ProviderError("threads are for the CPU, and provider '" + provider + "' runs on the GPU: omit threads");
  }
  if (auto const& device = options.device; device) {
    if (*device < 0 || *device > kMaxDevice) {
      throw ConfigError("device must be a whole number from 0 to " + std::to_string(kMaxDevice) + ", not " +
                        std::to_string(*device));
    }
    if (!runs_on_gpu(provider)) {
      throw ProviderError("device is the number of a GPU: name a provider that runs on one");
    }
  }
}

using Providers = std::vector<std::string>;

// The bundle's providers that are faster than the CPU, fastest first.
Providers faster_than_the_cpu(Bundle const& bundle) {
  Providers candidates;
  if (bundle.manifest.engines) candidates.push_back(bundle.manifest.engines->flavour);
  if (bundle.manifest.networks && bundle.manifest.networks->cuda && has_gpu()) candidates.emplace_back(kCuda);
  return candidates;
}

std::string title(std::string const& provider) {
  return provider == kCuda ? "ONNX Runtime on CUDA" : title_of(provider);
}

std::shared_ptr<Backend> open_on_gpu(Bundle bundle, std::string const& provider,
                                     std::optional<std::filesystem::path> const& plugins, Log const& log, int gpu) {
  if (provider == kCuda) return open_cuda(std::move(bundle), gpu);
  return open_plans(std::move(bundle), provider, plugins, log, gpu);
}

std::shared_ptr<Backend> open_on_any(Bundle bundle, LoadOptions const& options) {
  check(bundle, options);
  if (options.onnxruntime) Ort::use_library(*options.onnxruntime);
  Log const log = options.log ? options.log : [](std::string const& sentence) {
    std::cerr << "tide_runtime: " + sentence + "\n";
  };
  int const gpu = static_cast<int>(options.device.value_or(0));
  if (runs_on_gpu(options.provider)) return open_on_gpu(std::move(bundle), options.provider, options.plugins, log, gpu);
  Providers const candidates = options.provider == "auto" ? faster_than_the_cpu(bundle) : Providers();
  std::vector<std::string> sentences;  // logged after the `try`: exceptions of the caller's function are passed on
  std::string refused;
  std::shared_ptr<Backend> opened;
  for (std::string const& candidate : candidates) {
    try {
      opened = open_on_gpu(bundle, candidate, options.plugins,
                           [&](std::string const& sentence) { sentences.push_back(sentence); }, gpu);
      sentences.push_back("running " + quoted(bundle.path) + " with " + title(candidate) + refused);
      break;
    } catch (ProviderError const& error) {
      refused += ", not with " + candidate + ": " + error.what();
    }
  }
  if (!opened && !candidates.empty()) {
    sentences.push_back("running " + quoted(bundle.path) + " with ONNX Runtime on the CPU" + refused);
  }
  for (std::string const& sentence : sentences) log(sentence);
  if (opened) return opened;
  if (options.provider == kNetworks) return open_networks(std::move(bundle), options.threads);
  return std::make_shared<PagedBackend>(std::move(bundle), options.threads, options.adapters, options.graphs);
}

}  // namespace

std::shared_ptr<Backend> open_backend(Bundle bundle, LoadOptions const& options) {
  std::shared_ptr<Backend> backend = open_on_any(std::move(bundle), options);
  if (options.graphs) return backend;  // its networks are not the bundle's
  bool const gpu = runs_on_gpu(backend->provider());
  std::string const threads = options.threads ? std::to_string(*options.threads) : "all";
  backend->costs().keep_as(gpu ? cuda::device_name(static_cast<int>(options.device.value_or(0))) : threads + " threads");
  return backend;
}

}  // namespace tide
