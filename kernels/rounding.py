"""Products that are rounded before they are added to something."""

import triton
import triton.language as tl

NOTHING = tl.constexpr(0.0)


@triton.jit
def rounded(product):
    """A float32 product rounded to float32: the compiler fuses it with 0, not with a later sum.

    Fused, x·y − x·y would be a rounding error, and not 0. And where a thread has one term of a sum
    over a warp, it would add its own product unrounded to its neighbour's rounded one: the threads
    that hold the sum would differ in its last bit.
    """
    return product + NOTHING
