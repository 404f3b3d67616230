// Norms of rows on a CPU.
#pragma once

#include "base/rows.h"

namespace fastkd {

// ‖x‖ of a row, without overflow or underflow of squares.
double row_norm(const Rows& rows, int64_t row);

}  // namespace fastkd
