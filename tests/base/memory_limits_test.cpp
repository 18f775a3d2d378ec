#include "zeropage/base/memory_limits.h"

#include <doctest/doctest.h>

#include <fstream>

#include "temporary_directory.h"
#include "zeropage/base/units.h"

using namespace zeropage;

namespace {

/// A root directory with 8 GiB available, and the files that a test writes.
class Root {
 public:
  Root() { write("proc/meminfo", "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n"); }

  void write(const std::string& file, const std::string& text) {
    const auto path = std::filesystem::path(directory_.path()) / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  void write(const std::string& file, std::size_t number) { write(file, std::to_string(number) + "\n"); }
  std::size_t available() const { return available_memory(directory_.path()); }

 private:
  TemporaryDirectory directory_;
};

}  // namespace

TEST_CASE("without control groups what the machine has available is available") {
  Root root;
  CHECK(root.available() == 8 * kGiB);
  root.write("proc/self/cgroup", "0::/user.slice\n");
  root.write("sys/fs/cgroup/user.slice/memory.max", "max\n");
  root.write("sys/fs/cgroup/user.slice/memory.current", 3 * kGiB);
  CHECK(root.available() == 8 * kGiB);
}

TEST_CASE("a version 2 control group has its limit minus its use available, and files that can be dropped") {
  Root root;
  root.write("proc/self/cgroup", "0::/job/step\n");
  root.write("sys/fs/cgroup/job/step/memory.max", 4 * kGiB);
  root.write("sys/fs/cgroup/job/step/memory.current", 3 * kGiB);
  CHECK(root.available() == kGiB);
  root.write("sys/fs/cgroup/job/step/memory.stat", "anon 1073741824\ninactive_file 2147483648\nactive_file 5\n");
  CHECK(root.available() == 3 * kGiB);
}

TEST_CASE("a control group above this one may leave less") {
  Root root;
  root.write("proc/self/cgroup", "0::/job/step\n");
  root.write("sys/fs/cgroup/job/step/memory.max", 4 * kGiB);
  root.write("sys/fs/cgroup/job/step/memory.current", kGiB);
  root.write("sys/fs/cgroup/job/memory.max", 5 * kGiB);
  root.write("sys/fs/cgroup/job/memory.current", 3 * kGiB);
  CHECK(root.available() == 2 * kGiB);
}

TEST_CASE("in a container that does not see its own path the limit is at the mount") {
  Root root;
  root.write("proc/self/cgroup", "0::/docker/0123\n");
  root.write("sys/fs/cgroup/memory.max", 2 * kGiB);
  root.write("sys/fs/cgroup/memory.current", kGiB);
  CHECK(root.available() == kGiB);
}

TEST_CASE("a limit of control groups version 1 counts as well") {
  Root root;
  root.write("proc/self/cgroup", "12:cpu,cpuacct:/\n5:memory:/slurm/job_7\n1:name=systemd:/\n0::/\n");
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", std::size_t{9223372036854771712});
  root.write("sys/fs/cgroup/memory/memory.usage_in_bytes", 3 * kGiB);
  root.write("sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes", 6 * kGiB);
  root.write("sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes", 5 * kGiB);
  root.write("sys/fs/cgroup/memory/slurm/job_7/memory.stat", "inactive_file 9\ntotal_inactive_file 1073741824\n");
  CHECK(root.available() == 2 * kGiB);
}

TEST_CASE("a group is throttled from memory.high on, so no more is available") {
  Root root;
  root.write("proc/self/cgroup", "0::/\n");
  root.write("sys/fs/cgroup/memory.max", "max\n");
  root.write("sys/fs/cgroup/memory.high", 3 * kGiB);
  root.write("sys/fs/cgroup/memory.current", 2 * kGiB);
  CHECK(root.available() == kGiB);
}

TEST_CASE("a group that uses more than its limit leaves nothing") {
  Root root;
  root.write("proc/self/cgroup", "0::/\n");
  root.write("sys/fs/cgroup/memory.max", kGiB);
  root.write("sys/fs/cgroup/memory.current", 2 * kGiB);
  CHECK(root.available() == 0);
}
