#include "zeropage/store/swap_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <system_error>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/io/arena.h"

namespace zeropage {
namespace {

// Files grow for many tensors at a time: fewer, larger extents in the file system too.
constexpr std::size_t kGrowBytes = 64 * kMiB;
constexpr std::size_t kStripeBytes = kMiB;
constexpr std::size_t kMostStripes = 32;  // in a period

/// Seconds for concurrent transfers of 1 MiB each, enough to keep a disk busy.
double seconds_of(Direction direction, const File& file, std::byte* memory, std::size_t bytes, Io& io) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<Ticket> tickets;
  for (std::size_t at = 0; at < bytes; at += kStripeBytes) {
    tickets.push_back(io.submit({direction, &file, at, memory + at, kStripeBytes}));
  }
  for (Ticket& ticket : tickets) ticket.wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Allocates the file's first bytes, because the swap file is written in allocated space.
void allocate_first(const File& file, std::size_t bytes) {
  int result;
  do result = ::fallocate(file.descriptor(), 0, 0, static_cast<off_t>(bytes));
  while (result != 0 && errno == EINTR);
  if (result != 0) {
    throw DiskError(fmt::format("{} cannot hold {} ({}): free some space, or leave this disk out of disk_path",
                                file.name(), format_bytes(bytes), std::strerror(errno)),
                    errno, file.name());
  }
}

/// Bytes a second of each file's disk, for writing and reading back. Measures the disks in turn, and counts the
/// fastest of several rounds, because a moment's other work would make a disk seem slow for good. The files are empty
/// before and after.
std::vector<double> measure_speeds(const std::vector<const File*>& files, Io& io) {
  constexpr std::size_t bytes = 32 * kMiB;
  constexpr int rounds = 3;
  for (const File* file : files) allocate_first(*file, bytes);
  Arena memory(bytes);
  const Block block = memory.try_allocate(bytes).value();
  std::mt19937_64 random(1);  // for disks that compress
  for (std::size_t i = 0; i < bytes; i += sizeof(std::uint64_t)) {
    const std::uint64_t value = random();
    std::memcpy(block.data() + i, &value, sizeof(value));
  }
  constexpr double none = std::numeric_limits<double>::infinity();
  std::vector<double> writing(files.size(), none), reading(files.size(), none);
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < files.size(); ++i) {
      writing[i] = std::min(writing[i], seconds_of(Direction::write, *files[i], block.data(), bytes, io));
      reading[i] = std::min(reading[i], seconds_of(Direction::read, *files[i], block.data(), bytes, io));
    }
  }
  std::vector<double> speeds;
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (::ftruncate(files[i]->descriptor(), 0) != 0) {
      throw DiskError(fmt::format("{} cannot be emptied: {}; check the disk", files[i]->name(), std::strerror(errno)),
                      errno, files[i]->name());
    }
    speeds.push_back(2.0 * bytes / (writing[i] + reading[i]));
  }
  return speeds;
}

/// Gives each disk places in proportion to its speed, spread evenly: the disk furthest behind its share is next. A
/// disk too slow for one place gets none. Disks nearly as fast as the fastest count as equal, since ranks measure at
/// the same time.
template <class Stripe>
std::vector<Stripe> make_pattern(std::vector<double> speeds) {
  constexpr double about = 1.5;
  const double fastest = *std::max_element(speeds.begin(), speeds.end());
  for (double& speed : speeds) speed = speed > fastest / about ? fastest : speed;
  const double all = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  std::vector<std::size_t> places;
  std::size_t common = 0, sum = 0;
  for (const double speed : speeds) {
    const bool are_many = speed == fastest && kMostStripes * speed < all;
    places.push_back(are_many ? 1 : static_cast<std::size_t>(std::lround(kMostStripes * speed / all)));
    common = std::gcd(common, places.back());
  }
  for (std::size_t& n : places) n /= common, sum += n;
  std::vector<Stripe> pattern;
  std::vector<std::size_t> given(speeds.size());
  for (std::size_t i = 0; i < sum; ++i) {
    std::size_t next = 0;
    double most_behind = -1;
    for (std::size_t disk = 0; disk < places.size(); ++disk) {
      const double behind = static_cast<double>(places[disk] * (i + 1)) / sum - given[disk];
      if (given[disk] < places[disk] && behind > most_behind) next = disk, most_behind = behind;
    }
    pattern.push_back({next, given[next]++, places[next]});
  }
  return pattern;
}

}  // namespace

