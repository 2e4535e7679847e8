qattn_kernel_sources(host host.cpp)
qattn_kernel_list(uniform8 instances)
