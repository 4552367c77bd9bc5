// The fibres, their turns and their barriers.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "machine.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Keeps where this stack is in `*from` and goes on where `to` was kept.
#if defined(__x86_64__) && !defined(FIBRES_UCONTEXT)
extern "C" void fibres_switch(void** from, void* to);
asm(R"(
.text
.hidden fibres_switch
.globl fibres_switch
fibres_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

// What is kept of a stack on which `run` is to begin.
static void* fibres_stack(char* begin, size_t size, void (*run)()) {
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(begin + size) / 16 * 16);
  std::memset(top - 8, 0, 8 * sizeof(void*));
  top[-2] = reinterpret_cast<void*>(run);  // where `ret` goes, after six registers
  return top - 8;
}
#else
#include <ucontext.h>

static void fibres_switch(void** from, void* to) {
  ucontext_t own;
  *from = &own;
  swapcontext(&own, static_cast<ucontext_t*>(to));
}

static void* fibres_stack(char* begin, size_t size, void (*run)()) {
  auto* first = reinterpret_cast<ucontext_t*>((reinterpret_cast<uintptr_t>(begin) + 79) / 64 * 64);
  getcontext(first);
  first->uc_stack.ss_sp = first + 1;
  first->uc_stack.ss_size = static_cast<size_t>(begin + size - reinterpret_cast<char*>(first + 1));
  makecontext(first, run, 0);
  return first;
}
#endif

namespace fibres {

Registers registers;
Machine machine;

namespace {

// Of a stack; no power of two, so that the stacks' ends do not all fall on the same lines of the cache.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStack = 32768 + 192;
#else
constexpr size_t kStack = 8192 + 192;
#endif
constexpr uint64_t kCanary = 0x5AFE57AC4B0770Full;  // at a stack's far end
constexpr size_t kGap = 1024;                        // after each block's shared memory

void* scheduler;  // where its stack goes on
std::vector<Block> blocks;
std::vector<Thread> threads;
std::vector<unsigned> turns, ready, arrived;  // of threads; of blocks; by cluster, blocks at its barrier
unsigned arrived_at_grid;
uint32_t grid_epoch = 0;  // not the same in two launches
uint64_t state;

#if defined(__SANITIZE_ADDRESS__)
const void* scheduler_bottom;
size_t scheduler_size;
void leave_for(void** kept, const void* bottom, size_t size) { __sanitizer_start_switch_fiber(kept, bottom, size); }
void arrive(void* kept, bool from_scheduler) {
  __sanitizer_finish_switch_fiber(kept, from_scheduler ? &scheduler_bottom : nullptr,
                                  from_scheduler ? &scheduler_size : nullptr);
}
#else
constexpr const void* scheduler_bottom = nullptr;
constexpr size_t scheduler_size = 0;
void leave_for(void**, const void*, size_t) {}
void arrive(void*, bool) {}
#endif

// A number below `count`: 0, if threads and blocks take turns in ascending order.
unsigned any_of(size_t count) {
  if (tide::emulation().order == 0) return 0;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<unsigned>((state >> 33) % count);
}

template <class T>
void shuffle(std::vector<T>& items) {
  if (tide::emulation().order == 0) return;
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[any_of(i)]);
}

char* stack_of(size_t index) { return machine.stacks.begin + index * kStack; }

// Goes back to the scheduler; comes back when it is this thread's turn again.
void leave(Barrier at) {
  Thread& own = *machine.thread;
  own.at = at;
  machine.running = false;
  leave_for(at == kEnd ? nullptr : &own.fake_stack, scheduler_bottom, scheduler_size);
  fibres_switch(&own.stack, scheduler);
  arrive(own.fake_stack, true);
  machine.running = true;
}

void main_of_fibre() {
  arrive(nullptr, true);
  machine.running = true;
  machine.code.run(machine.code.arguments);
  leave(kEnd);
  std::abort();
}

void resume(Block& block, unsigned index) {
  const size_t number = static_cast<size_t>(&block - blocks.data()) * machine.launch.threads + index;
  machine.block = &block;
  machine.thread = &threads[number];
  registers.block.x = block.number;
  registers.thread.x = index;
  void* fake = nullptr;
  leave_for(&fake, stack_of(number), kStack);
  fibres_switch(&scheduler, machine.thread->stack);
  arrive(fake, false);
  uint64_t end;
  std::memcpy(&end, stack_of(number), sizeof end);
  if (end != kCanary) report("a stack of a thread of " + name_of(block) + " is too small");
}

void reserve(Memory& memory, size_t size) {
  if (memory.size >= size) return;
  if (memory.begin != nullptr) munmap(memory.begin, memory.size);
  void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) std::abort();
#if !defined(__SANITIZE_ADDRESS__)
  madvise(found, size, MADV_HUGEPAGE);  // many small stacks on few pages save a quarter of the time
#endif
  memory = {static_cast<char*>(found), size};
}

