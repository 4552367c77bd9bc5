// Finds races: two threads that touch the same memory, one of them writes, and no barrier of both lies in between.
//
// With -fsanitize=thread the compiler calls __tsan_read4 and the like before each access; these are here, in place of
// the sanitizer's own, which knows no fibres. Of one block, a barrier orders what threads did. What another block did is
// ordered if that block had a barrier since, a thread of it a fence after that and a change of a counter, and if this thread
// has seen the change and had a fence, or did so before the block's last barrier. Therefore it is exact for what runs.
//
// Shared memory is also checked for reads before the first write, and accesses beyond its end.
#include <dlfcn.h>

#include <cstdio>
#include <memory>
#include <unordered_map>
#include <vector>

#include "machine.h"

namespace fibres {
namespace {

// Who has last read, or written, a place. Of several whom nothing orders, the first, and that there are others.
struct Access {
  uint32_t launch, epoch, block, code;  // launch 0: nobody
  uint16_t thread;
  bool other_blocks, other_threads;
};

struct Cell {  // 2 bytes of memory
  Access read, write;
};
constexpr int kCell = 1, kPage = 12;  // bits of an address
constexpr size_t kCellsOfPage = size_t{1} << (kPage - kCell);

struct Page {
  uintptr_t number = 0;
  Cell* cells = nullptr;
};

std::unordered_map<uintptr_t, std::unique_ptr<Cell[]>> pages;
std::vector<Page> recent(4096);
std::vector<Cell> cells_of_shared;

const bool ready = [] {
  machine.forget_shared = [] { cells_of_shared.assign(machine.shared.size >> kCell, Cell{}); };
  return true;
}();

Cell& cell_of(uintptr_t at) {
  const uintptr_t number = at >> kPage;
  Page& page = recent[number % recent.size()];
  if (page.number != number) {
    std::unique_ptr<Cell[]>& cells = pages[number];
    if (cells == nullptr) cells = std::make_unique<Cell[]>(kCellsOfPage);
    page = {number, cells.get()};
  }
  return page.cells[(at >> kCell) % kCellsOfPage];
}

// Whether this thread knows of what another block did in an epoch.
bool knows(uint32_t other, uint32_t epoch) {
  const Clock& learned = machine.thread->learned;
  return machine.block->knows[other] > epoch || (learned.size() > other && learned[other] > epoch);
}

// Whether nothing orders an access before the present one, and another thread made it.
bool races(const Access& access, const Block& block, unsigned thread) {
  if (access.launch != machine.number) return false;
  if (access.other_blocks) return true;
  if (access.block != block.number) return !knows(access.block, access.epoch);
  return access.epoch == block.epoch && (access.other_threads || access.thread != thread);
}

void add(Access& access, const Block& block, unsigned thread, uint32_t code) {
  if (access.launch == machine.number) {
    if (access.other_blocks || (access.block != block.number && !knows(access.block, access.epoch))) {
      access.other_blocks = true;
      return;
    }
    if (access.block == block.number && access.epoch == block.epoch) {
      if (access.thread != thread) access.other_threads = true;
      return;
    }
  }
  access = {machine.number, block.epoch, block.number, code, static_cast<uint16_t>(thread), false, false};
}

std::string code_at(uint32_t code) {
  char text[32];
  std::snprintf(text, sizeof text, " at +0x%x", code);
  return text;
}

std::string who(bool write, unsigned thread, unsigned block, uint32_t code) {
  return (write ? "written by thread " : "read by thread ") + std::to_string(thread) + " of block " +
         std::to_string(block) + code_at(code);
}

std::string place(uintptr_t at) {
  if (!machine.shared.holds(at)) return "global memory";
  const size_t offset = at - reinterpret_cast<uintptr_t>(machine.shared.begin);
  return "shared memory of " + name_of(machine.blocks[offset / machine.shared_stride]) + ", byte " +
         std::to_string(offset % machine.shared_stride);
}

// Whether an access is beyond the end of shared memory.
bool overruns(uintptr_t at, size_t size) {
  const size_t offset = at - reinterpret_cast<uintptr_t>(machine.shared.begin);
  return offset % machine.shared_stride + size > machine.launch.shared;
}

void check(const void* address, size_t size, bool write, const void* caller) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (!machine.running || machine.stacks.holds(at) || !machine.problem.empty()) return;
  if (at - reinterpret_cast<uintptr_t>(&registers) < sizeof registers) return;
  if (at - reinterpret_cast<uintptr_t>(machine.code.arguments) < machine.code.size) return;
  static const uintptr_t library = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<const void*>(&add), &info);
    return reinterpret_cast<uintptr_t>(info.dli_fbase);
  }();
  const auto code = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(caller) - 1 - library);
  const unsigned thread = registers.thread.x;
  const Block& block = *machine.block;
  const bool shared = machine.shared.holds(at);
  if (shared && overruns(at, size))
    report("beyond the end of " + place(at) + ", " + who(write, thread, block.number, code));
  for (uintptr_t byte = at; byte < at + size; byte += size_t{1} << kCell) {
    Cell& cell = shared ? cells_of_shared[(byte - reinterpret_cast<uintptr_t>(machine.shared.begin)) >> kCell]
                        : cell_of(byte);
    const bool raced = races(cell.write, block, thread);
    if (raced || (write && races(cell.read, block, thread))) {
      const Access& other = raced ? cell.write : cell.read;
      report("race in " + place(byte) + ": " + who(raced, other.thread, other.block, other.code) + ", " +
             who(write, thread, block.number, code));
    }
    if (shared && !write && cell.write.launch == 0)
      report("never written: " + place(byte) + ", " + who(write, thread, block.number, code));
    add(write ? cell.write : cell.read, block, thread, code);
  }
}

}  // namespace
}  // namespace fibres

#define HOOK(name, size, write) \
  void __tsan_##name(const void* at) { fibres::check(at, size, write, __builtin_return_address(0)); }
#define HOOKS(size) \
  HOOK(read##size, size, false) \
  HOOK(write##size, size, true) \
  HOOK(unaligned_read##size, size, false) \
  HOOK(unaligned_write##size, size, true)

extern "C" {

HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)

void __tsan_read_range(const void* at, size_t size) { fibres::check(at, size, false, __builtin_return_address(0)); }
void __tsan_write_range(const void* at, size_t size) { fibres::check(at, size, true, __builtin_return_address(0)); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

}  // extern "C"
