// Counts what GCC compiled with -fsanitize-coverage=trace-pc,trace-cmp, for the libFuzzer that guided.py gives it.
#include <stddef.h>
#include <stdint.h>

enum { COUNTERS = 1 << 18 };

#define SHARED __attribute__((visibility("default")))
SHARED uint8_t tide_fuzz_counters[COUNTERS];
SHARED uintptr_t tide_fuzz_places[2 * COUNTERS];  // libFuzzer wants a table of them; addresses are not known
SHARED size_t const tide_fuzz_size = COUNTERS;

char const* tide_version(void);

void __sanitizer_cov_trace_pc(void) {
  uintptr_t const place = (uintptr_t)__builtin_return_address(0) - (uintptr_t)tide_version;  // the same in every run
  ++tide_fuzz_counters[(place >> 2) % COUNTERS];  // a call has 5 bytes
}

// Comparisons go to libFuzzer's function of the same name. An optimizing compiler jumps there, and so libFuzzer has
// the return address of the place.
static void ignored(uint64_t a, uint64_t b) { (void)a, (void)b; }
#define COMPARES(name, type)                                       \
  SHARED void (*tide_fuzz_##name)(type, type) = (void*)ignored;    \
  void __sanitizer_cov_trace_##name(type a, type b) { tide_fuzz_##name(a, b); }

COMPARES(cmp1, uint8_t)
COMPARES(cmp2, uint16_t)
COMPARES(cmp4, uint32_t)
COMPARES(cmp8, uint64_t)
COMPARES(const_cmp1, uint8_t)
COMPARES(const_cmp2, uint16_t)
COMPARES(const_cmp4, uint32_t)
COMPARES(const_cmp8, uint64_t)
COMPARES(switch, uint64_t)  // a value and the address of the cases

void __sanitizer_cov_trace_cmpf(float a, float b) { (void)a, (void)b; }
void __sanitizer_cov_trace_cmpd(double a, double b) { (void)a, (void)b; }
