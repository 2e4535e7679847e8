qattn_kernel_sources(host host.cpp)
qattn_kernel_list(mixed_kv instances)
