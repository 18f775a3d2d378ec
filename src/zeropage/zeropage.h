// zeropage: virtual memory for training state. This header is the table of contents for C++ programs: it declares
// nothing itself. Other headers are internal, except comm/torchrun.h, and change without notice.
#pragma once

#include "zeropage/base/errors.h"             // ConfigError, BudgetError, DiskError, AccessError
#include "zeropage/checkpoint/checkpoint.h"   // save, load: a module and its optimizer, as in Python
#include "zeropage/checkpoint/snapshot.h"     // Snapshot: present content of tensors, written while training goes on
#include "zeropage/checkpoint/tensor_file.h"  // TensorFileWriter, TensorFolderReader: tensors in files, page by page
#include "zeropage/space/config.h"            // Config: tiers of each role, budgets
#include "zeropage/space/space.h"             // Space: make, enter, page, report; is_paged, evict, pin
