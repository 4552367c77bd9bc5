// The interface for C with one function more, which opens a bundle's segment networks: as on a GPU, but on ONNX Runtime's
// CPU, which no option of tide_load chooses.
#include "capi/tide.cpp"
#include "onnxruntime/segments.h"

extern "C" TIDE_API tide_status tide_load_networks(char const* bundle, char const* options, tide_engine** engine) {
  return create(engine, [&] {
    auto const [load, tokenizers] = tide::open_options(options);
    tide::Engine const opened(tide::open_networks(tide::open_bundle(bundle, load.verify), load.threads));
    return tide_engine{opened, std::make_shared<tide::Text>(opened, tokenizers)};
  });
}
