// Reserves memory first, so that a change of several things fails before any is changed.
#pragma once

#include <algorithm>
#include <vector>

namespace tide {

// Makes room for `count` more values, and for as many as there are where it has to move them: to add them throws nothing.
template <typename T>
void make_room(std::vector<T>& values, std::size_t count) {
  if (values.capacity() - values.size() < count) values.reserve(values.size() + std::max(values.size(), count));
}

}  // namespace tide
