#!/usr/bin/env bash
# The figures of one GPU host, in parts of less than nine minutes each, the most important first:
#
#   bash docs/results/measure.sh DIR pages      # writes DIR/pages.tar.gz; then wake, serve, soak, others
#   bash docs/results/measure.sh DIR            # all of them, half an hour
#
#   part     steps                                         about, on an H200
#   pages    pages                                         5 min: 4:20, and 0:41 for the checkpoint
#   wake     wake, throughput, wake_default, timeline      7 min: 2:35, 1:30, 1:20, 1:00
#   serve    serve, http, load                             8 min: 4:05, 2:40, 1:35
#   soak     soak, eval, wishes                            7 min: 400 cycles of 0.35 s (SOAK_CYCLES), 1:00, 2:20
#   others   others, kept                                  6 min: 4:10, 1:50
#   compressed, parts    a compressed image's wake, and one of them part by part    4 min
#   packing  an image made, and compressed afterwards    2 min
#   many     many: 16 models of 1.5B, VARIANTS one by one  8 min for each of VARIANTS (shared): LIMIT_S, MANY_S
#   many7    5 models of 7B, likewise; COMPRESSION=auto: with images as a server has them by default
#   swaps    200 swaps between two models of 7B    5 min
#   agents, hot, rare    other questions, see card_traces.py: 3 models of 7B; 8 and 24 of 1.5B
#   recipes  quantised checkpoints beside plain weights    8 min: 2:30 for each of RECIPES (plain gptq-4-128 fp8-block)
#   products products with quantised weights, by tiles     3 min
#   tests    the tests that want a GPU, or those of TESTS; 9 min on a slow host, half of it end to end
#
# pages goes first: what it says of the default page size holds for all others. The README's table is made of
# wake, serve and soak.
#
# Each part can run alone, on a bare machine: it makes the checkpoint where there is none. A step's name is a
# part, too. A part ends after LIMIT_S, with what there is; its archive is written anew after each step, and
# holds the JSON files, what was printed, and the logs. Where the code is a copy without git, say of which
# commit: SLEEPSERVE_COMMIT=$(git describe --always --abbrev=40 --dirty '--exclude=*').
#
# Times that are compared with the link's (wake, kept, others) want a host that does nothing else.
#
#   for part in DIR/*.tar.gz; do tar -C docs/results/DATE_HOST --wildcards -xzf $part '*.json'; done
#   python docs/results/table.py                              # the tables of README and docs/benchmarks.md
#   python -m docs.results.report docs/results/DATE_HOST/*.json --out DIR         # tables and plots
#
# CHECKPOINT is where the checkpoint is, or is made; PY the interpreter. CACHE_TOKENS: a KV cache of 8.2 GiB, so
# that runs can be compared.
set -u

