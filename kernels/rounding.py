"""How products are rounded: before a sum uses them, and in matrix products of float32."""

import triton
import triton.language as tl

# ``input_precision`` of float32 matrix products: on NVIDIA's tensor cores three tf32 products, with
# errors near 2^-22.
PRECISE = tl.constexpr("tf32x3")
NOTHING = tl.constexpr(0.0)


@triton.jit
def rounded(product):
    """A float32 product, rounded to float32: the compiler fuses it with 0, not with a later sum.

    Fused, x·y − x·y would be a rounding error instead of 0. In a sum over a warp with one term per
    thread, each thread would add its own unrounded product to its neighbour's rounded product,
    so the threads' sums would differ in the last bit.
    """
    return product + NOTHING
