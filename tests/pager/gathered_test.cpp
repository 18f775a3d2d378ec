// Tensors that are partitioned over ranks, without torch: ranks are threads.
#include <doctest/doctest.h>

#include <random>
#include <thread>

#include "queued_device.h"
#include "rank_fixture.h"
#include "zeropage/base/errors.h"

using namespace zeropage;

namespace {

void on_every_rank(int ranks, const std::function<void(int)>& run) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST_CASE("shares cover a tensor, each element once, in order") {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    for (const std::size_t elements : {1, 2, 63, 64, 65, 1009, 8192, 12289, 100'003}) {
      std::vector<int> owner(elements, -1);
      for (int rank = 0; rank < ranks; ++rank) {
        const Stripes stripes(elements, kPage, ranks, rank);
        REQUIRE(stripes.padded() == stripes.share() * ranks);
        REQUIRE(stripes.padded() >= elements);
        // At most one part of a page more than an even share, and a vector of padding.
        REQUIRE(stripes.share() <= elements / ranks + stripes.full_page() / ranks + Stripes::kPartElements);
        for (std::size_t i = 0, last = 0; i < stripes.own(); ++i) {
          const std::size_t at = stripes.in_tensor(i);
          REQUIRE(at < elements);
          REQUIRE(owner[at] == -1);
          REQUIRE((i == 0 || at > last));
          if (i > 0 && i < stripes.part_end(i - 1)) REQUIRE(at == last + 1);
          owner[at] = rank;
          last = at;
        }
      }
      REQUIRE(std::count(owner.begin(), owner.end(), -1) == 0);
    }
  }
}

TEST_CASE("what ranks wrote to their shares is the whole on all of them") {
  for (const int ranks : {1, 2, 3}) {
    Meeting meeting(ranks);
    on_every_rank(ranks, [&](int rank) {
      Rank self(meeting, rank, 64 * kPage);
      std::vector<Tensor> tensors;
      for (const std::size_t elements : {1, 100, 1009, 5000, 12289, 40'000}) {
        tensors.push_back(self.make_tensor(elements, tensors.size() + 1));
      }
      for (Tensor& tensor : tensors) self.write_share(tensor, 7);
      for (Tensor& tensor : tensors) CHECK(self.holds(*tensor.whole, 7));
      const std::size_t collectives = self.ranks->log.size();
      for (Tensor& tensor : tensors) CHECK(self.holds(*tensor.whole, 7));
      CHECK(self.ranks->log.size() == collectives);  // kept gathered
      for (Tensor& tensor : tensors) self.write_share(tensor, 8);
      for (Tensor& tensor : tensors) CHECK(self.holds(*tensor.whole, 8));
    });
  }
}

TEST_CASE("small tensors are gathered together, and a new one next to them reads as zeros") {
  Meeting meeting(2);
  on_every_rank(2, [&](int rank) {
    Rank self(meeting, rank, 64 * kPage);
    {
      Tensor large = self.make_tensor(100'000, 100);
      self.write(*large.whole, 5);  // memory is no longer what the system gave
      self.cache->share_changes(*large.whole);
    }
    self.cache->wait();
    std::vector<Tensor> tensors;
    for (std::size_t i = 0; i < 6; ++i) tensors.push_back(self.make_tensor(60 + i, i + 1));
    for (Tensor& tensor : tensors) self.write_share(tensor, 3);
    for (Tensor& tensor : tensors) CHECK(self.holds(*tensor.whole, 3));
    CHECK(self.ranks->log.size() == 1);
    Tensor created = self.make_tensor(64, 9);
    const PinRequest request{created.whole.get(), Access::read};
    self.cache->pin({&request, 1});
    const std::byte* data = created.whole->data;
    CHECK(std::all_of(data, data + created.whole->bytes(), [](std::byte byte) { return byte == std::byte{0}; }));
    self.cache->unpin({&request, 1});
  });
}

TEST_CASE("after a gather over all ranks, the next ones stay inside the node until the content changes") {
  for (const auto& [ranks, node_ranks] : {std::pair{4, 2}, {4, 1}, {6, 3}}) {
    Meeting meeting(ranks);
    on_every_rank(ranks, [&, ranks = ranks, node_ranks = node_ranks](int rank) {
      Rank self(meeting, rank, 64 * kPage, nullptr, nullptr, /*apart=*/true, node_ranks);
      std::vector<Tensor> tensors;
      for (const std::size_t elements : {1, 100, 1009, 5000, 12289, 100'000}) {
        tensors.push_back(self.make_tensor(elements, tensors.size() + 1));
      }
      unsigned seed = 20;
      const auto gathers = [&] {  // of all tensors: those over all ranks, those of the node
        for (Tensor& tensor : tensors) self.cache->evict(*tensor.whole);
        const std::size_t before = self.ranks->log.size();
        for (Tensor& tensor : tensors) CHECK(self.holds(*tensor.whole, seed));
        const auto of_node =
            std::count_if(self.ranks->log.begin() + static_cast<std::ptrdiff_t>(before), self.ranks->log.end(),
                          [](const auto& t) { return t.starts_with("node"); });
        return std::pair(static_cast<std::ptrdiff_t>(self.ranks->log.size() - before) - of_node, of_node);
      };
      for (Tensor& tensor : tensors) self.write_share(tensor, seed);
      const auto [all, none] = gathers();
      CHECK(none == 0);
      for (int i = 0; i < 2; ++i) CHECK(gathers() == std::pair(none, all));
      ++seed;
      for (Tensor& tensor : tensors) self.write_share(tensor, seed);
      CHECK(gathers() == std::pair(all, none));
      CHECK(gathers() == std::pair(none, all));
      ++seed;
      for (Tensor& tensor : tensors) self.write(*tensor.whole, seed);  // by operators on whole tensors
      CHECK(gathers() == std::pair(all, none));
      CHECK(gathers() == std::pair(none, all));
      tensors.push_back(self.make_tensor(50, 99));  // of four ranks, in the page of small tensors
      self.write_share(tensors.back(), seed);
      const auto [again, rest] = gathers();
      CHECK(again == 1);
      CHECK(rest == all - (ranks == 4));
    });
  }
}

TEST_CASE("a share that is about to change must not be pinned whole") {
  Meeting meeting(1);
  Rank self(meeting, 0, 64 * kPage);
  Tensor tensor = self.make_tensor(1000, 1);
  const PinRequest request{tensor.whole.get(), Access::read};
  self.cache->pin({&request, 1});
  CHECK_THROWS_AS(self.cache->share_changes(*tensor.whole), AccessError);
  self.cache->unpin({&request, 1});
  self.cache->share_changes(*tensor.whole);
}

TEST_CASE("ranks run the same collectives in the same order, whatever their disks and deaths do") {
  constexpr int kRanks = 3;
  bool apart = false;
  SUBCASE("gathers share a connection") {}
  SUBCASE("gathers have their own connection") { apart = true; }
  Meeting meeting(kRanks);
  std::vector<std::vector<std::string>> logs(kRanks);
  on_every_rank(kRanks, [&](int rank) {
    Rank self(meeting, rank, 10 * kPage, nullptr, nullptr, apart);  // few whole tensors fit
    std::mt19937 program(1);                                        // the same on all ranks
    std::mt19937 own(100 + rank);                                   // what differs
    auto noise = std::make_unique<TestSegment>();
    self.local->bind(*noise, {20 * kPage, 0, Role::optimizer, Tier::disk});
    std::vector<Tensor> alive, dead;
    std::uint64_t creations = 0;
    for (int step = 0; step < 1500; ++step) {
      const unsigned what = program() % 10, which = program();
      self.ranks->log.push_back("step " + std::to_string(step));  // another collective
      if (alive.size() < 4 || what == 0) {
        const std::size_t elements = which % 3 == 0 ? 20 + which % 100 : 500 + which % 6'000;
        alive.push_back(self.make_tensor(elements, ++creations));
      } else if (what == 1 && alive.size() > 8) {
        // It dies, though it was used just now: here, or whenever this rank's garbage collector says.
        if (alive[which % alive.size()].written) {
          CHECK(self.holds(*alive[which % alive.size()].whole, alive[which % alive.size()].seed));
        }
        dead.push_back(std::move(alive[which % alive.size()]));
        alive.erase(alive.begin() + which % alive.size());
      } else if (what < 4) {
        Tensor& tensor = alive[which % alive.size()];
        self.write_share(tensor, tensor.seed = step);
        tensor.written = true;
      } else if (what == 4) {
        Tensor& tensor = alive[which % alive.size()];
        self.write(*tensor.whole, tensor.seed = step);
        self.cache->store(*tensor.whole);
        tensor.written = true;
      } else {
        Tensor& tensor = alive[which % alive.size()];
        if (tensor.written) CHECK(self.holds(*tensor.whole, tensor.seed));
      }
      if (own() % 4 == 0) {  // pages come and go on this rank as nowhere else
        PagePin pin = self.local->pin_page(*noise, own() % noise->pages(), Access::write);
        pin.wait();
      }
      if (own() % 16 == 0) dead.clear();
    }
    logs[rank] = self.ranks->log;
    CHECK(self.cache->usage(Pool::device).peak <= self.cache->usage(Pool::device).limit);
    CHECK(self.local->stats().written_bytes > 0);
    alive.clear(), dead.clear();
    noise.reset();
  });
  CHECK(logs[0].size() > 1500 + 200);
  for (const auto& log : logs) CHECK(log == logs[0]);
}

TEST_CASE("what one rank alone does with tensors that all ranks hold changes no collective") {
  bool whole = false;
  SUBCASE("page by page") {}
  SUBCASE("whole") { whole = true; }
  Meeting meeting(2);
  std::vector<std::string> logs[2];
  on_every_rank(2, [&](int rank) {
    Rank self(meeting, rank, 16 * kPage, nullptr, nullptr, /*apart=*/true);
    std::vector<Tensor> tensors;
    for (std::uint64_t number = 1; number <= 12; ++number)
      tensors.push_back(self.make_tensor(2 * kPage / kItem, number));
    for (Tensor& tensor : tensors) self.write_share(tensor, 1);
    for (int turn = 0; turn < 6; ++turn) {
      for (std::size_t i = 0; i < 4; ++i) CHECK(self.holds(*tensors[i].whole, 1));
      std::vector<PinRequest> held;
      for (std::size_t i = 4; i < 7; ++i) held.push_back({tensors[i].whole.get(), Access::read});
      self.cache->pin(held);
      for (std::size_t i = 0; i < held.size() * (rank == 0); ++i) {  // an operator of rank 0 on each
        const std::span request(&held[i], 1);
        if (whole) {
          self.cache->pin(request);
          self.cache->unpin(request);
          continue;
        }
        self.cache->announce(request);
        for (std::size_t page = 0; page < held[i].segment->pages(); ++page) {
          PagePin pin = self.cache->pin_page(*held[i].segment, page, Access::read);
          pin.wait();
        }
      }
      self.cache->unpin(held);
      for (std::size_t i = 7; i < tensors.size(); ++i) CHECK(self.holds(*tensors[i].whole, 1));
    }
    logs[rank] = self.ranks->log;
  });
  CHECK(logs[0].size() > 3 * 12);
  CHECK(logs[0] == logs[1]);
}

TEST_CASE("what has changed already, or died, on one rank alone changes no collective where updates run ahead") {
  constexpr int kRanks = 3;
  Meeting meeting(kRanks);
  std::vector<std::vector<std::string>> logs(kRanks);
  std::vector<std::size_t> early(kRanks);
  on_every_rank(kRanks, [&](int rank) {
    Rank self(meeting, rank, 16 * kPage, nullptr, nullptr, /*apart=*/true);
    std::mt19937 program(1), own(100 + rank);  // the same on all ranks, and what differs
    auto noise = std::make_unique<TestSegment>();
    self.local->bind(*noise, {20 * kPage, 0, Role::optimizer, Tier::disk});
    std::vector<Tensor> tensors;
    for (std::uint64_t number = 1; number <= 16; ++number) {
      tensors.push_back(self.make_tensor(number % 5 == 0 ? 90 : 700 * (1 + number % 4), number));
      self.write_share(tensors.back(), 1);
      tensors.back().seed = 1;
    }
    std::vector<char> pending(tensors.size(), 0), used(tensors.size(), 1);
    const auto change = [&](std::size_t i) {
      if (!std::exchange(pending[i], 0) || !tensors[i].whole) return false;  // it died
      self.write_share(tensors[i], tensors[i].seed);
      return true;
    };
    const auto change_ahead = [&](std::size_t present) {
      std::vector<Segment*> coming;
      const PinRequest request{tensors[present].whole.get(), Access::read};
      self.cache->take_changes({&request, 1}, [&](Segment& segment) { coming.push_back(&segment); });
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (std::ranges::count(coming, tensors[i].whole.get()) && change(i)) early[rank] += i != present;
      }
    };
    for (unsigned turn = 2; turn < 40; ++turn) {
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (!used[i]) continue;
        self.ranks->log.push_back("operator " + std::to_string(i));  // as a sum of gradients would
        change(i);
        change_ahead(i);
        CHECK(self.holds(*tensors[i].whole, tensors[i].seed));
        if (own() % 4 == 0) {
          PagePin pin = self.local->pin_page(*noise, own() % noise->pages(), Access::write);
          pin.wait();
        }
      }
      for (std::size_t i = 0; i < tensors.size(); ++i) {  // an optimizer's step
        if (!used[i]) continue;
        self.cache->expect_change(*tensors[i].whole);
        pending[i] = 1;
        tensors[i].seed = turn;
      }
      if (own() % 3 == 0) {  // zeropage.synchronize() on this rank
        for (std::size_t i = 0; i < tensors.size(); ++i) change(i);
      }
      if (turn % 9 == 0) used[program() % tensors.size()] = 0;  // the program drops it
      for (std::size_t i = 0; i < tensors.size(); ++i) {        // this rank's garbage collector finds it
        if (!used[i] && own() % 4 == 0) Tensor(std::move(tensors[i]));
      }
    }
    logs[rank] = self.ranks->log;
    tensors.clear();
    noise.reset();
  });
  for (const auto& log : logs) CHECK(log == logs[0]);
  CHECK(early[0] > 100);
}

TEST_CASE("gathers with a connection of their own start before an operator needs them") {
  bool apart = false;
  SUBCASE("shared") {}
  SUBCASE("their own") { apart = true; }
  Meeting meeting(2);
  on_every_rank(2, [&](int rank) {
    Rank self(meeting, rank, 16 * kPage, nullptr, nullptr, apart);
    std::vector<Tensor> tensors;
    for (std::uint64_t number = 1; number <= 12; ++number)
      tensors.push_back(self.make_tensor(2 * kPage / kItem, number));
    for (Tensor& tensor : tensors) self.write_share(tensor, 1);
    std::size_t early = 0;
    for (int turn = 0; turn < 6; ++turn) {
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        CHECK(self.holds(*tensors[i].whole, 1));
        const std::string next = std::to_string((i + 1) % tensors.size() + 1) + "/0";
        if (turn > 3)
          early += self.ranks->log.back().starts_with(next) || self.ranks->log.end()[-2].starts_with(next);
      }
    }
    CHECK((early > tensors.size() / 2) == apart);
    if (!apart) CHECK(early == 0);
  });
}

TEST_CASE("the next tensors that an operator has yet to change are named, as far as reading ahead would go") {
  Meeting meeting(1);
  Rank self(meeting, 0, 16 * kPage);
  std::vector<Tensor> tensors;
  for (std::uint64_t number = 1; number <= 12; ++number)
    tensors.push_back(self.make_tensor(2 * kPage / kItem, number));
  for (Tensor& tensor : tensors) self.write_share(tensor, 1);
  for (int turn = 0; turn < 4; ++turn) {
    for (Tensor& tensor : tensors) CHECK(self.holds(*tensor.whole, 1));
  }
  const auto named = [&] {
    std::vector<Segment*> found;
    const PinRequest request{tensors[0].whole.get(), Access::read};
    self.cache->take_changes({&request, 1}, [&](Segment& segment) { found.push_back(&segment); });
    return found;
  };
  CHECK(named().empty());
  for (Tensor& tensor : tensors) self.cache->expect_change(*tensor.whole);
  const auto found = named();
  REQUIRE(found.size() >= 2);
  CHECK(found.size() < 4);  // a part of memory
  for (std::size_t i = 0; i < found.size(); ++i) CHECK(found[i] == tensors[i].whole.get());
  CHECK(named().empty());  // once each
  // The old content is of no use.
  CHECK(self.holds(*tensors[3].whole, 1));
  const std::size_t before = self.cache->usage(Pool::device).now;
  self.cache->expect_change(*tensors[3].whole);
  CHECK(self.cache->usage(Pool::device).now < before);
}

TEST_CASE("a share takes what another stream wrote to the whole, before the memory is used again") {
  for (const int first : {0, 1}) {  // the stream that runs first
    Meeting meeting(1);
    const auto device = std::make_shared<QueuedDevice>(8 * kPage);
    const auto above = std::make_shared<QueuedDevice>(4 * kPage, *device);
    Rank self(meeting, 0, 4 * kPage, device, above);
    constexpr std::size_t kElements = 3 * kPage / kItem;
    Tensor tensor = self.make_tensor(kElements, 1), other = self.make_tensor(kElements, 2);
    const auto write_later = [&](Tensor& into, unsigned seed) {
      const PinRequest request{into.whole.get(), Access::overwrite};
      self.cache->pin({&request, 1});
      device->run([at = into.whole->data, seed] {
        for (std::size_t i = 0; i < kElements * kItem; ++i) at[i] = CacheFixture::pattern(seed, i);
      });
      self.cache->unpin({&request, 1});
    };
    write_later(tensor, 1);
    device->use_stream(1);
    self.cache->store(*tensor.whole);
    device->use_stream(0);
    write_later(other, 2);
    device->finish_stream(first);
    device->finish_stream(1 - first);
    device->finish_all();
    std::size_t wrong = 0;
    for (std::size_t page = 0; page < tensor.share->pages(); ++page) {
      PagePin pin = self.local->pin_page(*tensor.share, page, Access::read);
      pin.wait();
      device->finish_all();
      for (std::size_t i = 0; i < tensor.share->bytes_of(page); ++i) {
        wrong += pin.data()[i] != CacheFixture::pattern(1, page * tensor.share->page_bytes() + i);
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("a rank's operator waits for a checkpoint that copies the only page that could leave") {
  Meeting meeting(1);
  Rank self(meeting, 0, 4 * kPage);
  const auto home = std::make_unique<TestSegment>(), saved = std::make_unique<TestSegment>(),
             wanted = std::make_unique<TestSegment>();
  self.local->bind(*home, {24 * kPage, 0, Role::parameter, Tier::host});
  self.local->bind(*saved, {8 * kPage, 0, Role::parameter, Tier::disk});
  self.local->bind(*wanted, {8 * kPage, 0, Role::parameter, Tier::disk});
  const PinRequest write{saved.get(), Access::write};
  self.local->pin({&write, 1});
  const FrozenSegment frozen = self.local->freeze(*saved);
  self.local->unpin({&write, 1});
  std::thread waiting;
  {
    const PagePin pin = frozen.try_pin(0);
    REQUIRE(pin);
    waiting = std::thread([&] {
      const PinRequest read{wanted.get(), Access::read};
      REQUIRE_NOTHROW(self.local->pin({&read, 1}));
      self.local->unpin({&read, 1});
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  waiting.join();
}

TEST_CASE("a rank with an open version sends what the share was before") {
  Meeting meeting(2);
  on_every_rank(2, [&](int rank) {
    Rank self(meeting, rank, 64 * kPage);
    Tensor tensor = self.make_tensor(40'000, 1);
    self.write_share(tensor, 7);
    self.local->evict(*tensor.share);
    self.cache->share_changes(*tensor.whole);  // nothing is gathered now
    if (rank == 0) {
      REQUIRE(self.local->open_version(*tensor.share, /*write_first=*/true));
      self.write_share(tensor, 9);  // into the version: this thread may pin it
      self.local->write_behind(*tensor.share);
    }
    CHECK(self.holds(*tensor.whole, 7));
    self.cache->share_changes(*tensor.whole);
    if (rank == 0) {
      Segment* const segments[] = {tensor.share.get()};
      REQUIRE(self.local->commit_versions(segments));
    } else {
      self.write_share(tensor, 9);
    }
    CHECK(self.holds(*tensor.whole, 9));
  });
}
