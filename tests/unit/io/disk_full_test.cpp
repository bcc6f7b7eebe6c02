#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>
#include <cstring>

#include "io/files.hpp"
#include "io/output_writer.hpp"
#include "io/safetensors.hpp"
#include "unit/io/io_testing.hpp"

namespace shardq {
namespace {

using io_testing::as_bytes_of;
using io_testing::TempFolder;

/// A file system of one mebibyte, where this process may mount one.
class SmallDisk {
 public:
  SmallDisk() { mounted_ = ::mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, "size=1m") == 0; }
  ~SmallDisk() {
    if (mounted_) ::umount2(folder_.path().c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  const TempFolder& folder() const { return folder_; }

 private:
  TempFolder folder_;
  bool mounted_ = false;
};

#define SMALL_DISK_OR_SKIP(name)                                        \
  const SmallDisk name;                                                 \
  if (!name.mounted())                                                  \
  GTEST_SKIP() << "cannot mount a tmpfs here (" << std::strerror(errno) \
               << "); the file size limit test covers the writer"

TEST(DiskFull, AShardThatDoesNotFitIsRefusedUpFront) {
  SMALL_DISK_OR_SKIP(disk);
  const std::vector<float> big(1 << 20);
  const auto path = disk.folder() / "model.safetensors";
  EXPECT_ERROR(ExitCode::disk, ({path.string(), "No space left", "4194", "bytes needed", "0 written", "free"}),
               write_safetensors(path, {{"x", DType::f32, {1 << 20}, as_bytes_of(big), {}}}));
  EXPECT_TRUE(disk.folder().names().empty());
}

TEST(DiskFull, TheFormerFileSurvives) {
  SMALL_DISK_OR_SKIP(disk);
  write_text_durably(disk.folder() / "t", "old");
  EXPECT_ERROR(ExitCode::disk, ({"No space left"}), write_text_durably(disk.folder() / "t", std::string(2 << 20, 'x')));
  EXPECT_EQ(read_text(disk.folder() / "t"), "old");
  EXPECT_EQ(disk.folder().names(), std::vector<std::string>{"t"});
}

TEST(DiskFull, NoHalfCheckpointUnderTheFinalName) {
  SMALL_DISK_OR_SKIP(disk);
  const std::vector<float> fits(100'000), does_not(200'000);
  OutputWriter writer(disk.folder() / "out");
  writer.write_shard(1, 2, {{"x", DType::f32, {100'000}, as_bytes_of(fits), {}}});
  EXPECT_ERROR(ExitCode::disk, ({"model-00002-of-00002", "No space left"}),
               writer.write_shard(2, 2, {{"y", DType::f32, {200'000}, as_bytes_of(does_not), {}}}));
  EXPECT_TRUE(writer.has_shard(1, 2));
  EXPECT_FALSE(writer.has_shard(2, 2));
  EXPECT_ERROR(ExitCode::disk, ({"model-00002-of-00002", "missing"}), writer.publish(2, "{}", {}, {}));
  EXPECT_EQ(disk.folder().names(), std::vector<std::string>{"out.partial"});
}

/// Runs `body` in a child with a file size limit; returns its exit status. SIGXFSZ keeps its default action: a write
/// beyond the limit would kill.
int with_file_size_limit(rlim_t bytes, const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{bytes, bytes};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ::_exit(body());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(DiskFull, AFileSizeLimitIsAnErrorAndNotASignal) {
  const TempFolder folder;
  const std::vector<float> big(1 << 18);
  const int status = with_file_size_limit(1 << 16, [&] {
    const std::string mismatch =
        io_testing::error_mismatch(ExitCode::disk, {"file size limit", "65536", "model.safetensors"}, [&] {
          write_safetensors(folder / "model.safetensors", {{"x", DType::f32, {1 << 18}, as_bytes_of(big), {}}});
        });
    return mismatch.empty() ? 0 : 1;
  });
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(folder.names().empty());
}

}  // namespace
}  // namespace shardq
