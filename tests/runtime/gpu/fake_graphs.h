// Graphs of the stand-in for the CUDA runtime (fake_cudart.cpp): pieces of work, switches between graphs, and the kernel
// that sets the switches, compiled for the host.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "segmented/cudart.h"
#include "segmented/step_decision.h"

extern "C" {
extern std::atomic<long> fake_cuda_chosen, fake_cuda_skipped;  // switch nodes that ran a body, and none
}

namespace {

using namespace tide::cuda;

using Work = std::function<Error()>;

struct FakeGraph;

std::map<Handle, unsigned> values;  // of switches, as they are set

// A piece of work, or a switch between graphs.
struct FakeNode {
  Work work;
  Handle handle = 0;
  std::vector<FakeGraph*> bodies{};
};

struct FakeGraph {
  std::vector<FakeNode> nodes{};
  std::map<Handle, unsigned> handles{};  // and their default values
  bool instantiated = false, is_body = false;
  std::vector<Graph> bodies{};

  bool chooses() const {
    return std::any_of(nodes.begin(), nodes.end(), [](FakeNode const& node) { return node.handle != 0; });
  }
};

Error run(FakeGraph const& graph) {
  for (FakeNode const& node : graph.nodes) {
    if (node.handle == 0) {
      if (Error const error = node.work()) return error;
      continue;
    }
    unsigned const value = values.at(node.handle);
    ++(value < node.bodies.size() ? fake_cuda_chosen : fake_cuda_skipped);
    if (value >= node.bodies.size()) continue;
    if (Error const error = run(*node.bodies[value])) return error;
  }
  return kSuccess;
}

void destroy(FakeGraph* graph) {
  for (FakeNode const& node : graph->nodes) {
    for (FakeGraph* const body : node.bodies) destroy(body);
  }
  delete graph;
}

FakeGraph* copy(FakeGraph const& graph) {
  auto* const copied = new FakeGraph(graph);
  for (FakeNode& node : copied->nodes) {
    for (FakeGraph*& body : node.bodies) body = copy(*body);
  }
  return copied;
}

// The kernel of step_kernel.cu.
Error tide_decide(tide::DecisionArguments const& step, std::int32_t next, Handle handle) {
  std::int32_t ran = 0, active = 0;
  std::uint32_t longest = 0;
  std::vector<bool> needs;
  for (std::int32_t slot = 0; slot < step.slots; ++slot) ran += step.outcomes[slot].scheduled != 0;
  for (std::int32_t slot = 0; slot < step.slots; ++slot) {
    needs.push_back(tide::settle(step, next, slot));
    active += needs.back();
  }
  for (std::int32_t slot = 0; next < step.segments && slot < step.slots; ++slot) {
    longest = std::max(longest, tide::schedule(step, next, slot, needs[slot], active, ran));
  }
  unsigned variant = 0;
  while (longest >> (variant + 1) != 0) ++variant;
  if (longest != 0) values.at(handle) = variant;
  for (std::int32_t row = 0; row < step.num_rows; ++row) tide::choose_row(step, row);
  return kSuccess;
}

}  // namespace
