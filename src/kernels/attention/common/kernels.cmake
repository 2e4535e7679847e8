qattn_kernel_sources(everywhere spoil.cpp)
