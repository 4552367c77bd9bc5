#!/bin/sh
# The first run of a bundle's networks on your GPU, in one file to send back: neither ONNX Runtime's (cuda) nor TensorRT
# plans of this project have run yet.
#   sh tools/checks/first_run.sh [-t cuda|tensorrt|tensorrt-rtx] [-m MODEL] [-o FOLDER]
# Installs this checkout with ONNX Runtime for CUDA or with TensorRT into a folder of its own, exports a small model, builds
# its plans, compares them with ONNX Runtime on the CPU and with the model, and times them, with exits, at full depth and by
# trtexec where it is installed; for cuda also without recordings.
# Writes FOLDER/first_run.tgz (build/first_run): versions, the GPU's name, and what each step printed; nothing of the model.
# It needs an NVIDIA GPU, Python 3.11, a C++ compiler and network; expect 15 GB and half an hour. A step that fails is recorded,
# and the others go on, but for those that rest on it. Exit code 1: a step failed. PYTHON is the interpreter (python3).
set -u
cd "$(dirname "$0")/../.." || exit 2

flavour=tensorrt model=HuggingFaceTB/SmolLM2-135M folder=build/first_run
usage() {
    sed -n '2,4p' "$0" | cut -c3-
    exit "$1"
}
while getopts ht:m:o: option; do
    case $option in
    t) flavour=$OPTARG ;;
    m) model=$OPTARG ;;
    o) folder=$OPTARG ;;
    h) usage 0 ;;
    *) usage 2 >&2 ;;
    esac
done
built=build plans=yes
case $flavour in
cuda) extras=export,cuda built=export plans= ;;
tensorrt) extras=export,gpu ;;
tensorrt-rtx) extras=export,rtx,cpu ;;
*) usage 2 >&2 ;;
esac
command -v nvidia-smi >/dev/null || {
    echo "first_run: there is no nvidia-smi, and so no NVIDIA GPU or no driver: run it on the machine with the GPU" >&2
    exit 2
}
mkdir -p "$folder" || exit 2
folder=$(cd "$folder" && pwd)
logs=$folder/first_run python=$folder/venv/bin/python tide=$folder/venv/bin/tide-export bundle=$folder/bundle
rm -rf "$logs" "$bundle"
mkdir -p "$logs"
passed=" " code=0

record() { # STEP OUTCOME: into the report
    echo "| $1 | $2 |" >>"$logs/report.md"
    echo "$1: $2"
}

step() { # STEP NEEDS COMMAND...: a step after others (- for none), with its output in a file of its own
    name=$1 needs=$2
    shift 2
    for before in $(echo "$needs" | tr ',-' '  '); do
        case $passed in
        *" $before "*) ;;
        *)
            record "$name" "not run: $before has not passed"
            return
            ;;
        esac
    done
    begun=$(date +%s)
    { echo "$*" && "$@"; } >"$logs/$name.txt" 2>&1
    status=$?
    seconds=$(($(date +%s) - begun))
    if [ $status -eq 0 ]; then
        passed="$passed$name "
        record "$name" "passed in $seconds s"
    else
        code=1
        record "$name" "failed with exit code $status after $seconds s"
        tail -3 "$logs/$name.txt"
    fi
}

trtexec_times() { # one token of one sequence, by each plan
    for plan in "$bundle"/engines/*.engine; do
        trtexec --loadEngine="$plan" --useCudaGraph --noDataTransfers --warmUp=500 --duration=3 || return
    done
}

printf '# First run\n\n%s, model %s\n\n| step | outcome |\n| --- | --- |\n' "$flavour" "$model" >"$logs/report.md"
step gpu - nvidia-smi
step environment - "${PYTHON:-python3}" -m venv "$folder/venv"
step install environment "$python" -m pip install --disable-pip-version-check ".[$extras]"
step versions install "$python" -m pip freeze
timed() { # STEP COMMAND...: bench, by the tide-export that COMMAND ends with
    name=$1
    shift
    step "$name" "$built" "$@" bench "$bundle" --provider "$flavour" --prompt-tokens 64 --new-tokens 128
}
step export install "$tide" export "$model" -o "$bundle" --target "$flavour" --weights fp16 ${plans:+--no-engines} --max-length 1024 \
    --dataset calibration/text/python-stdlib.jsonl --calibration-samples 60
[ -z "$plans" ] || step build export "$tide" build "$bundle" --plugins none
step inspect "$built" "$tide" inspect "$bundle"
[ -z "$plans" ] || step compare build "$python" tools/checks/plans.py "$bundle"
step validate "$built" "$tide" validate "$bundle" --model "$model" --provider "$flavour"
timed bench "$tide"
if [ -z "$plans" ]; then
    timed bench-unrecorded env TIDE_CUDA_GRAPHS=0 "$tide"
else
    timed bench-host env TIDE_HOST_DECIDES=1 "$tide"
fi
if [ "$flavour" = tensorrt ] && command -v trtexec >/dev/null; then
    step trtexec build trtexec_times
else
    record trtexec "not run: there is none for $flavour on the path"
fi
tar czf "$folder/first_run.tgz" -C "$folder" first_run || exit 2
echo "$folder/first_run.tgz: please attach it to an issue of this project, whatever it says"
exit $code
