"""The computation behind the modules of `nn`. In each file the formula stands first, the fast implementations below it.

`policy` decides between them: only it asks about processors, compilers, number types and sizes.
"""
