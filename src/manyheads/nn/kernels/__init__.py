"""The computation of the modules in `nn`. Each file begins with the formula; fast implementations follow it.

`policy` chooses the implementation. No other file asks about processors, compilers, dtypes or sizes to save time.
"""
