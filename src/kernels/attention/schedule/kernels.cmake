qattn_kernel_sources(host tile_scheduler.cpp)
qattn_kernel_sources(portable split_kv.cpp varlen.cpp)
