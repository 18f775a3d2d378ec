#include "zeropage/checkpoint/partial_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <regex>
#include <sstream>
#include <thread>
#include <vector>

#include "zeropage/base/errors.h"
#include "zeropage/io/file.h"

namespace zeropage {
namespace {

namespace fs = std::filesystem;
using Seconds = std::chrono::duration<double>;

constexpr const char* kSuffix = ".zeropage-partial";
constexpr const char* kAside = ".aside";
constexpr auto kBeat = std::chrono::seconds(10);  // between two signs of life
constexpr Seconds kSilence(120);                  // without a sign of life: the owner is dead
constexpr auto kPoll = std::chrono::milliseconds(200);

std::mutex released_mutex;
Names released;  // random numbers of this process's folders that are no longer in use

std::string first_line_of(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// A process's start in ticks, in hexadecimal: empty for a zombie, "0" if unknown.
std::string start_of(long process) {
  const std::string line = first_line_of(fmt::format("/proc/{}/stat", process));
  const std::size_t name_end = line.rfind(')');
  if (name_end == line.npos) return "0";
  std::istringstream words(line.substr(name_end + 1));
  std::vector<std::string> fields;
  for (std::string field; words >> field;) fields.push_back(field);
  if (fields.size() < 20) return "0";
  if (fields[0] == "Z" || fields[0] == "X") return "";
  return fmt::format("{:x}", std::stoull(fields[19]));
}

bool runs(long process, const std::string& started) {
  if (::kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH) return false;
  const std::string found = start_of(process);
  return found == started || found == "0";
}

/// "<boot of the machine>-<namespace of process numbers>-<process>-<its start>", in hexadecimal.
std::string this_process() {
  struct stat space {};
  const bool known = ::stat("/proc/self/ns/pid", &space) == 0;
  const std::string boot = first_line_of("/proc/sys/kernel/random/boot_id").substr(0, 8);
  const std::string start = start_of(::getpid());
  return fmt::format("{}-{:x}-{:x}-{}", boot.empty() ? "0" : boot, known ? space.st_ino : 0, ::getpid(),
                     start.empty() ? "0" : start);
}

std::string random_token() {
  std::random_device source;
  return fmt::format("{:08x}{:08x}", source(), source());
}

void touch(const fs::path& path) { ::utimensat(AT_FDCWD, path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW); }

/// Seconds since the epoch; nothing if the file is gone.
std::optional<double> touched(const fs::path& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) return std::nullopt;
  return static_cast<double>(info.st_mtim.tv_sec) + 1e-9 * static_cast<double>(info.st_mtim.tv_nsec);
}

/// The time of the folder's file system, which may be another machine's.
double now_in(const fs::path& folder) {
  const File file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600), folder.string());
  struct stat info {};
  if (file && ::fstat(file.descriptor(), &info) == 0) return static_cast<double>(info.st_mtim.tv_sec);
  return Seconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// A partial folder, or one moved aside, of this or another process.
struct Leftover {
  fs::path path, place;
  std::string owner;  // empty: of an earlier version
  bool is_aside;

  /// Whether its process runs; nothing if this process cannot know.
  std::optional<bool> has_process() const {
    if (owner.empty()) return std::nullopt;
    const std::size_t last = owner.rfind('-'), start = owner.rfind('-', last - 1);
    const std::size_t process = owner.rfind('-', start - 1);
    const std::string mine = this_process();
    if (owner.substr(0, last) == mine) {
      const std::lock_guard lock(released_mutex);
      return !released.contains(owner.substr(last + 1));
    }
    const std::size_t my_process = mine.rfind('-', mine.rfind('-') - 1);
    const bool is_near = owner.substr(0, process) == mine.substr(0, my_process);
    if (!is_near || owner.substr(0, process).ends_with("-0")) return std::nullopt;
    return runs(std::stol(owner.substr(process + 1, start - process - 1), nullptr, 16),
                owner.substr(start + 1, last - start - 1));
  }

  bool is_alive() const {
    if (const auto known = has_process()) return *known;
    const auto time = touched(path);
    return time && now_in(path.parent_path()) - *time < kSilence.count();
  }

