// The process group of a C++ program that torchrun started (`torchrun --no-python`), for Groups::shard. A program
// that another launcher starts makes its group with torch's own classes. zeropage.h does not include it. Header only:
// the backends depend on the headers that the program is built with. Gloo's come with Debian's libgloo-dev; those of
// NCCL with the CUDA build of torch and NCCL's own.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#if __has_include(<gloo/algorithm.h>)
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#endif
#if __has_include(<nccl.h>) && __has_include(<cuda_runtime_api.h>)
#ifndef USE_C10D_NCCL
#define USE_C10D_NCCL
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <chrono>
#include <cstdlib>
#include <string>

#include "zeropage/base/errors.h"

namespace zeropage {

/// The group of all ranks, from torchrun's environment: Gloo for the CPU, NCCL for `device` if that is a GPU. A
/// collective gives up after `timeout`. Throws ConfigError if the program was not started by torchrun, or was built
/// without the headers that the group needs.
/// Connects to rank 0 and waits for it. Call it once; all ranks do.
inline c10::intrusive_ptr<c10d::ProcessGroup> torchrun_group(
    c10::Device device = c10::kCPU, std::chrono::milliseconds timeout = std::chrono::minutes(30)) {
  const auto variable = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    if (!value) throw ConfigError(std::string(name) + " is not set; start the program with torchrun --no-python");
    return value;
  };
  const int rank = std::stoi(variable("RANK")), size = std::stoi(variable("WORLD_SIZE"));
  const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(std::stoi(variable("MASTER_PORT")));
  options.isServer = rank == 0 && !(agent && std::string(agent) == "True");
  options.numWorkers = size;
  options.waitWorkers = false;
  options.timeout = timeout;
  auto everyones = c10::make_intrusive<c10d::TCPStore>(variable("MASTER_ADDR"), options);
  auto store =
      c10::make_intrusive<c10d::PrefixStore>(std::string("zeropage/") + (restarts ? restarts : "0"), everyones);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
#ifdef USE_C10D_GLOO
  auto gloo_options = c10d::ProcessGroupGloo::Options::create(timeout);
  gloo_options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO,
                    c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>("gloo", store),
                                                                rank, size, gloo_options));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
#else
  if (device.is_cpu()) {
    throw ConfigError("the program was built without Gloo's headers; install libgloo-dev and build it again");
  }
#endif
#ifdef USE_C10D_NCCL
  if (device.is_cuda()) {
    auto nccl_options = c10d::ProcessGroupNCCL::Options::create();
    nccl_options->timeout = timeout;
    group->setBackend(c10::kCUDA, c10d::ProcessGroup::BackendType::NCCL,
                      c10::make_intrusive<c10d::ProcessGroupNCCL>(
                          c10::make_intrusive<c10d::PrefixStore>("nccl", store), rank, size, nccl_options));
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::NCCL);
  }
#else
  if (device.is_cuda()) {
    throw ConfigError("the program was built without NCCL's headers; install them and build it again");
  }
#endif
  return group;
}

}  // namespace zeropage
