"""What CUDA's caching allocator reserves for a step, emulated. Imports no torch."""