  void remove() const {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

std::vector<Leftover> leftovers_in(const fs::path& parent, bool aside) {
  static const std::regex pattern(
      R"(\.?([\s\S]+?)(?:\.([0-9a-f]+-[0-9a-f]+-[0-9a-f]+-[0-9a-f]+-[0-9a-f]+))?\.zeropage-partial(\.aside)?)");
  std::vector<Leftover> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(parent, ignored)) {
    const std::string name = entry.path().filename().string();
    std::smatch match;
    if (name.find(kSuffix) == name.npos || !std::regex_match(name, match, pattern)) continue;
    if (match[1] == "." || match[1] == ".." || match[3].matched != aside || !entry.is_directory(ignored)) continue;
    found.push_back({entry.path(), parent / match[1].str(), match[2].str(), aside});
  }
  std::ranges::sort(found, {}, &Leftover::path);
  return found;
}

void remove_dead(const fs::path& parent) {
  for (const Leftover& aside : leftovers_in(parent, true)) {
    if (fs::exists(aside.place) && !aside.is_alive()) aside.remove();
  }
  for (const Leftover& partial : leftovers_in(parent, false)) {
    if (!partial.is_alive()) partial.remove();
  }
}

/// Keeps other processes from making, moving or removing partial folders here, if the file system has locks.
class AloneIn {
 public:
  explicit AloneIn(const fs::path& folder) : folder_(::open(folder.c_str(), O_RDONLY | O_CLOEXEC), folder.string()) {
    if (folder_) ::flock(folder_.descriptor(), LOCK_EX);
  }

 private:
  const File folder_;
};

void sync_folder(const fs::path& path) {
  const File folder(::open(path.c_str(), O_RDONLY | O_CLOEXEC), path.string());
  if (!folder || ::fsync(folder.descriptor()) != 0) {
    throw DiskError(fmt::format("\"{}\" cannot be flushed to the disk: {}", path.string(), std::strerror(errno)),
                    errno, path.string());
  }
}

Names names_in(const fs::path& folder) {
  Names names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

/// Gives a file or folder a second name; copies it if the file system has no hard links.
void link(const fs::path& source, const fs::path& target) {
  if (fs::is_directory(source) && !fs::is_symlink(source)) {
    fs::create_directory(target, source);
    for (const std::string& name : names_in(source)) link(source / name, target / name);
    return;
  }
  std::error_code failed;
  if (!fs::is_symlink(source)) fs::create_hard_link(source, target, failed);
  if (fs::is_symlink(source) || failed) fs::copy(source, target, fs::copy_options::copy_symlinks);
}

/// Waits until no other process can be writing to `place`. Throws Error if one is.
void wait_for_others(const fs::path& place) {
  std::map<fs::path, std::optional<double>> seen;
  const auto until = std::chrono::steady_clock::now() + kSilence;  // times may be in the future
  while (std::chrono::steady_clock::now() < until) {
    bool waits = false;
    for (const Leftover& other : leftovers_in(place.parent_path(), false)) {
      if (other.place != place || !other.is_alive()) continue;
      const auto time = touched(other.path);
      if (other.has_process() == true || time != seen.try_emplace(other.path, time).first->second) {
        throw Error(fmt::format("another process is saving to \"{}\" now; save to another folder", place.string()));
      }
      waits = true;
    }
    if (!waits) return;
    std::this_thread::sleep_for(kPoll);
  }
}

template <class Work>
auto with_disk_errors(const fs::path& place, Work&& work) {
  try {
    return work();
  } catch (const fs::filesystem_error& error) {
    throw DiskError(fmt::format("\"{}\" cannot be written: {}", place.string(), error.code().message()),
                    error.code().value(), place.string());
  }
}

}  // namespace

/// A folder of this process under a unique name. It shows other machines that this process lives.
class PartialFolder::Owned {
 public:
  explicit Owned(const fs::path& place)
      : path_(place.parent_path() /
              fmt::format(".{}.{}-{}{}", place.filename().string(), this_process(), token_, kSuffix)) {
    fs::create_directory(path_);
    beats_ = std::jthread([this](const std::stop_token& stop) {
      std::unique_lock lock(mutex_);
      while (!stopped_.wait_for(lock, stop, kBeat, [] { return false; }) && !stop.stop_requested()) touch(path_);
    });
  }
  ~Owned() {
    beats_.request_stop();
    beats_.join();
    std::error_code ignored;
    fs::remove_all(path_, ignored);
    const std::lock_guard lock(released_mutex);
    released.insert(token_);
  }
  const fs::path& path() const { return path_; }
  /// The name for the folder at the place, while the new one moves there.
  fs::path aside() const { return path_.string() + kAside; }