// Puts `count` blocks from `first` on into the machine.
void load(unsigned first, unsigned count) {
  const Launch& launch = machine.launch;
  machine.shared_stride = (launch.shared + kGap + 255) / 256 * 256;
  reserve(machine.stacks, size_t{count} * launch.threads * kStack);
  reserve(machine.shared, count * machine.shared_stride);
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(machine.stacks.begin, machine.stacks.size);
  ASAN_POISON_MEMORY_REGION(machine.shared.begin, machine.shared.size);
#endif
  machine.forget_shared();
  blocks.clear();
  ready.clear();
  threads.resize(size_t{count} * launch.threads);
  for (unsigned i = 0; i < count; ++i) {
    char* shared = machine.shared.begin + i * machine.shared_stride;
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(shared, launch.shared);
#endif
    std::memset(shared, 0xFF, launch.shared);  // NaN
    blocks.push_back({first + i, (first + i) / launch.cluster, shared, {grid_epoch, 0, 0}, UINT32_MAX, false});
    ready.push_back(i);
  }
  for (size_t i = 0; i < threads.size(); ++i) {
    std::memcpy(stack_of(i), &kCanary, sizeof kCanary);
    threads[i] = {fibres_stack(stack_of(i), kStack, main_of_fibre), nullptr, kNone, 0, 0, false};
  }
  machine.blocks = blocks.data();
  arrived.assign(count / launch.cluster, 0);
  arrived_at_grid = 0;
}

// Lets the blocks from `first` on go on after a barrier.
void release(unsigned first, unsigned count, Barrier barrier) {
  if (barrier == kGrid) ++grid_epoch;
  for (unsigned i = first; i < first + count; ++i) {
    blocks[i].epoch.grid = grid_epoch;
    ++blocks[i].epoch.cluster;
    ++blocks[i].epoch.block;
    ready.push_back(i);
  }
}

// After each thread of a block has had its turn: what they all wait for. False: not all for the same.
bool take(unsigned index, size_t turn) {
  Block& block = blocks[index];
  const Launch& launch = machine.launch;
  unsigned count[kEnd + 1] = {};
  for (unsigned i = 0; i < launch.threads; ++i) ++count[threads[size_t{index} * launch.threads + i].at];
  if (count[kBlock] == launch.threads) {
    ++block.epoch.block;
    return true;
  }
  ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(turn));
  if (count[kCluster] == launch.threads) {
    const unsigned cluster = index / launch.cluster;
    if (++arrived[cluster] == launch.cluster) {
      arrived[cluster] = 0;
      release(cluster * launch.cluster, launch.cluster, kCluster);
    }
    return true;
  }
  if (count[kGrid] == launch.threads) {
    if (++arrived_at_grid == launch.blocks) {
      arrived_at_grid = 0;
      release(0, launch.blocks, kGrid);
    }
    return true;
  }
  block.ended = count[kEnd] == launch.threads;
  if (block.ended && block.seen_by_others == block.epoch.cluster)
    report(name_of(block) + " may end while others use its shared memory");
  if (!block.ended)
    report("a barrier that not all reach: of " + name_of(block) + ", " + std::to_string(count[kBlock]) +
           " threads wait for their block, " + std::to_string(count[kCluster]) + " for their cluster, " +
           std::to_string(count[kGrid]) + " for the grid, " + std::to_string(count[kEnd]) + " have ended");
  return block.ended;
}

void run_blocks(unsigned first, unsigned count) {
  load(first, count);
  while (!ready.empty()) {
    const size_t turn = any_of(ready.size());
    const unsigned index = ready[turn];
    shuffle(turns);
    for (unsigned thread : turns) resume(blocks[index], thread);
    if (!take(index, turn)) return;
  }
  for (const Block& block : blocks)
    if (!block.ended) return report(name_of(block) + " waits for blocks that have ended");
}

}  // namespace

std::string name_of(const Block& block) { return "block " + std::to_string(block.number); }

void report(const std::string& problem) {
  if (machine.problem.empty()) machine.problem = problem;
}

void run(const Launch& launch, Code code) {
  ++grid_epoch;
  machine.launch = launch;
  machine.code = code;
  machine.problem.clear();
  registers.grid = {launch.blocks};
  state = tide::emulation().order * 0x9E3779B97F4A7C15ull;
  turns.resize(launch.threads);
  std::iota(turns.begin(), turns.end(), 0u);
  const unsigned together = launch.cooperative ? launch.blocks : launch.cluster;
  std::vector<unsigned> groups(launch.blocks / together);
  std::iota(groups.begin(), groups.end(), 0u);
  shuffle(groups);
  for (unsigned group : groups) run_blocks(group * together, together);
}

void wait(Barrier at) {
  Thread& thread = *machine.thread;
  int& site = at == kBlock ? thread.ends_phase : thread.ends_stage;
  const bool is_there = site == 0 || site != machine.mutant;
  site = 0;
  if (at == kGrid && !machine.launch.cooperative) report("a barrier of the grid in a launch that is not cooperative");
  if (is_there) leave(at);
}

void wait_for_kernel_before() { machine.thread->inputs_are_there = true; }

void* shared() { return machine.block->shared; }

void* shared_of(void* own, int rank) {
  const unsigned in_cluster = static_cast<unsigned>(machine.block - machine.blocks) / machine.launch.cluster;
  if (rank < 0 || static_cast<unsigned>(rank) >= machine.launch.cluster) report("no such block in the cluster");
  const Block& other = machine.blocks[in_cluster * machine.launch.cluster + static_cast<unsigned>(rank)];
  return other.shared + (static_cast<char*>(own) - machine.block->shared);
}

bool kept(int site) { return site != machine.mutant; }
void ends_phase(int site) { machine.thread->ends_phase = site; }
void ends_stage(int site) { machine.thread->ends_stage = site; }

}  // namespace fibres