Extent::~Extent() {
  if (file_) file_->release(ranges_, is_spare_);
}

std::size_t Extent::bytes() const {
  std::size_t sum = 0;
  for (const Range& range : ranges_) sum += range.bytes;
  return sum;
}

std::vector<std::string> split_disk_path(std::string_view disk_path) {
  struct stat info {};
  if (::stat(std::string(disk_path).c_str(), &info) == 0) return {std::string(disk_path)};
  std::vector<std::string> directories;
  while (true) {
    const std::size_t end = disk_path.find(':');
    if (const auto directory = disk_path.substr(0, end); !directory.empty()) directories.emplace_back(directory);
    if (end == std::string_view::npos) return directories;
    disk_path.remove_prefix(end + 1);
  }
}

SwapFile::SwapFile(std::string_view disk_path, Io& io) : SwapFile(split_disk_path(disk_path), {}) {
  if (disks_.size() == 1) return;
  std::vector<const File*> files;
  for (const Disk& disk : disks_) files.push_back(&disk.file);
  const std::vector<double> speeds = measure_speeds(files, io);
  pattern_ = make_pattern<Stripe>(speeds);
  for (std::size_t i = 0; i < disks_.size(); ++i) {
    if (std::ranges::any_of(pattern_, [&](const Stripe& stripe) { return stripe.disk == i; })) continue;
    fmt::print(stderr, "zeropage: disk_path \"{}\" is left out: {}/s is far slower than the other disks\n",
               disks_[i].directory, format_bytes(static_cast<std::size_t>(speeds[i])));
  }
}

SwapFile::SwapFile(const std::vector<std::string>& directories, const std::vector<double>& speeds) {
  if (directories.empty()) throw DiskError("disk_path names no directory; set it to one on a local disk");
  for (const std::string& directory : directories) {
    File file = File::make_unnamed(directory);
    for (const Disk& disk : disks_) {
      if (std::error_code ignored; std::filesystem::equivalent(disk.directory, directory, ignored)) {
        throw DiskError(fmt::format("disk_path names \"{}\" twice; name each disk once", directory));
      }
    }
    struct stat info {};
    ::fstat(file.descriptor(), &info);
    disks_.push_back({directory, std::move(file), info.st_dev});
  }
  pattern_ = make_pattern<Stripe>(speeds.empty() ? std::vector<double>(disks_.size(), 1.0) : speeds);
}

SwapFile::SwapFile(std::size_t hollow_capacity) : hollow_capacity_(hollow_capacity) {
  disks_.push_back({"the planned disk", File(-1, "the planned disk"), 0});
  pattern_ = make_pattern<Stripe>({1.0});
}

std::shared_ptr<SwapFile> SwapFile::make(std::string_view disk_path, Io& io) {
  return std::shared_ptr<SwapFile>(new SwapFile(disk_path, io));
}

std::shared_ptr<SwapFile> SwapFile::make(const std::vector<std::string>& directories,
                                         const std::vector<double>& speeds) {
  return std::shared_ptr<SwapFile>(new SwapFile(directories, speeds));
}

std::shared_ptr<SwapFile> SwapFile::make_hollow(std::size_t capacity) {
  return std::shared_ptr<SwapFile>(new SwapFile(capacity));
}

/// Under mutex_. Empty if there is not enough free space.
Extent SwapFile::take(std::size_t bytes, bool is_spare) {
  if (free_.free_bytes() < bytes) return {};
  std::vector<Extent::Range> ranges;
  try {
    while (bytes > 0) {
      const std::size_t part = std::min(bytes, free_.largest());
      ranges.push_back({0, 0, FreeList::make_entry()});
      ranges.back().offset = free_.take(part).value();
      ranges.back().bytes = part;
      bytes -= part;
    }
    return Extent(shared_from_this(), std::move(ranges), is_spare);
  } catch (...) {
    for (auto& range : ranges) free_.release(range.offset, range.bytes, std::move(range.entry));
    throw;
  }
}

