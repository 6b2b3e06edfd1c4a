"""What depends on processors, compilers, devices and number types. `policy` measures what a machine does well."""
