qattn_kernel_sources(host host.cpp)