Extent SwapFile::try_allocate(std::size_t bytes) {
  bytes = round_up(std::max<std::size_t>(bytes, 1), kBlockBytes);
  std::lock_guard lock(mutex_);
  Extent taken = take(bytes, /*is_spare=*/false);
  spare_bytes_ = std::min(spare_bytes_, free_.free_bytes());
  return taken;
}

Extent SwapFile::allocate(std::size_t bytes) {
  while (true) {
    if (Extent taken = try_allocate(bytes)) return taken;
    grow(bytes);
  }
}

Extent SwapFile::try_allocate_spare(std::size_t bytes) noexcept try {
  bytes = round_up(std::max<std::size_t>(bytes, 1), kBlockBytes);
  std::unique_lock lock(mutex_);
  if (spare_bytes_ < bytes) {
    lock.unlock();
    {
      const std::lock_guard growing(growing_);
      if (!has_spare(std::max(bytes, kGrowBytes))) return {};
    }
    const std::size_t more = grow_once(bytes);
    lock.lock();
    spare_bytes_ = std::min(spare_bytes_ + more, free_.free_bytes());
    if (spare_bytes_ < bytes) return {};
  }
  Extent taken = take(bytes, /*is_spare=*/true);
  if (taken) spare_bytes_ -= bytes;
  return taken;
} catch (...) {
  return {};
}

bool SwapFile::has_spare(std::size_t bytes) const {
  const std::size_t now = size();
  if (hollow_capacity_) return static_cast<double>(now + bytes) <= (1 - kSpare) * *hollow_capacity_;
  std::map<dev_t, std::size_t> more_on;  // several directories may share a file system
  for (std::size_t i = 0; i < disks_.size(); ++i) {
    more_on[disks_[i].device] += bytes_on(i, now + bytes) - disks_[i].size;
  }
  for (const Disk& it : disks_) {
    const std::size_t more = more_on[it.device];
    struct statvfs disk {};
    if (more == 0) continue;
    if (::fstatvfs(it.file.descriptor(), &disk) != 0) return false;
    const auto available = static_cast<double>(disk.f_bavail) * disk.f_frsize;
    if (available - more < kSpare * static_cast<double>(disk.f_blocks) * disk.f_frsize) return false;
  }
  return true;
}

/// The disk's bytes in the first `size` bytes of the range.
std::size_t SwapFile::bytes_on(std::size_t disk, std::size_t size) const {
  const std::size_t period = pattern_.size() * kStripeBytes;
  std::size_t bytes = 0, at = size / period * period;
  for (const Stripe& stripe : pattern_) {
    if (stripe.disk == disk) bytes += size / period * kStripeBytes + std::min(kStripeBytes, size - at);
    at = std::min(size, at + kStripeBytes);
  }
  return bytes;
}

/// Returns 0, or the errno of the first disk that cannot grow; then none has grown.
int SwapFile::try_grow_to(std::size_t size, const Disk*& failed) {
  if (hollow_capacity_) {
    failed = &disks_[0];
    if (size > *hollow_capacity_) return ENOSPC;
    disks_[0].size = size;
    return 0;
  }
  const std::size_t before = this->size();
  for (std::size_t i = 0; i < disks_.size(); ++i) {
    Disk& disk = disks_[i];
    const std::size_t needed = bytes_on(i, size);
    if (needed == disk.size) continue;
    int result;
    do {
      result = ::fallocate(disk.file.descriptor(), 0, static_cast<off_t>(disk.size),
                           static_cast<off_t>(needed - disk.size));
    } while (result != 0 && errno == EINTR);
    if (result != 0) {
      const int error = errno;
      failed = &disk;
      for (std::size_t j = 0; j <= i; ++j) {
        disks_[j].size = bytes_on(j, before);
        (void)::ftruncate(disks_[j].file.descriptor(), static_cast<off_t>(disks_[j].size));
      }
      return error;
    }
    disk.size = needed;
  }
  return 0;
}

