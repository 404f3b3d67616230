// Norms of rows on a CPU.
#pragma once

#include "base/rows.h"

namespace fastkd {

// ‖x‖ of a row; of finite numbers neither their squares nor the sum leave the range of float64.
double row_norm(const Rows& rows, int64_t row);

}  // namespace fastkd
