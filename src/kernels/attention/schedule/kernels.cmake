qattn_kernel_sources(host tile_scheduler.cpp)
qattn_kernel_sources(everywhere split_kv.cpp varlen.cpp)
