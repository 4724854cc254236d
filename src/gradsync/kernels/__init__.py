"""Hot loops: plain C for CPUs, Triton for GPUs, and the torch reference beside both."""
