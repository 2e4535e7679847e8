# Products of FP8 are for the GPUs that have them in mma.sync.
qattn_kernel_group(fp8 FOR "^(89|12[0-9][af]?)$" PTX)
qattn_kernel_sources(host host.cpp)
qattn_kernel_list(everywhere instances)
qattn_kernel_list(fp8 fp8_instances)
