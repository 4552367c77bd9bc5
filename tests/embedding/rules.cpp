// Prints what rules of the runtime give that no other interface shows: `philox C0 C1 C2 C3 K0 K1` four random words, in
// hexadecimal as the arguments; `bounds DELTA` the lower and the upper bound after each loss from the standard input;
// `numbers TYPE` each number of the standard input, as bits in hexadecimal, rounded to that type, and that as a float;
// `memory GROUPS ROOT MACHINE` the bytes that the control groups of a process leave;
// `pages BUNDLE` runs two sequences that would write the same page, as a damaged page table would let them.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "bundle/store.h"
#include "decoding/random.h"
#include "memory_limit.h"
#include "paged/run.h"
#include "scheduling/confidence.h"
#include "segmented/numbers.h"

int main(int count, char** arguments) {
  if (count == 8 && std::strcmp(arguments[1], "philox") == 0) {
    std::uint32_t words[6];
    for (int i = 0; i < 6; ++i) words[i] = static_cast<std::uint32_t>(std::strtoul(arguments[2 + i], nullptr, 16));
    auto const made = tide::philox({words[0], words[1], words[2], words[3]}, {words[4], words[5]});
    std::printf("%08x %08x %08x %08x\n", made[0], made[1], made[2], made[3]);
    return 0;
  }
  if (count == 3 && std::strcmp(arguments[1], "bounds") == 0) {
    tide::ConfidenceSequence bounds(std::atof(arguments[2]));
    for (double loss = 0; std::scanf("%lf", &loss) == 1;) {
      bounds.add(loss);
      std::printf("%.9g %.9g\n", bounds.lower(), bounds.upper());
    }
    return 0;
  }
  if (count == 3 && std::strcmp(arguments[1], "numbers") == 0) {
    for (unsigned bits = 0; std::scanf("%x", &bits) == 1;) {
      float number, back;
      std::memcpy(&number, &bits, sizeof number);
      std::uint16_t half;
      tide::narrow(arguments[2], &number, 1, reinterpret_cast<std::byte*>(&half));
      tide::widen(arguments[2], reinterpret_cast<std::byte*>(&half), 1, &back);
      std::memcpy(&bits, &back, sizeof bits);
      std::printf("%04x %08x\n", half, bits);
    }
    return 0;
  }
  if (count == 5 && std::strcmp(arguments[1], "memory") == 0) {
    std::size_t const machine = std::strtoull(arguments[4], nullptr, 10);
    std::printf("%zu\n", tide::memory_limit(arguments[2], arguments[3], machine));
    return 0;
  }
  if (count == 3 && std::strcmp(arguments[1], "pages") == 0) {
    tide::Bundle const bundle = tide::open_bundle(arguments[2], false);
    tide::PagePool pool(bundle.manifest);
    tide::Networks networks(bundle, 1, std::nullopt);
    tide::PagedSequence one(bundle.manifest, pool, {}), other(bundle.manifest, pool, {});
    std::vector<tide::Page> pages;
    pool.take(1, pages);
    one.begin(pages, 1, std::nullopt);
    other.begin(pages, 1, std::nullopt);  // and no `reserve`, which would copy the page
    std::int64_t ids[] = {1, 1};
    tide::Adapters const adapters(bundle, {});
    tide::NetworkRun run(networks, bundle.manifest, pool, adapters, 0);
    run.run({{&one, 1, 2, 1, 2.0F}, {&other, 1, 2, 1, 2.0F}}, ids);
    return 0;
  }
  return 2;
}
