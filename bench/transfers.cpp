// transfers ENGINE read|write DIRECTORY BYTES SECONDS
//
// Reads or writes the swap file's BYTES over and over, in order, 1 MiB at a time, through Io, from buffers of an
// arena filled with random bytes. Prints bytes per second. bench/io.py compares it with fio.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/io/arena.h"
#include "zeropage/io/io.h"
#include "zeropage/store/swap_file.h"

using namespace zeropage;

namespace {

constexpr std::size_t kRequestBytes = kMiB;
constexpr std::size_t kBuffers = 64;

void fill_at_random(std::byte* data, std::size_t bytes) {
  std::mt19937_64 random(1);
  for (auto* word = reinterpret_cast<std::uint64_t*>(data); bytes >= 8; bytes -= 8) *word++ = random();
}

/// Bytes moved in at least `seconds`, and in at least one pass.
std::size_t move(Io& io, const SwapFile& swap, const Extent& extent, Direction direction, const Block& buffers,
                 std::size_t bytes, double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::vector<Ticket> tickets(kBuffers);
  std::size_t moved = 0;
  for (; moved < bytes || std::chrono::steady_clock::now() < end; moved += kRequestBytes) {
    const std::size_t slot = moved / kRequestBytes % kBuffers;
    tickets[slot].wait();
    swap.for_each_piece(extent.offset() + moved % bytes, kRequestBytes, [&](const SwapFile::Piece& piece) {
      std::byte* const buffer = buffers.data() + slot * kRequestBytes + piece.at;
      tickets[slot] =
          io.submit({direction, piece.file, piece.offset, buffer, piece.bytes});  // of one disk, all of it
    });
  }
  for (Ticket& ticket : tickets) ticket.wait();
  return moved;
}

}  // namespace

int main(int count, char** arguments) try {
  if (count != 6) {
    std::fprintf(stderr, "usage: transfers uring|threads read|write DIRECTORY BYTES SECONDS\n");
    return 2;
  }
  const auto engine = std::string(arguments[1]) == "uring" ? IoEngine::uring : IoEngine::threads;
  const auto direction = std::string(arguments[2]) == "read" ? Direction::read : Direction::write;
  const std::size_t bytes = round_down(parse_bytes(arguments[4], "BYTES"), kRequestBytes);

  const auto io = make_io({.engine = engine});
  SwapFile swap(arguments[3], *io);
  const Extent extent = swap.allocate(bytes);
  Arena arena(kBuffers * kRequestBytes);
  const auto buffers = arena.try_allocate(kBuffers * kRequestBytes);
  fill_at_random(buffers->data(), buffers->bytes());
  move(*io, swap, extent, Direction::write, *buffers, bytes, 0);  // the first write of a block costs more

  const auto start = std::chrono::steady_clock::now();
  const std::size_t moved = move(*io, swap, extent, direction, *buffers, bytes, std::atof(arguments[5]));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%.0f\n", moved / seconds);
} catch (const Error& error) {
  std::fprintf(stderr, "transfers: %s\n", error.what());
  return 1;
}
