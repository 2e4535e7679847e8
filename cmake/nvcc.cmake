# qattn_quick_nvcc(OUT nvcc): the options with which this nvcc compiles quickly instead of well, for
# code that is only to be accepted; none where it does not know them.
function(qattn_quick_nvcc out nvcc)
  execute_process(COMMAND ${nvcc} --help OUTPUT_VARIABLE help ERROR_QUIET)
  set(${out} "" PARENT_SCOPE)
  if(help MATCHES "--Ofast-compile")
    set(${out} --Ofast-compile=max PARENT_SCOPE)
  endif()
endfunction()
