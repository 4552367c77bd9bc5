// Records work of which the GPU chooses parts as one CUDA graph: each choice is a switch node, whose bodies are the
// variants; the kernel `tide_decide`, after the part before it, sets which body runs. Without that none does.
//
//   first, tide_decide -> switch { variant 0, tide_decide | variant 1, tide_decide | ... } -> switch { ... } -> last
#include <algorithm>
#include <utility>

#include "segmented/cuda.h"
#include "segmented/step_kernel.ptx.h"

namespace tide {
namespace {

constexpr std::int32_t kWarp = 32;

cuda::Kernel load_kernel() {
  cuda::Functions const& api = cuda::functions();
  cuda::Library library = nullptr;
  cuda::Kernel kernel = nullptr;
  cuda::require_recorded(api.LibraryLoadData(&library, kStepKernel, nullptr, nullptr, 0, nullptr, nullptr, 0),
                         "cudaLibraryLoadData");
  cuda::require_recorded(api.LibraryGetKernel(&kernel, library, "tide_decide"), "cudaLibraryGetKernel");
  return kernel;
}

// The kernel, which stays loaded; any thread may be the first that needs it.
cuda::Kernel decide_kernel() {
  static cuda::Kernel const kernel = load_kernel();
  return kernel;
}

// A graph that is destroyed unless it is taken.
class OwnedGraph {
 public:
  explicit OwnedGraph(cuda::Graph graph) : graph_(graph) {}
  ~OwnedGraph() {
    if (graph_ != nullptr) cuda::functions().GraphDestroy(graph_);
  }
  OwnedGraph(OwnedGraph const&) = delete;
  OwnedGraph& operator=(OwnedGraph const&) = delete;
  cuda::Graph get() const { return graph_; }
  cuda::Graph take() { return std::exchange(graph_, nullptr); }

 private:
  cuda::Graph graph_;
};

}  // namespace

cuda::GraphExec CudaDevice::recorded(ChosenWork const& work) {
  cuda::Functions const& api = cuda::functions();
  decide_kernel();
  cuda::Graph made = nullptr;
  cuda::require_recorded(api.GraphCreate(&made, 0), "cudaGraphCreate");
  OwnedGraph graph(made);
  std::vector<cuda::Handle> handles(work.choices.size() + 1);  // the last one is none
  for (std::size_t i = 0; i < work.choices.size(); ++i) {
    auto const none = static_cast<unsigned>(work.choices[i].size());
    cuda::require_recorded(api.GraphConditionalHandleCreate(&handles[i], graph.get(), none, cuda::kAssignDefault),
                           "cudaGraphConditionalHandleCreate");
  }
  cuda::GraphNode node = nullptr;
  auto const add = [&](std::function<void()> const& part) {
    OwnedGraph const child(captured(part));
    cuda::GraphNode const before = node;
    std::size_t const count = before == nullptr ? 0 : 1;
    cuda::require_recorded(api.GraphAddChildGraphNode(&node, graph.get(), &before, count, child.get()),
                           "cudaGraphAddChildGraphNode");
  };
  work.first();  // each part is queued before it is recorded: a plan that ran another shape changes to this one
  add([&] {
    work.first();
    decide(work.decision, 1, handles[0]);
  });
  for (std::size_t i = 0; i < work.choices.size(); ++i) {
    cuda::SwitchNode choice;
    choice.handle = handles[i];
    choice.size = static_cast<unsigned>(work.choices[i].size());
    cuda::GraphNode const before = node;
    cuda::require_recorded(api.GraphAddNode(&node, graph.get(), &before, nullptr, 1, &choice), "cudaGraphAddNode");
    for (std::size_t variant = 0; variant < work.choices[i].size(); ++variant) {
      work.choices[i][variant]();
      cuda::Graph body = choice.bodies[variant];
      capture([&] {
        work.choices[i][variant]();
        decide(work.decision, static_cast<std::int32_t>(i) + 2, handles[i + 1]);
      }, [&] {
        cuda::require_recorded(api.StreamBeginCaptureToGraph(stream_, body, nullptr, nullptr, 0, cuda::kCaptureInThread),
                               "cudaStreamBeginCaptureToGraph");
      }, &body);
    }
  }
  work.last();
  add(work.last);
  synchronize();  // the queued parts have read what the host is to change
  return instantiated(graph.take());
}

// Queues the kernel.
void CudaDevice::decide(DecisionArguments step, std::int32_t next, cuda::Handle handle) {
  auto const threads = static_cast<unsigned>(std::max(step.slots, kWarp));
  void* arguments[] = {&step, &next, &handle};
  cuda::require_recorded(cuda::functions().LaunchKernel(decide_kernel(), {}, {threads, 1, 1}, arguments, 0, stream_),
                         "cudaLaunchKernel");
}

}  // namespace tide
