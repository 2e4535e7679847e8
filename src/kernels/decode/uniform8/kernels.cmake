# Conversions from FP8 begin with sm_89.
qattn_kernel_group(uniform8 BASES 80 89 90 PTX)
qattn_kernel_sources(host host.cpp)
qattn_kernel_list(uniform8 instances)
