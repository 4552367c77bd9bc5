// Tests of the library's internals: the segment networks without TensorRT, and the checks that need no TensorRT. All
// strings returned are JSON.
#pragma once

#include <string>
#include <vector>

#include "options.h"
#include "sequence.h"

// An engine on the segment networks on ONNX Runtime's CPU. device: "host", or "gpu" for a stand-in of the CUDA runtime
// (fake_cudart.h) and short runs, or "cuda" for networks that wait for its queue.
tide::Engine engine_on_networks(std::string const& device, Options const& options);

// The same as a backend.
std::shared_ptr<tide::Backend> backend_on_networks(std::string const& device, tide::Bundle bundle,
                                                   tide::LoadOptions const& options);

// Limits the stand-in's memory; [graphs recorded, graphs launched] so far.
std::string limit_gpu_memory(std::int64_t bytes);
std::string gpu_graphs();

// Checks a bundle's engines for a version of the library and a GPU (major, minor).
std::string checked_machine(std::string const& bundle, std::string const& version,
                            std::vector<std::int64_t> const& device);

// The indices of the profiles for runs of the segments, and then of the head, over these numbers of tokens of so many
// sequences.
std::string picked_profiles(std::string const& bundle, std::vector<std::int64_t> const& tokens,
                            std::int64_t batch_size);

// Version, TensorRT's version and sha256 of the plugin library at `path` ("-": of the environment), or null.
std::string found_plugins(std::string const& path);
