qattn_kernel_sources(codes kv_device.cpp)
