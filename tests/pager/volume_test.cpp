// How many bytes a cache moves, against the least that any could: the optimum for the same uses and memory.
#include <doctest/doctest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <queue>
#include <random>

#include "pager/cache_fixture.h"

using namespace zeropage;

namespace {

constexpr std::size_t kUnit = 4 * kBlockBytes;  // of every run here, so that memory is a number of them

struct Step {
  int run;
  Access access;
  bool dies = false;  // with this use
};

/// The uses of one training step: layers are read in forward, with their update before, read again in backward, which
/// makes gradients; a norm reads all gradients; the update reads them last.
std::vector<Step> training_step(int layers) {
  std::vector<Step> steps;
  const auto run = [&](int layer, int part) { return layer * 5 + part; };  // visible, master, 2 moments, gradient
  for (int layer = 0; layer < layers; ++layer) {
    steps.push_back({run(layer, 4), Access::read, true});
    for (int part = 1; part < 4; ++part) steps.push_back({run(layer, part), Access::write});
    steps.push_back({run(layer, 0), Access::overwrite});
  }
  for (int layer = layers; layer-- > 0;) {
    steps.push_back({run(layer, 0), Access::read});
    steps.push_back({run(layer, 4), Access::overwrite});
  }
  for (int layer = 0; layer < layers; ++layer) steps.push_back({run(layer, 4), Access::read});
  return steps;
}

/// A lower bound of the transfers for these uses, repeated `periods` times from empty memory. Memory has room for
/// `capacity` runs, and a use takes one. A run that stays between two uses saves a read if the second use reads. The
/// capacity bounds the runs that stay at once: a flow of maximal worth (interval scheduling on k machines). A written
/// run costs one write home, unless it stays in every gap until it is overwritten or dies. A split of that write over
/// the gaps, `share` to the first and the rest to the last, gives a bound for every share.
struct Optimum {
  struct Edge {
    int to;
    int room;
    double cost;
  };
  std::vector<Edge> edges;
  std::vector<std::vector<int>> from;

