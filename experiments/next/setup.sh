[ -d /tmp/site ] || python3 -m pip install -q --no-index --no-deps --target /tmp/site .whl/*.whl 2>&1 | grep -v WARN
export PYTHONPATH=/tmp/site:$PWD/src:$PWD/benchmarks TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
mkdir -p /tmp/data /tmp/r; cp -n .npza/*.npz .npzb/*.npz /tmp/data/ 2>/dev/null
[ -f .npzc/icons32.tar.xz ] && [ ! -d /tmp/data/icons32 ] && tar xJf .npzc/icons32.tar.xz -C /tmp/data
[ -f /tmp/bs.json ] || cp benchmarks/results/batch-study.json /tmp/bs.json
END=${END:-583}
on() { export CUDA_VISIBLE_DEVICES=$1; }
left() { echo $((END - SECONDS > 1 ? END - SECONDS : 1)); }
said() { echo "== $1 T $SECONDS"; }
study() { timeout $(left) python3 benchmarks/batch_study.py --data $1 --icons /tmp/data/icons.npz --texts /tmp/data/texts.npz --output /tmp/bs.json --gpus $2 --budget-seconds $((END - 25 - SECONDS)) > $OUT/0.txt 2>&1; said study; }
steps() { timeout $(left) python3 benchmarks/step_time.py --models $2 --kept $3 $4 --append --output $OUT/step-time-$1.json >> $OUT/$1.txt 2>&1; said "steps $2"; }
tp() { cp -n benchmarks/results/throughput.json $OUT/tp$1.json; timeout $(left) python3 benchmarks/throughput.py --append --output $OUT/tp$1.json --models $2 --batch-sizes $3 --contenders megabatch --steps $4 $5 $6 >> $OUT/$1.txt 2>&1; said "tp $2"; }
whole() { timeout $(left) python3 benchmarks/same_accuracy.py --train-data /tmp/data/icons32/train --val-data /tmp/data/icons32/test --set model=ViT-B-32 torchcompile=True lr=5e-4 --contenders cached --micro-batches 2 --batch-size 4096 --steps 240 --seeds 3 --device cuda --precision $2 --budget-seconds $((END - 10 - SECONDS)) --output /tmp/precision-$2.json >> $OUT/$1.txt 2>&1; cp /tmp/precision-$2.json $OUT/; said "whole $2"; }
last() { for i in "$@"; do echo "== $i"; grep -v "arn\|^$" $OUT/$i.txt | tail -${N:-16} | cut -c1-300; done; }
