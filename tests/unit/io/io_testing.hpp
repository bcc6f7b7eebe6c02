#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"

namespace shardq::io_testing {

/// A fresh folder that goes when the test does.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "shardq-io-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = name;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  /// Names of everything in it, sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& item : std::filesystem::directory_iterator(path_))
      found.push_back(item.path().filename().string());
    std::sort(found.begin(), found.end());
    return found;
  }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::filesystem::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}
inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

template <class T>
std::span<const std::byte> as_bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

/// Empty when `action` throws an Error of that code whose message is one line holding every word; what is wrong
/// otherwise.
inline std::string error_mismatch(ExitCode code, const std::vector<std::string>& words,
                                  const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    const std::string message = error.what();
    if (error.code() != code)
      return "exit code " + std::to_string(static_cast<int>(error.code())) + ", expected " +
             std::to_string(static_cast<int>(code)) + ": " + message;
    if (message.empty() || message.size() > 800) return "message of " + std::to_string(message.size()) + " characters";
    for (const char c : message)
      if (static_cast<unsigned char>(c) < 0x20) return "a control character in the message: " + message;
    for (const std::string& word : words)
      if (message.find(word) == std::string::npos) return "'" + word + "' is not in the message: " + message;
    return "";
  } catch (const std::exception& other) {
    return std::string("another exception: ") + other.what();
  }
  return "no error";
}

}  // namespace shardq::io_testing

#define EXPECT_ERROR(code, words, ...) \
  EXPECT_EQ(::shardq::io_testing::error_mismatch(code, std::vector<std::string> words, [&] { __VA_ARGS__; }), "")
