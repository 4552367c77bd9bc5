// Decides on the GPU which segments a step runs, and what the head reads (`step_decision.h`). The library holds it as PTX
// (`step_kernel.ptx.h`, which tools/step_kernel.py writes), so that it compiles without CUDA.
#include "segmented/step_decision.h"

// One block with a thread for each slot or more: after segment `next - 1` has run, chooses the variant of the next one.
extern "C" __global__ void tide_decide(tide::DecisionArguments step, int next, cudaGraphConditionalHandle handle) {
  __shared__ unsigned longest;  // padded tokens of a slot
  int const slot = static_cast<int>(threadIdx.x);
  bool const there = slot < step.slots;
  if (slot == 0) longest = 0;
  bool const ran = there && step.outcomes[slot].scheduled != 0;
  bool const needs = there && tide::settle(step, next, slot);
  int const num_ran = __syncthreads_count(ran), active = __syncthreads_count(needs);
  if (next < step.segments) {
    if (there) atomicMax(&longest, tide::schedule(step, next, slot, needs, active, num_ran));
    __syncthreads();
    if (slot == 0 && longest != 0) cudaGraphSetConditional(handle, 31 - __clz(static_cast<int>(longest)));
  }
  for (int row = slot; row < step.num_rows; row += static_cast<int>(blockDim.x)) tide::choose_row(step, row);
}
