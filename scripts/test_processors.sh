#!/usr/bin/env bash
# The tests as other machines run them: with the code that torch and oneDNN have for older processors, on one thread and
# on more than there are cores, without a C compiler, and on one core beside a busy neighbour.
# Arguments go to pytest. Prints a line for each machine; fails where one of them failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=$PWD/.venv/bin/python
logs=build/processors
mkdir -p "$logs"
failed=0

run() { # NAME COMMAND...: the tests by this command, their output in a file
    local name=$1
    shift
    "$@" >"$logs/$name.log" 2>&1 || failed=1
    printf '%-32s %s\n' "$name" "$(tail -n 1 "$logs/$name.log")"
}

tests=("$python" -m pytest -n auto --dist worksteal "$@")
run oldest_code_on_one_thread env ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1 "${tests[@]}"
run avx2_on_three_threads env ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=3 "${tests[@]}"

bin=$PWD/$logs/bin # what the PATH has, but for the compiler
rm -rf "$bin" && mkdir "$bin"
IFS=: read -ra folders <<<"$PATH"
for folder in "${folders[@]}"; do # of two commands of a name the first stays
    find -L "$folder" -maxdepth 1 -type f ! -name cc -exec ln -s -t "$bin" {} + 2>/dev/null
done
run without_a_compiler env PATH="$bin" "${tests[@]}"

core=$(taskset -cp $$ | grep -o '[0-9]*' | tail -n 1)
taskset -c "$core" sh -c 'while :; do :; done' &
neighbour=$!
trap 'kill "$neighbour"' EXIT
run busy_core taskset -c "$core" "${tests[@]}"
exit "$failed"
