qattn_kernel_group(hopper_codes FOR "^90a$" OPTIONS --fmad=false)
qattn_kernel_sources(hopper_codes overlap.cpp)
