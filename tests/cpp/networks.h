// What the tests ask of the library's inside: the segment networks without TensorRT, and the checks before it is asked.
// Answers are JSON.
#pragma once

#include <string>
#include <vector>

#include "options.h"

// On ONNX Runtime's CPU; device: "host", or "gpu" for a stand-in of the CUDA runtime with short runs (fake_cudart.h).
tide::Engine engine_on_networks(std::string const& device, Options const& options);

// Of the stand-in: bytes there may be, and [graphs recorded, launches of them].
std::string limit_gpu_memory(std::int64_t bytes);
std::string gpu_graphs();

// A bundle's engines on a machine with a version of the library and a GPU (major, minor).
std::string checked_machine(std::string const& bundle, std::string const& version,
                            std::vector<std::int64_t> const& device);

// The profiles of its engines that runs over so many tokens are given to, and the same of the head.
std::string picked_profiles(std::string const& bundle, std::vector<std::int64_t> const& tokens);

// Version, TensorRT's version and sha256 of the plugin library that is found ("-": nothing is named), or null.
std::string found_plugins(std::string const& given);
