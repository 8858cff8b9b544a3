# OpenCLIP's own trainer, and where a step's time goes. One H200, 590 s.
. experiments/next/setup.sh; export PYTHONUNBUFFERED=1
timeout 330 python3 benchmarks/openclip_trainer.py --device cuda --processes 1 --model ViT-B-32 --batch-size 32768 --accum-freq 64 --steps 6 --precision amp_bf16 --options "--workers 14" --output $OUT/openclip-trainer-gpu.json > $OUT/oct.txt 2>&1; tail -3 $OUT/oct.txt | cut -c1-400; echo T $SECONDS
for m in "ViT-B-32 2 3" "ViT-L-14 0 1" "ViT-B-16 3 2" "minilm 0 8" "bert-base 2 6"; do set -- $m; timeout $((585 - SECONDS)) python3 benchmarks/step_time.py --models $1 --kept $2 $3 --append --output $OUT/step-time.json 2>&1 | tail -12; echo T $SECONDS; done
