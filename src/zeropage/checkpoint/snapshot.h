// Snapshots of tensors, written to files while training goes on.
//
// A snapshot is the content of its tensors at one moment. It is no checkpoint: the caller creates the files, and
// stores names, shapes and offsets. take() returns at once; write() runs on a thread of its own.
//
// It copies almost nothing. Pages are frozen in place ([Note: snapshots] in pager/homes/snapshots.h). Small
// tensors, and those that are not paged, are copied. Updates that optimizers have deferred on a tensor belong to the
// snapshot. They run when the program needs them, as always, and the tensor is frozen then.
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

/// Blocks no operator, except one that would overwrite a frame before the snapshot has copied it. Dies without effect
/// if write() is never called.
class Snapshot : public std::enable_shared_from_this<Snapshot> {
 public:
  struct Item {
    at::Tensor tensor;
    std::size_t file;      // index into the paths of write()
    std::uint64_t offset;  // of its content in the file
  };

  /// Takes a snapshot of this rank's parts of the tensors. Over ranks, all of them call it. Throws BudgetError,
  /// DiskError.
  static std::shared_ptr<Snapshot> take(const std::vector<Item>& items);
  ~Snapshot();

  /// Writes the snapshot to existing files of the right sizes. Returns the pieces, by item, once all is on disk. To
  /// be called once, on a thread of its own; the program's transfers go first. Throws DiskError, AccessError; the
  /// snapshot is then released and blocks nothing.
  std::vector<std::vector<Piece>> write(const std::vector<std::string>& paths);
  /// Runs the deferred updates of its tensors, so that write() need not wait. Throws the updates' errors.
  void complete();
  /// Bytes written so far. Any thread may ask.
  std::uint64_t written() const { return written_; }

 private:
  struct Entry;
  struct Content;
  class Relay;
  class Files;

  Snapshot();
  void add(const Item& item);
  static Content freeze(StorageSegment& segment, const at::Tensor& tensor);
  void has_run(const StorageSegment& segment, std::exception_ptr failure) noexcept;
  Entry* take_ready();
  bool wait_for_ready();
  void complete(bool wait);
  void write_frames(Entry& entry, Files& files);
  bool write_frame(Entry& entry, std::size_t page, Files& files);
  void write_homes(Entry& entry, Files& files);
  void write_part_of(Entry& entry, std::size_t page, const std::byte* data, Files& files);
  void give_up() noexcept;

  std::vector<std::unique_ptr<Entry>> entries_;  // null: this rank has nothing to write
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry*> ready_;  // frozen or copied, and not begun
  std::size_t waiting_ = 0;   // entries with deferred updates
  bool given_up_ = false;
  bool is_patient_ = true;        // used by the writing thread only.
  std::exception_ptr failure_;    // of an entry that could not be frozen.
  std::deque<Entry*> unwritten_;  // used by the writing thread only: begun entries with pages at home.
  std::atomic<std::uint64_t> written_ = 0;
};

}  // namespace zeropage
