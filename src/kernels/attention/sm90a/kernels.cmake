qattn_kernel_group(hopper FOR "^90a$")
qattn_kernel_sources(host host.cpp host_16bit.cpp)
qattn_kernel_list(hopper instances)
qattn_kernel_list(hopper o1_instances OPTIONS -Xptxas=-O1)
