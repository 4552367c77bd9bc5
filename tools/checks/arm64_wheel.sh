#!/bin/sh
# Runs the arm64 wheel on an x86-64 machine, in an emulator, and compares its tokens with those of this machine's library.
#   make wheels && DEBIAN=http://HOST/debian tools/checks/arm64_wheel.sh out/wheels/*_aarch64.whl BUNDLE...
# DEBIAN is a mirror, whose packages for arm64 and emulator are unpacked into a folder under /tmp, without root; pip
# fetches numpy and onnxruntime for arm64. PYTHON is the interpreter that tide_export is installed for. Matmuls of int4
# weights round their inputs where a CPU has instructions for that, so that a near tie may be another token there.
set -eu
wheel=$(realpath "$1")
shift
folder=${TMPDIR:-/tmp}/tide-arm64
python=${PYTHON:-python3}
mkdir -p "$folder" && cd "$folder"

packages() { # ARCHITECTURE PACKAGE...: unpacks them, with what they need, into a folder of that name
    mkdir -p "$1/state/lists/partial" "$1/cache/archives/partial" "$1/root"
    touch "$1/state/status"
    cat >"$1/apt.conf" <<EOF
APT::Architecture "$1"; APT::Architectures { "$1"; }; APT::Sandbox::User "root"; Debug::NoLocking "1";
Dir::State "$folder/$1/state"; Dir::State::status "$folder/$1/state/status"; Dir::Cache "$folder/$1/cache";
Dir::Etc::sourcelist "$folder/sources.list"; Dir::Etc::sourceparts "-";
EOF
    architecture=$1
    shift
    export APT_CONFIG="$folder/$architecture/apt.conf"
    apt-get -qq update
    apt-get -qq install -y --download-only --no-install-recommends "$@" >/dev/null
    for package in "$architecture"/cache/archives/*.deb; do dpkg -x "$package" "$architecture/root"; done
}

# Older emulators than trixie's crash in ONNX Runtime.
echo "deb [trusted=yes] ${DEBIAN:?must be the address of a Debian mirror} trixie main" >sources.list
[ -e amd64/root/usr/bin/qemu-aarch64 ] || packages amd64 qemu-user
[ -e arm64/root/usr/bin/python3.13 ] || packages arm64 python3.13 libstdc++6
ln -sfn usr/lib arm64/root/lib
[ -e wheels ] || "$python" -m pip download -q --only-binary :all: --platform manylinux_2_28_aarch64 \
    --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
    --python-version 313 -d wheels numpy onnxruntime
rm -rf site && "$python" -m zipfile -e "$wheel" site
for other in wheels/*.whl; do "$python" -m zipfile -e "$other" site; done

cat >tokens.py <<'EOF'
import sys, tide_export

engine = tide_export.load(sys.argv[1], provider="cpu", threads=1)
options = {"max_new_tokens": 32, "stop_token_ids": []}
for seed in range(4):
    for mode in ("full", "exit", "lossless"):
        print(mode, seed, engine.generate([5, 17, 3, 17, 3], mode=mode, temperature=0.8, seed=seed, **options).tokens)
if engine.max_batch_size > 1:
    print([one.tokens for one in engine.generate([[5, 17, 3], [9, 8, 7, 6]], temperature=0.8, seed=7, **options)])
EOF
failed=0
for bundle in "$@"; do
    "$python" tokens.py "$bundle" >here.txt
    PYTHONPATH=site PYTHONDONTWRITEBYTECODE=1 amd64/root/usr/bin/qemu-aarch64 -L arm64/root \
        arm64/root/usr/bin/python3.13 tokens.py "$bundle" >there.txt
    if diff here.txt there.txt; then
        echo "$bundle: $(wc -l <here.txt) generations, the same tokens on arm64"
    else
        failed=1
    fi
done
exit $failed
