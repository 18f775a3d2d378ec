// Writes a file and reads it again with the I/O library alone.
//
//   files DIRECTORY
#include <torch/version.h>
#include <zeropage/io/arena.h>
#include <zeropage/io/direct_file.h>

#include <cstring>
#include <iostream>
#include <string>

int main(int, char** arguments) {
  constexpr std::size_t bytes = 1 << 20;
  const auto io = zeropage::make_io();
  zeropage::Arena arena(4 * bytes);
  const auto written = arena.try_allocate(bytes), read = arena.try_allocate(bytes);
  for (std::size_t i = 0; i < bytes; ++i) written->data()[i] = std::byte(i * 31);
  const auto file = zeropage::DirectFile::create(std::string(arguments[1]) + "/data.bin", bytes);
  file.start(*io, zeropage::Direction::write, 0, written->data(), bytes).wait();
  file.sync();
  file.start(*io, zeropage::Direction::read, 0, read->data(), bytes).wait();
  const bool equal = std::memcmp(written->data(), read->data(), bytes) == 0;
  std::cout << (equal ? "equal" : "NOT equal") << ", torch " << TORCH_VERSION << ", " << io->name() << "\n";
  return equal ? 0 : 1;
}
