#pragma once
#include <cstdint>

namespace shardq {

/// Writes to every page of new memory from all threads, so that the system makes the pages side by side.
void touch_pages(char* data, int64_t bytes);

}  // namespace shardq
