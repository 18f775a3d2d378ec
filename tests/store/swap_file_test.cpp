#include "zeropage/store/swap_file.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/resource.h>

#include "temporary_directory.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

using namespace zeropage;

TEST_CASE("extents are blocks of the file, and the dead ones are used again") {
  TemporaryDirectory directory;
  SwapFile swap(directory.path());
  std::size_t size = 0;
  {
    Extent a = swap.allocate(5000), b = swap.allocate(10 * kMiB);
    CHECK(a.bytes() == 2 * kBlockBytes);
    CHECK(a.offset() % kBlockBytes == 0);
    CHECK((a.offset() + a.bytes() <= b.offset() || b.offset() + b.bytes() <= a.offset()));
    CHECK(swap.used() == a.bytes() + b.bytes());
    size = swap.size();
  }
  CHECK(swap.used() == 0);
  for (int i = 0; i < 100; ++i) Extent again = swap.allocate(10 * kMiB);
  CHECK(swap.size() == size);
}

TEST_CASE("a disk that cannot grow the file is an error at creation, with sizes, and what was there stays") {
  TemporaryDirectory directory;
  SwapFile swap(directory.path());
  Extent first = swap.allocate(kMiB);
  // A quota in miniature: no file of this process may grow past 100 MiB.
  rlimit before{}, small{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  small = before;
  small.rlim_cur = 100 * kMiB;
  ::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);
  CHECK_THROWS_WITH_AS(swap.allocate(200 * kMiB), doctest::Contains("cannot hold 209.7 MB more"), DiskError);
  CHECK(swap.allocate(kMiB));  // what fits still goes
  ::setrlimit(RLIMIT_FSIZE, &before);
  CHECK(swap.allocate(200 * kMiB));
}
