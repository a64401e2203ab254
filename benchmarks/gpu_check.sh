#!/bin/sh
# Everything there is to check on a machine with a GPU, in less than 8 minutes and without a download:
# from the root of a source checkout, under whatever python3, cupy and numpy that machine has.
#
#     benchmarks/gpu_check.sh [OUT.json]
#
# First the kernels' tests on the GPU, then benchmarks/gpu_check.py. PYTHON names another interpreter.
set -u
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}
out=${1:-gpu_check.json}
begin=$(date +%s)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

echo "== the kernels' tests on the GPU"
# test_compile asks for the wheels of a machine without a GPU; here CuPy compiles
timeout 240 "$python" -m pytest -q --device cuda -p no:cacheprovider --maxfail 10 \
    --ignore tests/kernels/cuda/test_compile.py tests/kernels/cuda
tests=$?

echo "== speed"
left=$((460 - $(date +%s) + begin))  # seconds
timeout "$left" "$python" benchmarks/gpu_check.py --seconds "$left" --json "$out"
speed=$?
[ "$tests" = 0 ] && [ "$speed" = 0 ]
