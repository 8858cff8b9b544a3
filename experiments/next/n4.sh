# The table of a step's time, and what single_gpu.py left; one H200, 590 s.
. experiments/next/setup.sh
for m in "ViT-B-32 2 3" "ViT-L-14 0 1" "ViT-B-16 3 2" "minilm 0 8" "bert-base 2 6"; do set -- $m; timeout 80 python3 benchmarks/step_time.py --models $1 --kept $2 $3 --append --output $OUT/step-time.json 2>&1 | tail -26; echo T $SECONDS; done
timeout $((585 - SECONDS)) python3 benchmarks/single_gpu.py --only 16 --only 17 --only 18 --only 19 --only 20 --only 21 --output $OUT/single-gpu-rest.json 2>&1 | tail -40
