# Attention in blocks: kernels, GPU tests, whole steps. One H200, 590 s.
. experiments/next/setup.sh; export PYTHONUNBUFFERED=1; nvidia-smi --query-gpu=name --format=csv,noheader
timeout 60 python3 -m pytest -q -p no:cacheprovider -m gpu tests/models/test_block_attention.py -n 6 2>&1 | tail -3
timeout 110 python3 experiments/attention_bench.py $OUT/attention.json > $OUT/attention.txt 2>&1; tail -70 $OUT/attention.txt | cut -c1-230; echo T $SECONDS
timeout 250 python3 experiments/blocks.py --models ViT-L-14 --size 2048 --steps 2 --variants blocked cudnn flash --budget 230 --output $OUT/blocks-l14.json 2>&1 | grep variant; echo T $SECONDS
timeout $((585 - SECONDS)) python3 experiments/blocks.py --models ViT-B-16 --size 4096 --steps 3 --variants blocked cudnn flash --budget 150 --output $OUT/blocks-b16.json 2>&1 | grep variant
