# Programmatic dependent launches are what these have of sm_90; from its code they spill less on
# sm_100 and sm_120.
qattn_kernel_group(mixed_kv BASES 80 90 EXCEPT 89 PTX)
qattn_kernel_sources(host host.cpp)
qattn_kernel_list(mixed_kv instances)
