// Ranks of one host read each other's memory, in one copy where a socket takes three.
//
// [Note: offers] A rank offers its part by a short message of the group: address, size, and a word that is valid as
// long as the memory keeps the part. The other rank copies from there (process_vm_readv), checks that the word is
// still valid, and answers. Messages are those of the group, so its timeout holds, and a rank's death ends the wait.
// Nothing is left behind that must be removed. A thread reads, since the program may be computing.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace zeropage {

class Neighbours {
 public:
  /// A smaller part takes less time through a socket.
  static constexpr std::size_t kLeastBytes = 128 << 10;

  /// What a rank tells the others, to find out who can read its memory.
  static std::string introduction();
  static bool same_host(const std::string& introduction);
  /// The process of the rank that introduced itself so, if it is on this host and its memory can be read; else 0.
  static pid_t process_of(const std::string& introduction);

  /// `processes`: of each rank of a group; 0 for one that is no neighbour. Smaller parts than `least_bytes` are left to
  /// sockets.
  Neighbours(std::vector<pid_t> processes, std::size_t least_bytes);
  /// Ends exchanges under way with an error.
  ~Neighbours();
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;

  /// Whether exchange() takes parts of so many bytes from and for this rank.
  bool takes(int rank, std::size_t bytes) const {
    return processes_[static_cast<std::size_t>(rank)] != 0 && bytes >= least_bytes_ && bytes > 0;
  }

  struct Part {
    int rank;
    at::Tensor memory;  // contiguous, on the CPU
  };
  /// Starts to fill `incoming` from the ranks that offer it, and offers them `outgoing`; all are neighbours. Every
  /// such rank calls it with the same tags and sizes. Memory must stay until the work was waited for, or destroyed.
  /// wait() throws if a rank died, stalled, or could not read.
  c10::intrusive_ptr<c10d::Work> exchange(c10d::ProcessGroup& group, int offer_tag, int answer_tag,
                                          std::vector<Part> incoming, const std::vector<Part>& outgoing);

 private:
  class Exchange;
  struct Offer;
  using ExchangePtr = c10::intrusive_ptr<Exchange>;
  void read();
  std::uint64_t* take_word();
  void give_back(std::uint64_t* word);

  std::vector<pid_t> processes_;
  std::size_t least_bytes_;
  std::uint64_t generation_;  // of the process
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<ExchangePtr> queue_;
  ExchangePtr current_;  // that the thread reads for
  bool is_closing_ = false;
  std::uint64_t serial_ = 0;                // of the latest exchange
  std::deque<std::uint64_t> words_;         // never freed while other ranks may read them
  std::vector<std::uint64_t*> free_words_;  // of words_
  std::thread thread_;                      // the last member: it uses the others
};

}  // namespace zeropage
