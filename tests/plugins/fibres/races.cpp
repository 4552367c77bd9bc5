// Finds races: two threads that touch the same memory, one of them writes, and no barrier of both lies in between.
//
// With -fsanitize=thread the compiler calls __tsan_read4 and the like before each access; these are here, in place of
// the sanitizer's own, which knows no fibres. Only barriers order a kernel's threads, and these are nested: what two
// threads of one block, of one cluster, or of different clusters did is ordered if the block, the cluster, or the grid
// had a barrier since. Therefore it is exact for what runs, in whatever order it runs.
//
// Shared memory is also checked for reads before the first write, accesses beyond its end, and accesses by other blocks
// before these know that it is there, or after its block may have ended; other memory for accesses before the kernel
// before has ended.
#include <dlfcn.h>

#include <cstdio>
#include <memory>
#include <unordered_map>
#include <vector>

#include "machine.h"

namespace fibres {
namespace {

// Who has last read, or written, a place. Of several whom no barrier separates, the first, and that there are others.
struct Access {
  Epoch epoch;  // grid 0: nobody
  uint32_t block, cluster, code;
  uint16_t thread;
  bool other_clusters, other_blocks, other_threads;
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

// Whether no barrier separates an access from the present one, and another thread made it.
bool races(const Access& access, const Block& block, unsigned thread) {
  if (access.epoch.grid != block.epoch.grid) return false;
  if (access.other_clusters || access.cluster != block.cluster) return true;
  if (access.epoch.cluster != block.epoch.cluster) return false;
  if (access.other_blocks || access.block != block.number) return true;
  return access.epoch.block == block.epoch.block && (access.other_threads || access.thread != thread);
}

void add(Access& access, const Block& block, unsigned thread, uint32_t code) {
  if (access.epoch.grid == block.epoch.grid) {
    if (access.other_clusters || access.cluster != block.cluster) {
      access.other_clusters = true;
      return;
    }
    if (access.epoch.cluster == block.epoch.cluster) {
      if (access.other_blocks || access.block != block.number) {
        access.other_blocks = true;
        return;
      }
      if (access.epoch.block == block.epoch.block) {
        if (access.thread != thread) access.other_threads = true;
        return;
      }
    }
  }
  access = {block.epoch, block.number, block.cluster, code, static_cast<uint16_t>(thread), false, false, false};
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

// What is wrong with an access to shared memory, whatever others do; nothing, if nothing is.
const char* misuse_of_shared(uintptr_t at, size_t size) {
  const size_t offset = at - reinterpret_cast<uintptr_t>(machine.shared.begin);
  Block& owner = machine.blocks[offset / machine.shared_stride];
  if (offset % machine.shared_stride + size > machine.launch.shared) return "beyond the end of ";
  const Block& own = *machine.block;
  if (owner.number == own.number) return nullptr;
  owner.seen_by_others = own.epoch.cluster;
  if (owner.cluster != own.cluster) return "of another cluster: ";
  if (own.epoch.cluster == 0) return "perhaps before its block has started: ";
  return owner.ended ? "perhaps after its block has ended: " : nullptr;
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
  if (shared) {
    if (const char* misuse = misuse_of_shared(at, size))
      report(misuse + place(at) + ", " + who(write, thread, block.number, code));
  } else if (machine.launch.overlaps && !machine.thread->inputs_are_there) {
    report("perhaps before the kernel before has ended: " + place(at) + ", " + who(write, thread, block.number, code));
  }
  for (uintptr_t byte = at; byte < at + size; byte += size_t{1} << kCell) {
    Cell& cell = shared ? cells_of_shared[(byte - reinterpret_cast<uintptr_t>(machine.shared.begin)) >> kCell]
                        : cell_of(byte);
    const bool raced = races(cell.write, block, thread);
    if (raced || (write && races(cell.read, block, thread))) {
      const Access& other = raced ? cell.write : cell.read;
      report("race in " + place(byte) + ": " + who(raced, other.thread, other.block, other.code) + ", " +
             who(write, thread, block.number, code));
    }
    if (shared && !write && cell.write.epoch.grid == 0)
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
