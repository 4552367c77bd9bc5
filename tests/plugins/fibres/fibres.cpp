// The fibres, their turns and their barriers.
#include <sys/mman.h>

#include <algorithm>
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
constexpr size_t kKept = 64 << 20;                   // of stacks, from one launch to the next

void* scheduler;  // where its stack goes on
std::vector<Block> blocks;
std::vector<Thread> threads;
std::vector<unsigned> turns, ready;  // of threads; of blocks
std::map<const unsigned*, Clock> told;  // by counter
unsigned looks;  // of blocks in a row, while none did anything else
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

void release(Memory& memory) {
  if (memory.begin != nullptr) munmap(memory.begin, memory.size);
  memory = {};
}

void reserve(Memory& memory, size_t size) {
  if (memory.size >= size) return;
  release(memory);
  void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) std::abort();
#if !defined(__SANITIZE_ADDRESS__)
  madvise(found, size, MADV_HUGEPAGE);  // many small stacks on few pages save a quarter of the time
#endif
  memory = {static_cast<char*>(found), size};
}

// Puts blocks of these numbers into the machine.
void load(const unsigned* numbers, unsigned count) {
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
  threads.clear();
  for (unsigned i = 0; i < count; ++i) {
    char* shared = machine.shared.begin + i * machine.shared_stride;
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(shared, launch.shared);
#endif
    std::memset(shared, 0xFF, launch.shared);  // NaN
    blocks.push_back({numbers[i], shared, 1, Clock(launch.blocks, 0)});
    ready.push_back(i);
  }
  for (size_t i = 0; i < size_t{count} * launch.threads; ++i) {
    std::memcpy(stack_of(i), &kCanary, sizeof kCanary);
    threads.push_back({fibres_stack(stack_of(i), kStack, main_of_fibre), nullptr, kNone, 0, {}, {}, {}});
  }
  machine.blocks = blocks.data();
}

void merge(Clock& into, const Clock& from) {
  into.resize(std::max(into.size(), from.size()), 0);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

// After a block's turn. False: nothing can go on.
bool take(unsigned index, size_t turn) {
  Block& block = blocks[index];
  const Launch& launch = machine.launch;
  Thread* own = &threads[size_t{index} * launch.threads];
  unsigned count[kEnd + 1] = {};
  for (unsigned i = 0; i < launch.threads; ++i) ++count[own[i].at];
  if (count[kLook] > 0) {
    if (++looks < 1000 * (ready.size() + 1)) return true;
    report(name_of(block) + " looks at a counter that nobody changes");
    return false;
  }
  looks = 0;
  if (count[kBlock] == launch.threads) {
    ++block.epoch;
    for (unsigned i = 0; i < launch.threads; ++i) {
      merge(block.knows, own[i].learned);
      own[i].learned.clear();
      own[i].fenced.clear();
    }
    return true;
  }
  ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(turn));
  const bool ended = count[kEnd] == launch.threads;
  if (!ended)
    report("a barrier that not all reach: of " + name_of(block) + ", " + std::to_string(count[kBlock]) +
           " threads wait for their block, " + std::to_string(count[kEnd]) + " have ended");
  return ended;
}

void run_blocks(const unsigned* numbers, unsigned count) {
  load(numbers, count);
  looks = 0;
  while (!ready.empty()) {
    const size_t turn = any_of(ready.size());
    const unsigned index = ready[turn];
    const Thread* own = &threads[size_t{index} * machine.launch.threads];
    const bool looking = std::any_of(own, own + machine.launch.threads, [](const Thread& one) { return one.at == kLook; });
    shuffle(turns);
    for (unsigned thread : turns)
      if (machine.problem.empty() && (!looking || own[thread].at == kLook)) resume(blocks[index], thread);
    if (!machine.problem.empty() || !take(index, turn)) return;
  }
}

}  // namespace

std::string name_of(const Block& block) { return "block " + std::to_string(block.number); }

void report(const std::string& problem) {
  if (machine.problem.empty()) machine.problem = problem;
  if (machine.running) leave(kEnd);  // with what it read wrongly a thread goes no further
}

void run(const Launch& launch, Code code) {
  ++machine.number;
  machine.launch = launch;
  machine.code = code;
  machine.problem.clear();
  registers.grid = {launch.blocks};
  state = tide::emulation().order * 0x9E3779B97F4A7C15ull;
  turns.resize(launch.threads);
  std::iota(turns.begin(), turns.end(), 0u);
  told.clear();
  std::vector<unsigned> numbers(launch.blocks);  // a GPU promises no order
  std::iota(numbers.begin(), numbers.end(), 0u);
  shuffle(numbers);
  for (unsigned first = 0; first < launch.blocks && machine.problem.empty(); first += machine.resident)
    run_blocks(&numbers[first], std::min(machine.resident, launch.blocks - first));
  if (machine.stacks.size > kKept) release(machine.stacks);
}

void wait(Barrier at) {
  Thread& thread = *machine.thread;
  const bool is_there = at != kBlock || thread.ends_phase == 0 || thread.ends_phase != machine.mutant;
  if (at == kBlock) thread.ends_phase = 0;
  if (is_there) leave(at);
}

// What counters have told the thread before, it knows; what its block did before the last barrier, and it and its block know,
// it may tell.
void fence() {
  Thread& thread = *machine.thread;
  merge(thread.learned, thread.heard);
  thread.fenced = machine.block->knows;
  merge(thread.fenced, thread.learned);
  thread.fenced[machine.block->number] = machine.block->epoch;
}

void changing(const unsigned* counter) {
  merge(told[counter], machine.thread->fenced);
  merge(machine.thread->heard, told[counter]);
}

unsigned look(const unsigned* counter) {
  wait(kLook);
  merge(machine.thread->heard, told[counter]);
  return *counter;
}

void* shared() { return machine.block->shared; }

bool kept(int site) { return site != machine.mutant; }
void ends_phase(int site) { machine.thread->ends_phase = site; }

}  // namespace fibres
