"""Code that depends on processors, compilers, devices and number types. `policy` measures which precision is faster."""
