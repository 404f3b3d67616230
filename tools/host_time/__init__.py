"""Host time of the Triton path, without a GPU.

`stub.c` is a libcuda whose functions return 0. fastkd's Triton path runs on CPU tensors through
Triton's own launcher, with code compiled for sm_90, and the host's time is measured. What is
missing: the real ``cuLaunchKernelEx`` (2 to 4 µs), the autograd thread of a device, the caching
allocator. Ratios between two commits, measured in turn, are what counts.

``python -m tools.host_time [--json] [--repeat N] [KEY ...]`` prints, for each of the benchmark's
cases at BERT's sizes, µs of the forward pass, µs of the backward pass (medians), and launches.
``--against TREE`` measures another checkout in turn and prints the ratios of both passes together.
"""