  explicit Optimum(int nodes) : from(nodes) {}
  void add(int a, int b, int room, double cost) {
    from[a].push_back(static_cast<int>(edges.size()));
    edges.push_back({b, room, cost});
    from[b].push_back(static_cast<int>(edges.size()));
    edges.push_back({a, 0, -cost});
  }
  /// The least cost of `flow` units from the first node to the last.
  double run(int flow) {
    const int nodes = static_cast<int>(from.size());
    std::vector<double> potential(nodes, 0);
    // All edges lead onward, so one pass gives the first potentials.
    for (int node = 0; node < nodes; ++node) potential[node] = node == 0 ? 0 : 1e18;
    for (int node = 0; node < nodes; ++node) {
      for (const int e : from[node]) {
        if (edges[e].room > 0)
          potential[edges[e].to] = std::min(potential[edges[e].to], potential[node] + edges[e].cost);
      }
    }
    double total = 0;
    while (flow-- > 0) {
      std::vector<double> distance(nodes, 1e18);
      std::vector<int> by(nodes, -1);
      using Item = std::pair<double, int>;
      std::priority_queue<Item, std::vector<Item>, std::greater<>> queue;
      queue.push({distance[0] = 0, 0});
      while (!queue.empty()) {
        const auto [far, node] = queue.top();
        queue.pop();
        if (far > distance[node]) continue;
        for (const int e : from[node]) {
          const Edge& edge = edges[e];
          const double next = far + edge.cost + potential[node] - potential[edge.to];
          if (edge.room > 0 && next < distance[edge.to] - 1e-9) {
            distance[edge.to] = next;
            by[edge.to] = e;
            queue.push({next, edge.to});
          }
        }
      }
      if (by[nodes - 1] < 0) break;
      for (int node = 0; node < nodes; ++node) potential[node] += distance[node];
      for (int node = nodes - 1; node != 0; node = edges[by[node] ^ 1].to) {
        --edges[by[node]].room;
        ++edges[by[node] ^ 1].room;
        total += edges[by[node]].cost;
      }
    }
    return total;
  }
};

double least_transfers(const std::vector<Step>& period, int periods, int capacity, double share) {
  struct Gap {
    int begin, end;
    double worth;
  };
  std::vector<Step> steps;
  for (int i = 0; i < periods; ++i) steps.insert(steps.end(), period.begin(), period.end());
  const int count = static_cast<int>(steps.size());
  std::vector<Gap> gaps;
  std::map<int, int> latest;
  std::map<int, std::vector<std::size_t>> since_written;  // gaps
  std::map<int, bool> written;
  const auto charge_write = [&](int run) {
    auto& its = since_written[run];
    if (written[run] && !its.empty()) gaps[its.front()].worth += share, gaps[its.back()].worth += 1 - share;
    its.clear();
  };
  for (int t = 0; t < count; ++t) {
    const Step& use = steps[t];
    if (latest.count(use.run)) {
      since_written[use.run].push_back(gaps.size());
      gaps.push_back({latest[use.run], t, use.access == Access::overwrite ? 0.0 : 1.0});
    }
    if (use.access != Access::read || use.dies) {
      charge_write(use.run);
      written[use.run] = use.access != Access::read;
    }
    latest[use.run] = t;
    if (use.dies) latest.erase(use.run), written[use.run] = false;
  }
  Optimum flow(count + 1);
  for (int t = 0; t < count; ++t) flow.add(t, t + 1, capacity, 0);
  double all = 0;
  for (const Gap& gap : gaps) {
    all += gap.worth;
    if (gap.worth > 0) flow.add(gap.begin, gap.end, 1, -gap.worth);
  }
  return all + flow.run(capacity - 1);
}

double least_a_period(const std::vector<Step>& period, int capacity) {
  double least = 0;
  for (const double share : {0.0, 0.5, 1.0}) {
    least = std::max(least,
                     (least_transfers(period, 7, capacity, share) - least_transfers(period, 3, capacity, share)) / 4);
  }
  return least;
}

/// Transfers of least recently used.
double transfers_of_lru(const std::vector<Step>& period, int periods, std::size_t capacity) {
  std::vector<int> order;  // coldest first
  std::map<int, bool> dirty, at_home;
  double transfers = 0;
  for (int i = 0; i < periods; ++i) {
    for (const Step& use : period) {
      const auto here = std::find(order.begin(), order.end(), use.run);
      if (here != order.end()) {
        order.erase(here);
      } else {
        if (order.size() == capacity) {
          transfers += dirty[order.front()];
          at_home[order.front()] = true;
          order.erase(order.begin());
        }
        transfers += use.access != Access::overwrite && at_home[use.run];
        dirty[use.run] = false;
      }
      dirty[use.run] = dirty[use.run] || use.access != Access::read;
      if (use.dies) {
        at_home[use.run] = dirty[use.run] = false;
      } else {
        order.push_back(use.run);
      }
    }
  }
  return transfers;
}

}  // namespace

TEST_CASE_FIXTURE(CacheFixture, "bytes moved are near the least that any cache could move, for every memory") {
  const int layers = 40;
  const auto period = training_step(layers);
  const int runs = layers * 5;
  std::cout << "memory   least   moved   ratio   least recently used\n";
  for (const int percent : {5, 10, 25, 50, 75, 90, 100}) {
    const int capacity = std::max(8, runs * percent / 100);
    make(capacity * kUnit, 0, kUnit);
    std::map<int, std::unique_ptr<TestSegment>> alive;
    const auto play = [&] {
      for (const Step& use : period) {
        auto& slot = alive[use.run];
        if (!slot) slot = segment(kUnit, use.run % 5 == 4 ? Role::gradient : Role::optimizer);
        const PinRequest request{slot.get(), use.access};
        cache->pin({&request, 1});
        cache->unpin({&request, 1});
        if (use.dies) slot.reset();
      }
    };
    for (int i = 0; i < 4; ++i) play();
    cache->wait();
    const auto before = cache->stats();
    const int periods = 6;
    for (int i = 0; i < periods; ++i) play();
    cache->wait();
    const auto after = cache->stats();
    const double moved =
        static_cast<double>(after.read_bytes - before.read_bytes + after.written_bytes - before.written_bytes) /
        kUnit / periods;
    const double least = least_a_period(period, capacity);
    const double lru = (transfers_of_lru(period, 9, capacity) - transfers_of_lru(period, 3, capacity)) / 6;
    std::cout << percent << " %\t " << least << "\t " << moved << "\t " << (least > 0 ? moved / least : 1) << "\t "
              << lru << "\n";
    // Over the least: prefetched runs and pending writes take room from runs that would stay, in both directions.
    const int window = std::min(capacity / 8, std::max(1, (runs - capacity) / 16));
    CHECK(moved <= 1.05 * least + 4 * (window + 1));
    CHECK(moved <= lru);
    alive.clear();
    cache.reset();
  }
}
