// Tensors as they are at one moment, written to files while training goes on.
//
// To take a snapshot moves next to nothing: pages are frozen where they lie ([Note: snapshots] in pager/snapshots.h),
// and small tensors, and those that are not paged, are copied. What optimizers have deferred on a tensor belongs to
// the snapshot, and runs when the program needs it, as ever: the tensor is frozen then.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "zeropage/checkpoint/tensor_content.h"

namespace zeropage {

class StorageSegment;

class Snapshot : public std::enable_shared_from_this<Snapshot> {
 public:
  struct Item {
    at::Tensor tensor;
    std::size_t file;      // among the paths of write()
    std::uint64_t offset;  // where its content begins there
  };

  /// What this rank has of the tensors, as of now. Over ranks, all of them call it. Throws BudgetError, DiskError.
  static std::shared_ptr<Snapshot> take(const std::vector<Item>& items);
  ~Snapshot();

  /// Writes it to files that are there and have their sizes. Returns when all is on the disk: what was written, by
  /// item. For a thread of its own, once. It lets the program's transfers go first. Throws DiskError, AccessError;
  /// the snapshot is given up then, and holds nothing up.
  std::vector<std::vector<Piece>> write(const std::vector<std::string>& paths);
  /// Runs what is deferred on its tensors, so that write() waits for no one.
  void complete();
  /// Bytes, so far.
  std::uint64_t written() const { return written_; }

 private:
  struct Entry;
  struct Content;
  class Relay;
  class Files;

  Snapshot();
  void add(const Item& item);
  static Content freeze(StorageSegment& segment, const at::Tensor& tensor);
  void has_run(const StorageSegment& segment) noexcept;
  Entry* take_ready();
  bool wait_for_ready();
  void complete(bool wait);
  void write_frames(Entry& entry, Files& files);
  bool write_frame(Entry& entry, std::size_t page, Files& files);
  void write_homes(Entry& entry, Files& files);
  void write_part_of(Entry& entry, std::size_t page, const std::byte* data, Files& files);
  void give_up() noexcept;

  std::vector<std::unique_ptr<Entry>> entries_;  // null: there is nothing for this rank to write
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry*> ready_;  // frozen or copied, and not begun
  std::size_t waiting_ = 0;   // entries on which operators are deferred
  bool given_up_ = false;
  bool is_patient_ = true;        // of the thread that writes
  std::exception_ptr failure_;    // of one that could not be frozen
  std::deque<Entry*> unwritten_;  // of the thread that writes: what is at home, of entries that were begun
  std::atomic<std::uint64_t> written_ = 0;
};

}  // namespace zeropage
