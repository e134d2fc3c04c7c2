"""The numbers of a format that torch's steps and the loops must agree on."""

INFINITY_BITS = 0x7F800000  # of fp32; what is above it, without the sign, is NaN
# int8
SCALE_BYTES = 4
LEVELS = 127.0  # symmetric: -128 is never written
# The largest fp32 whose product with 127 is finite; the scale of an absmax near the fp32 maximum
# would round past it.
MAX_SCALE = float.fromhex("0x1.020406p+121")
