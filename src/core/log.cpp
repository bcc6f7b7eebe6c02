#include "core/log.hpp"

#include <spdlog/sinks/stdout_sinks.h>

namespace shardq {
void start_log(int rank, int ranks) {
  auto logger = std::make_shared<spdlog::logger>("shardq", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern(ranks > 1 ? fmt::format("%H:%M:%S [rank {}] %l: %v", rank) : "%H:%M:%S %l: %v");
  logger->set_level(rank == 0 ? spdlog::level::info : spdlog::level::warn);
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}
}  // namespace shardq
