#!/bin/sh
# Unpacks the headers that the C++ runtime is compiled with into a folder, without root and without installing anything:
#   tools/onnxruntime_headers.sh FOLDER
# They are those of Debian 13 (trixie): ONNX Runtime's, which older releases do not have, and nlohmann/json's. They come
# from the mirror that this machine's own apt uses, by apt itself, which checks their signatures. Afterwards
# FOLDER/usr/include/onnxruntime and FOLDER/usr/include are what CMake takes as ONNXRUNTIME_INCLUDE_DIR and
# NLOHMANN_JSON_INCLUDE_DIR.
set -eu

SUITE=trixie
PACKAGES="libonnxruntime-dev nlohmann-json3-dev"
APT=${TIDE_APT_SOURCES:-/etc/apt}  # where apt's sources are read from

fail() {
  echo "$0: $1: install $PACKAGES (Debian 13 has them), or unpack a release of ONNX Runtime and give" \
    "its headers with -DONNXRUNTIME_INCLUDE_DIR" >&2
  exit 2
}

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
for command in apt-get dpkg; do
  command -v "$command" >/dev/null || fail "there is no $command here"
done
mkdir -p "$1" || exit 2
folder=$(cd "$1" && pwd)
[ -f "$folder/complete" ] && exit 0

# The first address whose path ends in /debian: of "URIs: ..." (deb822), else of "deb [options] address suite ...".
mirror=$(cat "$APT"/sources.list.d/*.sources "$APT"/sources.list "$APT"/sources.list.d/*.list 2>/dev/null |
  sed -n -e 's/^URIs:[[:space:]]*//p' -e 's/^deb[[:space:]]\{1,\}\(\[[^]]*\][[:space:]]*\)\{0,1\}//p' |
  tr '[:space:]' '\n' | grep -E '^[a-z+]+:.*/debian/?$' | head -n 1) || true
[ -n "$mirror" ] || fail "apt has no Debian mirror among its sources"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/etc"
echo "deb $mirror $SUITE main" >"$work/sources.list"
: >"$work/status"
apt() {
  apt-get -q -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=- -o Dir::Etc::Preferences=- \
    -o Dir::Etc::PreferencesParts=- -o Dir::State="$work" -o Dir::State::lists="$work/lists" \
    -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache" -o Acquire::Languages=none \
    -o APT::Sandbox::User="$(id -un)" -o APT::Update::Error-Mode=any -o Acquire::Retries=3 "$@"
}
apt update >"$work/log" 2>&1 || fail "apt cannot read $SUITE from this machine's mirror ($(grep -m 1 '^[EW]:' "$work/log"))"
(cd "$work" && apt download $PACKAGES >>log 2>&1) || fail "apt cannot download them ($(grep -m 1 '^[EW]:' "$work/log"))"
for package in "$work"/*.deb; do
  dpkg -x "$package" "$folder" || fail "dpkg cannot unpack $(basename "$package")"
done
[ -f "$folder/usr/include/onnxruntime/onnxruntime_cxx_api.h" ] || fail "$SUITE's package has no headers where they were"
[ -f "$folder/usr/include/nlohmann/json.hpp" ] || fail "$SUITE's package has no json.hpp where it was"
touch "$folder/complete"
