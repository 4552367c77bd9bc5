#!/bin/sh
# The kernel under compute-sanitizer: bad addresses, races, reads of memory that nothing wrote, barriers.
#   sh tests/gpu/sanitize.sh [libtide_kernels.so]        without a library it is built here, for this machine's GPU
set -eu
cd "$(dirname "$0")/../.."
library=${1:-build/plugins/plugins/libtide_kernels.so}
if [ $# -eq 0 ]; then
  cmake --preset plugins >/dev/null
  cmake --build --preset plugins --target tide_kernels >/dev/null
fi
for tool in memcheck racecheck initcheck synccheck; do
  echo "== $tool"
  compute-sanitizer --tool "$tool" --error-exitcode 1 "${PYTHON:-python3}" tests/plugins/kernel_cases.py "$library" --gpu
done
