// Ranks of one host read each other's memory, in one copy where a socket takes three. Free of torch.
//
// [Note: offers] Each rank has a board, memory that its neighbours map. A rank offers a part on its board: an address
// and a size. The neighbour copies from there (process_vm_readv), checks that the offer is still valid, and notes on
// its own board how far it has read. A thread reads, since the program may be computing. Exchanges between two ranks
// have numbers, because both start them in one order; an offer also has the tag that says what it is.
//
// A wait ends with an error when the other process has ended, when the other rank has failed or closed its board, or
// after the group's timeout. Boards have no name in any file system, so that nothing is left of a rank that dies.
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace zeropage {

class Neighbours {
 public:
  /// A smaller part takes less time through a socket.
  static constexpr std::size_t kLeastBytes = 128 << 10;
  /// Exchanges of one channel are in one order.
  enum class Channel : std::uint8_t { gathers, sums };

  /// Makes this rank's board. Smaller parts than `least_bytes` are left to sockets. Throws std::system_error.
  Neighbours(int rank, int ranks, std::size_t least_bytes, std::chrono::milliseconds timeout);
  /// Ends exchanges under way with an error, here and on other ranks.
  ~Neighbours();
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;

  /// The other ranks must know it to meet this one.
  std::string introduction() const;
  enum class Met : std::uint8_t { elsewhere, unreadable, here };
  /// Whether the rank that introduced itself so is on this host, and its memory can be read.
  Met meet(int rank, const std::string& introduction);
  /// The other rank cannot read this one's memory.
  void part_from(int rank);
  int count() const;
  /// Ends exchanges under way with an error, here and on ranks that wait for this one. None can succeed any more.
  void fail() const;

  /// Whether exchange() takes parts of so many bytes from and for this rank. Both ranks must have met.
  bool takes(int rank, std::size_t bytes) const;

  struct Incoming {
    int rank;
    std::byte* into;
    std::size_t bytes;
  };
  struct Outgoing {
    int rank;
    const std::byte* from;
    std::size_t bytes;
  };
  class Exchange {
   public:
    virtual ~Exchange() = default;
    /// Returns when all parts have been read, here and by others; `most`: 0 or the longest time. Throws
    /// std::runtime_error if a rank died, failed, stalled, or could not read. The parts' memory is free afterwards.
    virtual void wait(std::chrono::milliseconds most) = 0;
  };
  /// Starts to fill `incoming` from the ranks that offer it, and offers `outgoing`. Each of these ranks starts it
  /// with the same tag and sizes. Memory must stay until wait() has returned or thrown.
  std::shared_ptr<Exchange> exchange(Channel channel, std::uint64_t tag, std::vector<Incoming> incoming,
                                     std::vector<Outgoing> outgoing);

 private:
  static constexpr std::size_t kChannels = 2;
  struct Offer;
  struct Board;
  struct Peer;
  class Reader;
  class Running;
  std::size_t board_bytes() const;
  Offer& offer_at(Board& board, Channel channel, int reader, std::uint64_t number) const;
  void ring() const;

  const int rank_, ranks_;
  const std::size_t least_bytes_;
  const std::chrono::milliseconds timeout_;
  const std::uint64_t generation_;  // of the process
  int file_ = -1;                   // of the board
  Board* board_ = nullptr;
  std::vector<std::unique_ptr<Peer>> peers_;    // by rank; null: no neighbour
  std::array<std::mutex, kChannels> starting_;  // one may wait for a place on the board while the other goes on
  std::array<std::unique_ptr<Reader>, kChannels> readers_;
};

}  // namespace zeropage
