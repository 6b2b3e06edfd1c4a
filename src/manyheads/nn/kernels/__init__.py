"""The computation of the modules in `nn`. Each file begins with the formula; fast implementations follow it.

Modules compute with torch's own operations. Within a block of `fast()`, which the runners of this package enter,
`policy` chooses the fastest implementation. No other file asks about processors, compilers, dtypes or sizes to save
time.
"""

from manyheads.nn.kernels.modes import fast

__all__ = ["fast"]