out=$(mkdir -p "$1" && cd "$1" && pwd); shift
project=$(cd "$(dirname "$0")/../.." && pwd)
checkpoint=${CHECKPOINT:-/tmp/deepseek-r1-distill-qwen-7b}
shape=${SHAPE:-deepseek-r1-distill-qwen-7b}
small=${SHAPE:-deepseek-r1-distill-qwen-1.5b}
config=${CONFIG:-configs/deepseek-r1-distill-qwen-7b_h200.yaml}
port=${PORT:-8321}
# Bytecode, as an installed package has it: a start without compiles whatever it imports.
export PYTHONPATH=$project${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=
cd "$project" || exit 1
page=$("${PY:-python3}" -c 'from actors.engine.config import DEFAULT_PAGE_SIZE; print(DEFAULT_PAGE_SIZE)') || exit 1
blocks="num_blocks=$((${CACHE_TOKENS:-153600} / page))"
work=$(mktemp -d)
programs=$(mktemp -d)
trap 'rm -rf "$work" "$programs"' EXIT
# As where it is installed: HAProxy takes the requests.
printf '#!%s\nfrom serve_app.process.haproxy import main\nmain()\n' "$(command -v "${PY:-python3}")" > "$programs/sleepserve-haproxy"
chmod +x "$programs/sleepserve-haproxy"
PATH=$PATH:$programs

run() {  # NAME SECONDS ARGUMENT...: sleepserve, or $module, for no longer than the part has
    local name=$1 seconds=$2 began=$SECONDS
    shift 2
    if ((ends - SECONDS < seconds)); then seconds=$((ends - SECONDS)); fi
    if ((seconds < 20)); then echo "$name: left out, the part's time is up"; return; fi
    # A job that bash does not control ignores SIGINT, and so would all that it starts.
    env --default-signal=INT timeout --signal=INT --kill-after=20 "$seconds" "${PY:-python3}" -m "${module:-serve_app.cli.main}" "$@" > "$work/$name.txt" 2> "$work/$name.log"
    echo "$name: exit code $?, $((SECONDS - began)) s"
    pack
}

pack() {
    tar -C "$work" -czf "$archive.new" .
    [ $? -le 1 ] && mv "$archive.new" "$archive"  # 1: a log grew meanwhile
}

serve() {  # COMMAND...: while a server runs whose model falls asleep after 2 s without requests
    local server ask=(curl -sf -m 60 "127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' -d '{"prompt": "Hi", "max_tokens": 4}')
    "${PY:-python3}" - "$config" "$checkpoint" "$port" > "$work/serve_config.yaml" << 'PYTHON'
import os
import sys
import yaml
settings, checkpoint, port = sys.argv[1:]
model = yaml.safe_load(open(settings)) | {"source": {"id": os.path.abspath(checkpoint)}}
model["sleep"] = model.get("sleep", {}) | {"idle_timeout_s": 2.0}
config = yaml.safe_load(open("docs/results/serve_many.yaml"))
config["http_options"]["port"] = int(port)
for application in config["applications"]:
    application["args"]["models"] = [model]
yaml.safe_dump(config, sys.stdout)
PYTHON
    "${PY:-python3}" -m serve_app.cli.main serve "$work/serve_config.yaml" > "$work/serve_many.log" 2>&1 &
    server=$!
    for _ in $(seq 120); do ((SECONDS < ends)) && ! "${ask[@]}" > "$work/ready.txt" || break; sleep 1; done
    for _ in $(seq "${COMPILES_TRIES:-20}"); do  # what is compiled while it sleeps is used once it is awake
        grep -q 'decoder layers run compiled' "$work/serve_many.log" && break
        sleep 3; "${ask[@]}" > "$work/ready.txt"
    done
    "$@"
    kill -TERM "$server"  # a job that bash does not control ignores SIGINT
    for _ in $(seq 60); do kill -0 "$server" 2> /dev/null || break; sleep 1; done
    kill -KILL "$server" 2> /dev/null
    wait "$server"
}

http() {
    local url="http://127.0.0.1:$port"
    run http_closed 120 bench http --url "$url" --endpoint completions --concurrency 1 16 64 256 --json "$work/http_closed.json"
    run http_open 120 bench http --url "$url" --endpoint completions --request-rate 10 40 80 --duration 10 --json "$work/http_open.json"
    run http_cold 120 bench http --url "$url" --endpoint completions --concurrency 4 --requests 80 --idle-every 8 --idle-s 3 --max-tokens 32 --json "$work/http_cold.json"
}

wishes() {  # what people ask for: sampling, a second turn, and no halt beside a long prompt
    local url="http://127.0.0.1:$port" at_64=(bench http --endpoint completions --concurrency 64)
    run http_sampled 60 "${at_64[@]}" --url "$url" --extra-body '{"temperature": 0.8, "top_p": 0.95}' --json "$work/http_sampled.json"
    run http_qwen 60 "${at_64[@]}" --url "$url" --json "$work/http_qwen.json" \
        --extra-body '{"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}'
    module=docs.results.turns run turns 60 "$url" --json "$work/turns.json"
    module=docs.results.long_prompt run long_prompt 90 "$url" --json "$work/long_prompt.json"
}

models() {  # NAME SHAPE COUNT: checkpoints with weights of their own, where there are none, and in `files` a YAML file each
    local name=$1 shape=$2 count=$3 base=$checkpoint-many-$2 number
    [ -e "$base/config.json" ] || run "${name}_checkpoint" 120 make-checkpoint "$base" --shape "$shape" --tied
    files=()
    for number in $(seq 1 "$count"); do
        [ -e "$base-$number/config.json" ] ||
            "${PY:-python3}" -m serve_app.cli.main make-checkpoint "$base-$number" --variant-of "$base" --seed "$number" > /dev/null &
        files+=("$work/$name-$number.yaml")
        cat > "$work/$name-$number.yaml" <<-YAML
		model_id: $name-$number
		source: {id: $base-$number}
		engine: {device: ${DEVICE:-cuda}, max_model_len: 4096, num_blocks: 1024, max_requests_per_batch: 64, use_torch_compile: false}
		sleep: {idle_timeout_s: null}
		sharing: ${SHARING:-{min_awake_s: 0.5, preempt: freeze\}}
		image: {compression: "${COMPRESSION:-off}"}
		num_cpus: 0.1
		YAML
    done
    wait
}

many() {  # NAME SHAPE COUNT BUDGET: a trace for so many models on one card
    models "$1" "$2" "$3"
    run "$1" "${MANY_S:-580}" bench many "${files[@]}" --memory-budget "$4" --variants "${VARIANTS:-shared}" ${TRACE:+--trace "$TRACE"} \
        --time-scale "${TIME_SCALE:-1}" --duration "${DURATION_S:-300}" --json "$work/$1.json"
}

asked() {  # NAME TRACE SHAPE COUNT BUDGET OPTION...: the same, by a trace of `card_traces`
    local name=$1 trace=$2 shape=$3 count=$4 budget=$5
    shift 5
    module=docs.results.card_traces run "${name}_trace" 30 "$trace" "$work/$name.csv" "$@"
    TRACE=$work/$name.csv many "$name" "$shape" "$count" "$budget"
}

quantised() {  # RECIPE, or plain: its wake, and its engine
    local from=$checkpoint variants=pipelined
    if [ "$1" != plain ]; then
        from=$checkpoint-$1 variants=pipelined,compressed  # which its embedding and its head are
        run "$1_checkpoint" 120 make-checkpoint "$from" --shape "$shape" --quantize "$1"
    fi
    module=docs.results.throughput run "throughput_$1" 100 "$from" --engine "$blocks" max_events_per_s=1000 --concurrency 1 64 256 --json "$work/throughput_$1.json"
    run "wake_$1" 100 bench wake "$from" --variants $variants --prompt-tokens 7 2048 --cycles 8 --limit-s 30 --requests 4 --engine "$blocks" --json "$work/wake_$1.json"
    [ "$1" = plain ] || rm -rf "$from"
}

step() {
    case $1 in
    tests)
        local files=${TESTS:-$(grep -rlE 'mark\.gpu|OF_CARD' tests --include='test_*.py' | sort -r)} of_pytest=(-q -p no:cacheprovider -p no:benchmark --durations=10)
        module=pytest run tests_together 400 -m 'gpu and not alone' -n 5 --dist worksteal "${of_pytest[@]}" $files
        module=pytest run tests_alone 580 -m 'gpu and alone' "${of_pytest[@]}" $files ;;  # end to end last
    products) module=docs.results.quantized_matmul run products 200 --limit-s 150 --json "$work/products.json" ;;
    recipes) for recipe in ${RECIPES:-plain gptq-4-128 fp8-block}; do quantised "$recipe"; done ;;
    wake) run wake 240 bench wake "$checkpoint" --variants pipelined,serial,unpinned,kept-sweep \
        --cycles 20 --limit-s 110 --assert goals --engine "$blocks" --json "$work/wake.json" ;;
    timeline) module=docs.results.timeline run timeline 90 "$checkpoint" --engine "$blocks" --json "$work/timeline.json" ;;
    parts) module=docs.results.timeline run parts 150 "$checkpoint" --compressed --engine "$blocks" --json "$work/parts.json" ;;
    compressed) run compressed 200 bench wake "$checkpoint" --variants pipelined,compressed \
        --cycles 20 --limit-s 60 --requests 4 --engine "$blocks" --json "$work/compressed.json" ;;
    packing) module=docs.results.packing run packing 200 "$checkpoint" --json "$work/packing.json" ;;
    wake_default) run wake_default 150 bench wake "$checkpoint" --variants pipelined --cycles 20 --limit-s 45 \
        --engine num_blocks=null max_batch_tokens=8192 max_requests_per_batch=256 --json "$work/wake_default.json" ;;
    throughput)  # in one process, whoever reads events has the interpreter's lock from the engine
        module=docs.results.throughput run throughput 260 "$checkpoint" --engine "$blocks" max_events_per_s=1000 --sampling 64 \
        --profile "$work/profile" --json "$work/throughput.json" ;;
    serve) module=docs.results.serve run serve 420 "$checkpoint" --config "$config" --serve-config docs/results/serve_many.yaml --engine "$blocks" \
        --concurrency 16 64 256 --warm-when 'decoder layers run compiled' --json "$work/serve.json" --log "$work/serve_run.log" ;;
    http) serve http ;;
    wishes) serve wishes ;;
    load) run load 300 bench load "$checkpoint" --engine "$blocks" --json "$work/load.json" ;;
    pages) module=docs.results.pages run pages 300 "$checkpoint" --json "$work/pages.json" ;;
    kept) run kept 200 bench wake "$checkpoint" --variants pipelined,kept-8,kept-8-middle,kept-8-last \
        --prompt-tokens 7 2048 --cycles 10 --requests 0 --limit-s 70 --engine "$blocks" --json "$work/kept.json" ;;
    eval) run eval 180 eval "$checkpoint" --cycles 3 --assert-ttft 5 --json "$work/eval.json" ;;
    others) run others 500 bench wake "$checkpoint" --variants pipelined,to,to-pinned,memory-saver-retained,memory-saver,dispatch-auto,fresh-load \
        --cycles 3 --other-cycles 2 --requests 0 --limit-s 400 --engine "$blocks" --json "$work/others.json" ;;
    many) many many "$small" "${MODELS:-16}" "${BUDGET:-31 GiB}" ;;  # four awake, and what sleepers keep
    many7) many many7 "$shape" "${MODELS:-5}" "${BUDGET:-38 GiB}" ;;  # two
    swaps) SHARING='{min_awake_s: 0, max_wait_s: 8}' asked swaps swaps "$shape" 2 "${BUDGET:-22 GiB}" ;;  # one
    agents) asked agents agents "$shape" 3 "${BUDGET:-38 GiB}" --requests 24 --every 7 --output-tokens 850 ;;  # two
    hot)
        asked hot_alone hot "$small" 1 "${BUDGET:-15 GiB}" --models 1
        asked hot hot "$small" 8 "${BUDGET:-15 GiB}" --models 8 ;;
    rare) asked rare rare "$small" "${MODELS:-24}" "${BUDGET:-31 GiB}" --models "${MODELS:-24}" ;;
    soak) run soak 500 bench soak "$checkpoint" --cycles "${SOAK_CYCLES:-400}" --limit-s 400 --engine "$blocks" --json "$work/soak.json" ;;
    *) echo "no part or step $1" >&2; exit 2 ;;
    esac
}

part() {  # NAME
    local steps=$1 each
    case $1 in
    wake) steps='wake throughput wake_default timeline' ;;
    serve) steps='serve http load' ;;
    soak) steps='soak eval wishes' ;;
    others) steps='others kept' ;;
    esac
    archive=$out/$1.tar.gz
    ends=$((SECONDS + ${LIMIT_S:-530}))
    rm -rf "${work:?}"/*
    [[ " many many7 swaps agents hot rare products tests " == *" $1 "* || -e $checkpoint/config.json ]] || run checkpoint 180 make-checkpoint "$checkpoint" --shape "$shape"
    for each in $steps; do step "$each"; done
    pack  # also what the server said that ran beside the last step
}

for name in ${*:-pages wake serve soak others}; do part "$name"; done
