#include "sequence.h"

#include <algorithm>

#include "request.h"

namespace tide {

void Sequence::rewind(std::int64_t length) {
  check_rewind(lengths[0], length);
  for (std::int64_t& segment_length : lengths) segment_length = std::min(segment_length, length);
}

}  // namespace tide
