// The configuration: a handful of settings, each with a default that suits the machine.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zeropage {

/// All settings are text as a user writes it; sizes as "256MB" or bytes. Space checks them.
struct Config {
  std::string device = "auto";  // "cpu", "cuda", "cuda:1"; auto: cuda if there is one
  // Tier of a role: "device", "host", "disk"; auto: a GPU, then the host, while half its budget has room, else disk.
  std::string parameters = "auto";
  std::string gradients = "auto";
  std::string optimizer = "auto";
  // Where what autograd saves for backward goes: "host", "disk"; "device": it stays where it is, outside the budgets.
  std::string activations = "device";
  std::string disk_path = "";           // directories, one a disk, with ':' between; empty: /var/tmp if one is needed
  std::string device_memory = "auto";   // for frames; auto: a quarter of what is free on the CPU, 80 % on a GPU
  std::string host_memory = "auto";     // for homes, staging and cache; auto: half of what is free
  std::string resident_below = "64KB";  // smaller tensors stay ordinary tensors in memory
  std::string page_size = "auto";       // the unit that moves; auto: 4 MiB, less under small budgets
  // Whether operators take weights larger than tile_above in tiles: "exact", with no sum in another order; "off";
  // auto: as it is fastest. tile_above: auto: half of device_memory.
  std::string tiling = "auto", tile_above = "auto";
  std::string io = "auto";  // "uring", "threads"
  // Requests to the disk: bytes of each, a multiple of 4 KiB, and how many are in flight; auto: 1 MiB; 64 with
  // io_uring, 16 with threads.
  std::string io_block = "auto", io_depth = "auto";
  std::string memory = "auto";  // "unified": operators on the CPU use host memory; "separate": as on a GPU
  // "true": optimizer.step() returns at once, and parameters are updated when they are next needed; "false": before
  // it returns (of optimizers in Python).
  std::string async_step = "true";
  // Whether parameters on disk are updated under backward, before optimizer.step() asks for it: "never", "always";
  // auto: where memory does not hold everything, and steps are alike. In one process on the CPU.
  std::string update_ahead = "auto";
  // Where a device's optimizer states that are at home below it are updated: "host", "device"; auto: where it is
  // faster, as measured.
  std::string update_on = "auto";
  // Mixed precision: what operators see of parameters ("bfloat16", "float16"; auto: what they are), what masters are
  // and what optimizers keep, and in what gradients are summed and kept.
  std::string visible_dtype = "auto", master_dtype = "float32", gradient_dtype = "float32";
  // What a module's state_dict() gives of a parameter in mixed precision: "master", or "visible", what operators see.
  std::string state_dict = "master";
  // "true": parameters on disk that a loader mapped from a file, as of safetensors, stay in that file until they are
  // written; it must not be written meanwhile. "false": they are copied.
  std::string file_homes = "true";
  // How fused optimizers' moments are kept: "bfloat16", "8bit"; auto: as they are.
  std::string optimizer_dtype = "auto";
  // Over ranks: 1 partitions optimizer states, 2 gradients too, 3 parameters too; 0 none.
  std::string stage = "3";
  std::string partition = "auto";     // roles by name, as "gradients, optimizer", or "none"; auto: as stage says
  std::string reduce_dtype = "auto";  // of gradients on the wire: "float32", "bfloat16", …; auto: their own
  std::string check_ranks =
      "auto";  // that all are at the same operator: "always", "never"; auto: at first, then sampled

  /// Sets a setting by its name. Throws SettingError for an unknown name, with the known ones.
  void set(std::string_view name, std::string value);
  /// Name and value of every setting.
  std::vector<std::pair<std::string, std::string>> items() const;
};

}  // namespace zeropage
