qattn_kernel_sources(host gpu.cpp)
