qattn_kernel_sources(hopper_codes overlap.cpp)
