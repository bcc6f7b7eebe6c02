#pragma once
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "golden_case.hpp"
#include "io/files.hpp"
#include "io/safetensors.hpp"

namespace shardq {

/// A copy of a golden model, of which config and tensors may be changed before it is written to a directory of its own.
class TemporaryModel {
 public:
  explicit TemporaryModel(const std::string& golden) {
    static int count = 0;
    directory_ = std::filesystem::temp_directory_path() /
                 ("shardq_model_" + std::to_string(getpid()) + "_" + std::to_string(count++));
    std::filesystem::create_directories(directory_);
    const Checkpoint source(golden_directory() / golden);
    config = nlohmann::json::parse(source.config_text());
    for (const std::string& name : source.names()) {
      OutputTensor tensor{name, source.entry(name).dtype, source.entry(name).shape, {}, {}};
      const auto bytes = source.bytes(name);
      tensor.owned.assign(bytes.begin(), bytes.end());
      tensors[name] = std::move(tensor);
    }
  }
  ~TemporaryModel() {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
  TemporaryModel(const TemporaryModel&) = delete;
  TemporaryModel& operator=(const TemporaryModel&) = delete;

  void add(const std::string& name, DType dtype, Shape shape) {
    OutputTensor tensor{name, dtype, shape, {}, {}};
    tensor.owned.resize(element_count(shape) * size_of(dtype));
    tensors[name] = std::move(tensor);
  }
  float* floats(const std::string& name) { return reinterpret_cast<float*>(tensors.at(name).owned.data()); }

  Checkpoint write() {
    std::ofstream(directory_ / "config.json") << config.dump(2);
    std::vector<OutputTensor> list;
    for (const auto& [name, tensor] : tensors) {
      list.push_back(tensor);
      list.back().data = list.back().owned;
    }
    // The spans above point into `list`, whose elements do not move any more.
    for (OutputTensor& tensor : list) tensor.data = tensor.owned;
    write_safetensors(directory_ / "model.safetensors", std::move(list));
    return Checkpoint(directory_);
  }

  nlohmann::json config;
  std::map<std::string, OutputTensor> tensors;

 private:
  std::filesystem::path directory_;
};

}  // namespace shardq
