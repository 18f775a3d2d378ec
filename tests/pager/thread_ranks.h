#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "zeropage/comm/ranks.h"

namespace zeropage {

/// A meeting point of ranks that are threads: the n-th collective of each is one collective.
class Meeting {
 public:
  explicit Meeting(int ranks) : ranks_(ranks) {}

  int ranks() const { return ranks_; }
  void bring(std::size_t call, int rank, std::vector<std::byte> part) {
    std::lock_guard lock(mutex_);
    calls_[call][rank] = std::move(part);
    came_.notify_all();
  }
  /// The parts of `count` ranks from `first` on, once all of them came.
  std::vector<std::byte> all(std::size_t call, int first, int count) {
    std::unique_lock lock(mutex_);
    const auto has_come = [&] {
      int came = 0;
      for (int i = first; i < first + count; ++i) came += calls_[call].contains(i);
      return came == count;
    };
    came_.wait(lock, has_come);
    std::vector<std::byte> whole;
    for (int i = first; i < first + count; ++i) {
      const auto& part = calls_[call][i];
      whole.insert(whole.end(), part.begin(), part.end());
    }
    return whole;
  }

 private:
  int ranks_;
  std::mutex mutex_;
  std::condition_variable came_;
  std::map<std::size_t, std::map<int, std::vector<std::byte>>> calls_;
};

/// A rank that is a thread. Logs the all-gathers that it runs. `apart`: they have a connection of their own.
/// `node_ranks`: the ranks of a node; 0: all.
class ThreadRanks final : public Ranks {
 public:
  ThreadRanks(Meeting& meeting, int rank, bool apart = false, int node_ranks = 0)
      : meeting_(meeting), rank_(rank), node_ranks_(node_ranks > 0 ? node_ranks : meeting.ranks()), apart_(apart) {}

  int size() const override { return meeting_.ranks(); }
  int rank() const override { return rank_; }
  int node_size() const override { return node_ranks_; }
  bool gathers_apart() const override { return apart_; }
  std::unique_ptr<Work> all_gather(std::byte* into, const std::byte* part, std::size_t bytes, const Subject& subject,
                                   Sending sending) override {
    log.push_back((sending.among == Among::node ? "node " : "") + text_of(bytes, subject));
    const std::size_t call = log.size();
    meeting_.bring(call, rank_, {part, part + bytes});
    const int count = size_among(sending.among), first = rank_ - rank_among(sending.among);
    return std::make_unique<Gathering>(meeting_, call, into, bytes * count, first, count);
  }
  std::shared_ptr<std::byte> scratch(std::size_t bytes) override {
    return {new std::byte[bytes], std::default_delete<std::byte[]>()};
  }

  std::vector<std::string> log;

 private:
  static std::string text_of(std::size_t bytes, const Subject& subject) {
    return std::to_string(subject.number) + "/" + std::to_string(subject.page) + ":" + std::to_string(bytes);
  }
  struct Gathering final : Work {
    Gathering(Meeting& meeting, std::size_t call, std::byte* into, std::size_t bytes, int first, int count)
        : meeting(meeting), call(call), into(into), bytes(bytes), first(first), count(count) {}
    ~Gathering() override { wait(); }
    void wait() override {
      if (!into) return;
      const auto whole = meeting.all(call, first, count);
      // If ranks differ, their logs tell.
      std::memcpy(std::exchange(into, nullptr), whole.data(), std::min(bytes, whole.size()));
    }
    Meeting& meeting;
    std::size_t call;
    std::byte* into;
    std::size_t bytes;
    int first, count;
  };

  Meeting& meeting_;
  int rank_, node_ranks_;
  bool apart_;
};

}  // namespace zeropage
