"""The CUDA back end: kernels in .cu files, and devices that run them (a GPU, or the emulator)."""
