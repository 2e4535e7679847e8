qattn_kernel_sources(codes prepare.cpp quantize_device.cpp)
qattn_kernel_list(codes encoders)
