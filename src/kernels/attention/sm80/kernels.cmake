qattn_kernel_sources(portable host.cpp)
qattn_kernel_list(portable instances)
qattn_kernel_list(fp8 fp8_instances)
