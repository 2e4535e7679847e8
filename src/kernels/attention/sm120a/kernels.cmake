qattn_kernel_group(geforce FOR "^12[0-9][af]$")
qattn_kernel_sources(host host.cpp)
qattn_kernel_list(geforce instances)