void SwapFile::grow(std::size_t bytes) { (void)grow_once(round_up(std::max<std::size_t>(bytes, 1), kBlockBytes)); }

/// Returns the bytes by which the file grew.
std::size_t SwapFile::grow_once(std::size_t bytes) {
  const std::lock_guard growing(growing_);
  const std::size_t now = size();  // changes only under growing_
  int error = 0;
  const Disk* failed = nullptr;
  for (const std::size_t step : {std::max(bytes, kGrowBytes), bytes}) {
    error = try_grow_to(now + step, failed);
    if (error != 0) continue;
    FreeList::Entry entry = FreeList::make_entry();
    std::lock_guard lock(mutex_);
    free_.release(size_, step, std::move(entry));
    size_ += step;
    return step;
  }
  if (hollow_capacity_) {
    throw DiskError(fmt::format("the planned disk of {} cannot hold {} more: it has {} already; plan with a larger "
                                "disk, or move a role to another tier",
                                format_bytes(*hollow_capacity_), format_bytes(bytes), format_bytes(now)),
                    ENOSPC);
  }
  const std::size_t share = bytes_on(static_cast<std::size_t>(failed - disks_.data()), now + bytes) - failed->size;
  struct statvfs disk {};
  const std::size_t available = ::fstatvfs(failed->file.descriptor(), &disk) == 0 ? disk.f_bavail * disk.f_frsize : 0;
  throw DiskError(
      fmt::format("disk_path \"{}\" cannot hold {} more{} ({}): the swap file has {}, the disk {} free; free some "
                  "space, set disk_path to a larger disk, or move a role to another tier",
                  failed->directory, format_bytes(share),
                  disks_.size() > 1 ? fmt::format(", its share of {}", format_bytes(bytes)) : "",
                  std::strerror(error), format_bytes(failed->size), format_bytes(available)),
      error, failed->directory);
}

void SwapFile::for_each_piece(std::uint64_t offset, std::size_t bytes,
                              const std::function<void(const Piece&)>& visit) const {
  Piece piece{nullptr, 0, 0, 0};
  for (std::size_t at = 0; at < bytes;) {
    const std::uint64_t stripe = (offset + at) / kStripeBytes, within = (offset + at) % kStripeBytes;
    const Stripe& place = pattern_[stripe % pattern_.size()];
    const std::size_t length = std::min<std::size_t>(bytes - at, kStripeBytes - within);
    const std::uint64_t in_file = (stripe / pattern_.size() * place.of + place.index) * kStripeBytes + within;
    const File* const file = &disks_[place.disk].file;
    if (piece.file == file && piece.offset + piece.bytes == in_file) {
      piece.bytes += length;
    } else {
      if (piece.file) visit(piece);
      piece = {file, in_file, at, length};
    }
    at += length;
  }
  if (piece.file) visit(piece);
}

void SwapFile::for_each_piece(const Extent& extent, std::size_t bytes,
                              const std::function<void(const Piece&)>& visit) const {
  std::size_t begin = 0;
  for (const Extent::Range& range : extent.ranges()) {
    const std::size_t part = std::min(range.bytes, bytes - begin);
    for_each_piece(range.offset, part, [&](Piece piece) {
      piece.at += begin;
      visit(piece);
    });
    begin += part;
  }
}

void SwapFile::release(std::vector<Extent::Range>& ranges, bool is_spare) noexcept {
  std::lock_guard lock(mutex_);
  for (auto& range : ranges) {
    free_.release(range.offset, range.bytes, std::move(range.entry));
    if (is_spare) spare_bytes_ += range.bytes;
  }
}

std::size_t SwapFile::size() const {
  std::lock_guard lock(mutex_);
  return size_;
}

std::size_t SwapFile::used() const {
  std::lock_guard lock(mutex_);
  return size_ - free_.free_bytes();
}

}  // namespace zeropage
