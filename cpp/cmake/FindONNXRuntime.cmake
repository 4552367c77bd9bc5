# Finds ONNX Runtime, as the target ONNXRuntime::ONNXRuntime: a system package, a release unpacked in ONNXRUNTIME_ROOT,
# or the library of `pip install onnxruntime`, given as the file ONNXRUNTIME_LIBRARY. The library is required; its
# headers, ONNXRUNTIME_INCLUDE_DIR, are optional.
set(ONNXRUNTIME_ROOT "$ENV{ONNXRUNTIME_ROOT}" CACHE PATH "A folder with an unpacked release of ONNX Runtime")
find_path(ONNXRUNTIME_INCLUDE_DIR onnxruntime_cxx_api.h
  HINTS ${ONNXRUNTIME_ROOT} ENV ONNXRUNTIME_INCLUDE_DIR
  PATH_SUFFIXES include include/onnxruntime include/onnxruntime/core/session onnxruntime onnxruntime/core/session
  DOC "Folder with onnxruntime_cxx_api.h")
find_library(ONNXRUNTIME_LIBRARY onnxruntime
  HINTS ${ONNXRUNTIME_ROOT} PATH_SUFFIXES lib DOC "The file libonnxruntime.so, of the wheel libonnxruntime.so.1.x.y")

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(ONNXRuntime REQUIRED_VARS ONNXRUNTIME_LIBRARY REASON_FAILURE_MESSAGE
  "give ONNXRUNTIME_ROOT, or ONNXRUNTIME_LIBRARY: the file libonnxruntime.so.1.x.y in the folder onnxruntime/capi of the Python package onnxruntime will do")
mark_as_advanced(ONNXRUNTIME_INCLUDE_DIR ONNXRUNTIME_LIBRARY)

if(ONNXRuntime_FOUND AND NOT TARGET ONNXRuntime::ONNXRuntime)
  set(onnxruntime_file ${ONNXRUNTIME_LIBRARY})
  # Programs load libonnxruntime.so.1, its SONAME; the wheel has only the file with the full version.
  get_filename_component(onnxruntime_folder ${ONNXRUNTIME_LIBRARY} DIRECTORY)
  if(ONNXRUNTIME_LIBRARY MATCHES "/libonnxruntime\\.so\\.([0-9]+)\\.[0-9.]+$"
     AND NOT EXISTS ${onnxruntime_folder}/libonnxruntime.so.${CMAKE_MATCH_1})
    set(onnxruntime_file ${CMAKE_BINARY_DIR}/onnxruntime/libonnxruntime.so.${CMAKE_MATCH_1})
    file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/onnxruntime)
    file(CREATE_LINK ${ONNXRUNTIME_LIBRARY} ${onnxruntime_file} SYMBOLIC)
  endif()
  add_library(ONNXRuntime::ONNXRuntime SHARED IMPORTED)
  set_target_properties(ONNXRuntime::ONNXRuntime PROPERTIES IMPORTED_LOCATION ${onnxruntime_file})
  if(ONNXRUNTIME_INCLUDE_DIR)
    target_include_directories(ONNXRuntime::ONNXRuntime INTERFACE ${ONNXRUNTIME_INCLUDE_DIR})
  endif()
endif()
