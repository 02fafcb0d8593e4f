#!/usr/bin/env bash
# The figures of one GPU host, as JSON files in a directory:
#
#   bash docs/results/measure.sh DIR                      # everything, about 30 minutes
#   bash docs/results/measure.sh DIR wake throughput      # some steps, in this order
#
# Several GPUs: one call for each, at once, with its own CUDA_VISIBLE_DEVICES and steps. Those whose times are
# to be compared with the link's (wake, wake_default, kept, others) want a host that does nothing else.
#
#   python docs/results/table.py                          # then: the README's table
#   sleepserve bench report DIR/*.json --report DIR       # and the page with plots
#
# CHECKPOINT is where the checkpoint is, or is made; PY the interpreter. Each step has a time limit, and one
# that fails does not keep the others back. BLOCKS: a KV cache of 8.2 GiB, so that runs can be compared.
set -u

out=$(mkdir -p "$1" && cd "$1" && pwd); shift
project=$(cd "$(dirname "$0")/../.." && pwd)
checkpoint=${CHECKPOINT:-/tmp/deepseek-r1-distill-qwen-7b}
demo=${DEMO:-/tmp/demo-bfloat16}
blocks="num_blocks=${BLOCKS:-600}"
config=${CONFIG:-configs/deepseek-r1-distill-qwen-7b_h200.yaml}
port=${PORT:-8321}
export PYTHONPATH=$project${PYTHONPATH:+:$PYTHONPATH} RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 PYTHONUNBUFFERED=1
cd "$project" || exit 1

run() {  # NAME SECONDS ARGUMENT...
    local name=$1 seconds=$2 began=$SECONDS
    shift 2
    timeout --signal=INT --kill-after=20 "$seconds" "${PY:-python3}" -m serve_app.cli "$@" > "$out/$name.txt" 2> "$out/$name.log"
    echo "$name: exit code $?, $((SECONDS - began)) s"
}

serve() {  # COMMAND...: while a server runs whose model falls asleep after 2 s without requests
    local server ask=(curl -sf -m 60 "127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' -d '{"prompt": "Hi", "max_tokens": 4}')
    "${PY:-python3}" - "$config" "$checkpoint" "$port" > "$out/serve_config.yaml" << 'PYTHON'
import sys
import yaml
settings, checkpoint, port = sys.argv[1:]
model = yaml.safe_load(open(settings)) | {"source": {"id": checkpoint}}
model["sleep"] = model.get("sleep", {}) | {"idle_timeout_s": 2.0}
config = yaml.safe_load(open("docs/results/serve_many.yaml"))
config["http_options"]["port"] = int(port)
for application in config["applications"]:
    application["args"]["models"] = [model]
yaml.safe_dump(config, sys.stdout)
PYTHON
    set -m  # a job that bash does not control ignores SIGINT
    RAY_SERVE_PROXY_USE_GRPC=1 "${PY:-python3}" -m ray.serve.scripts run "$out/serve_config.yaml" > "$out/serve_many.log" 2>&1 &
    server=$!
    set +m
    for _ in $(seq 120); do "${ask[@]}" > "$out/ready.txt" && break; sleep 1; done
    for _ in $(seq "${COMPILES_S:-60}"); do grep -q 'decoder layers run compiled' "$out/serve_many.log" && break; sleep 1; done
    "$@"
    kill -INT "$server"
    wait "$server"
}

http() {
    local url="http://127.0.0.1:$port"
    run http_closed 120 bench http --url "$url" --endpoint completions --concurrency 1 16 64 256 --json "$out/http_closed.json"
    run http_open 120 bench http --url "$url" --endpoint completions --request-rate 10 40 80 --duration 10 --json "$out/http_open.json"
    run http_cold 120 bench http --url "$url" --endpoint completions --concurrency 4 --requests 80 --idle-every 8 --idle-s 3 --max-tokens 32 --json "$out/http_cold.json"
}

step() {
    case $1 in
    checkpoint)
        [ -e "$checkpoint/config.json" ] ||
            run checkpoint 180 make-checkpoint "$checkpoint" --shape deepseek-r1-distill-qwen-7b
        [ -e "$demo/config.json" ] || run demo 60 make-checkpoint "$demo" --shape demo --dtype bfloat16 ;;
    wake) run wake 240 bench wake "$checkpoint" --variants pipelined,serial,unpinned,kept-sweep \
        --cycles 20 --limit-s 110 --assert goals --engine "$blocks" --json "$out/wake.json" ;;
    wake_default) run wake_default 150 bench wake "$checkpoint" --variants pipelined --cycles 20 --limit-s 45 \
        --engine num_blocks=null max_batch_tokens=8192 max_requests_per_batch=256 --json "$out/wake_default.json" ;;
    kept) run kept 200 bench wake "$checkpoint" --variants pipelined,kept-8,kept-8-middle,kept-8-last \
        --prompt-tokens 7 2048 --cycles 10 --requests 0 --limit-s 70 --engine "$blocks" --json "$out/kept.json" ;;
    others) run others 480 bench wake "$checkpoint" --variants others --cycles 3 --other-cycles 2 \
        --requests 0 --limit-s 420 --engine "$blocks" --json "$out/others.json" ;;
    throughput) mkdir -p "$out/profile"
        run throughput 200 bench throughput "$checkpoint" --engine "$blocks" --profile "$out/profile" --json "$out/throughput.json" ;;
    serve) run serve 420 bench serve "$checkpoint" --config "$config" --serve-config docs/results/serve_many.yaml --engine "$blocks" \
        --concurrency 16 64 256 --warm-when 'decoder layers run compiled' --json "$out/serve.json" --log "$out/serve_run.log" ;;
    http) serve http ;;
    load) run load 300 bench load "$checkpoint" --engine "$blocks" --json "$out/load.json" ;;
    eval) run eval 180 eval "$checkpoint" --cycles 3 --assert-ttft 5 --json "$out/eval.json" ;;
    soak) run soak 540 bench soak "$checkpoint" --cycles 1000 --limit-s 440 --engine "$blocks" --json "$out/soak.json" ;;
    soak-demo) run soak-demo 120 bench soak "$demo" --cycles 1000 --limit-s 60 --json "$out/soak_demo.json" ;;
    *) echo "no step $1" >&2; exit 2 ;;
    esac
}

for name in "${@:-checkpoint wake wake_default kept others throughput serve http load eval soak}"; do
    for each in $name; do step "$each"; done
done
