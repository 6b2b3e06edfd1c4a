"""Kernels in Triton, which is optional: `policy` says where they are used. Importing these files needs Triton."""
