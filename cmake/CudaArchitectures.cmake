# Which GPUs the kernels are compiled for: CUDA_ARCHITECTURES if given, else that of the GPU in this machine, else all.

# Turing, Ampere (A100, RTX 30), Ada, Hopper, Blackwell (B200, RTX 50); PTX of 90 and 120 for what comes after or between.
set(TIDE_ALL_CUDA_ARCHITECTURES 75-real 80-real 86-real 89-real 90 100-real 120)

function(tide_choose_cuda_architectures)
  if(CUDA_ARCHITECTURES)
    string(REPLACE "," ";" chosen "${CUDA_ARCHITECTURES}")
    set(why "CUDA_ARCHITECTURES")
  else()
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE found ERROR_QUIET RESULT_VARIABLE status OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(status EQUAL 0 AND found MATCHES "^[0-9]+\\.[0-9]+")
      string(REGEX MATCHALL "[0-9]+\\.[0-9]+" chosen "${found}")
      string(REPLACE "." "" chosen "${chosen}")
      list(REMOVE_DUPLICATES chosen)
      set(why "the GPU in this machine")
    else()
      set(chosen ${TIDE_ALL_CUDA_ARCHITECTURES})
      set(why "no GPU here: all")
    endif()
  endif()
  message(STATUS "tide_export: kernels for ${chosen} (${why})")
  set(CMAKE_CUDA_ARCHITECTURES "${chosen}" PARENT_SCOPE)
endfunction()