 private:
  const std::string token_ = random_token();
  const fs::path path_;
  std::mutex mutex_;
  std::condition_variable_any stopped_;
  std::jthread beats_;
};

PartialFolder::PartialFolder(fs::path place, Listed listed) : place_(std::move(place)), listed_(std::move(listed)) {
  with_disk_errors(place_, [&] {
    const fs::path parent = place_.parent_path();
    fs::create_directories(parent);
    recover(parent, place_.filename().string());
    strangers();
    const AloneIn alone(parent);
    wait_for_others(place_);
    remove_dead(parent);
    owned_ = std::make_unique<Owned>(place_);
  });
}

PartialFolder::~PartialFolder() = default;

const fs::path& PartialFolder::path() const { return owned_->path(); }

Names PartialFolder::strangers() const {
  if (!fs::exists(place_)) return {};
  if (!fs::is_directory(place_)) {
    throw Error(
        fmt::format("\"{}\" is there already, and is a file; save to another folder, or remove it", place_.string()));
  }
  Names found = names_in(place_);
  if (found.empty()) return {};
  const auto known = listed_(place_);
  if (!known) {
    throw Error(
        fmt::format("\"{}\" is there already, with \"{}\" in it, and is no checkpoint; save to another folder, or "
                    "remove this one",
                    place_.string(), *found.begin()));
  }
  for (const std::string& name : *known) found.erase(name);
  return found;
}

Names PartialFolder::check_names() const {
  Names stay = strangers();
  for (const std::string& name : names_in(path())) {
    if (!stay.contains(name)) continue;
    throw Error(
        fmt::format("\"{}\" is no file of the checkpoint there, and the new one has a file of that name: move it, or "
                    "save to another folder",
                    (place_ / name).string()));
  }
  return stay;
}

void PartialFolder::appear() {
  with_disk_errors(place_, [&] {
    const AloneIn alone(place_.parent_path());
    for (const std::string& name : check_names()) link(place_ / name, path() / name);
    sync_folder(path());
    fs::exists(place_) ? replace() : fs::rename(path(), place_);
    sync_folder(place_.parent_path());
    owned_ = nullptr;
  });
}

void PartialFolder::replace() {
  touch(place_);  // its time shows that a living process moved it aside
  try {
    exchange_paths(path().string(), place_.string());
    return;
  } catch (const DiskError&) {
  }
  // No exchange here: in steps. Between the first and the second, recover() finds the earlier folder.
  const fs::path aside = owned_->aside();
  if (!fs::exists(aside)) fs::rename(place_, aside);  // else the failed exchange has moved it there
  std::error_code failed;
  if (fs::exists(path())) fs::rename(path(), place_, failed);  // else the failed exchange has moved it
  if (failed) {
    fs::rename(aside, place_);
    throw fs::filesystem_error("", failed);
  }
  sync_folder(place_.parent_path());
  std::error_code ignored;
  fs::remove_all(aside, ignored);
}

void recover(const fs::path& parent, const std::optional<std::string>& name) {
  const auto until = std::chrono::steady_clock::now() + kSilence;
  for (const Leftover& aside : leftovers_in(parent, true)) {
    if (name && aside.place.filename() != *name) continue;
    while (!fs::exists(aside.place) && fs::exists(aside.path)) {
      if (aside.is_alive() && std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(kPoll);  // its owner is about to fill the place
        continue;
      }
      std::error_code failed;
      fs::rename(aside.path, aside.place, failed);
      if (!failed || failed == std::errc::no_such_file_or_directory) continue;  // another process moved it back
      throw DiskError(
          fmt::format("a process died while it replaced \"{}\". The earlier folder is \"{}\", and cannot be moved "
                      "back: {}; move it by hand",
                      aside.place.string(), aside.path.string(), failed.message()),
          failed.value(), aside.path.string());
    }
  }
}

void write_file(const fs::path& path, std::string_view data) {
  const File file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666), path.string());
  if (!file) {
    throw DiskError(fmt::format("\"{}\" cannot be written: {}", path.string(), std::strerror(errno)), errno,
                    path.string());
  }
  file.write(0, reinterpret_cast<const std::byte*>(data.data()), data.size());
  file.sync();
}

std::string read_file(const fs::path& path) {
  const File file = File::open(path.string(), /*writable=*/false);
  std::string data(file.size(), '\0');
  file.read(0, reinterpret_cast<std::byte*>(data.data()), data.size());
  return data;
}

}  // namespace zeropage
