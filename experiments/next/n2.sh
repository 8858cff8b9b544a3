# Steps of the trainer with its defaults. One H200, 590 s. Then benchmarks/plan_check.py here.
. experiments/next/setup.sh; export PYTHONUNBUFFERED=1; nvidia-smi --query-gpu=name --format=csv,noheader
cp benchmarks/results/throughput.json /tmp/tp.json
tp() { timeout $((585 - SECONDS)) python3 benchmarks/throughput.py --append --output /tmp/tp.json "$@" > $OUT/tp.txt 2>&1; cp /tmp/tp.json $OUT/; grep pairs/s $OUT/tp.txt | cut -c1-300; echo T $SECONDS; }
tp --models ViT-L-14 --batch-sizes 32768 --contenders megabatch --steps 2
tp --models ViT-B-16 --batch-sizes 32768 --contenders megabatch
tp --models ViT-B-32 --batch-sizes 4096 --contenders megabatch
